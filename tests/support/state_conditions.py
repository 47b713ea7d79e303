"""Conditions under which models with states are served. A trial compares each answer with that of model.generate."""

import tempfile
from pathlib import Path

from support.condition_trial import Condition, ConditionTrial
from support.disk_engines import NUM_COMMON, prompts_of, serve, serve_elsewhere
from support.state_engines import B, states_for

PORTION = 7


def shared(trial: ConditionTrial, block: int) -> None:
    """A prefix that ends at each offset of one block, at once and in portions."""
    common = trial.prompt(3 * B + 1)
    for num_tokens in (512, PORTION):
        engine = trial.make_engine(max_num_batched_tokens=num_tokens)
        for position in range(block * B + 1, (block + 1) * B + 1):
            engine.reset_prefix_cache()
            trial.poison(engine)
            trial.warm(engine, common, cache_at=[position])
            trial.ask(engine, trial.diverging(common, position), position)
        trial.check(engine)


def in_portions(trial: ConditionTrial) -> None:
    """Portions of 7, with a mark amid one, and where prompts diverge."""
    engine, first = trial.make_engine(max_num_batched_tokens=PORTION), trial.prompt(4 * B + 3)
    trial.ask(engine, first, 0, cache_at=[PORTION + 3])
    trial.ask(engine, trial.diverging(first, PORTION + 3), PORTION + 3)
    trial.ask(engine, trial.diverging(first, 2 * PORTION + 1), PORTION + 3)
    trial.ask(engine, [*first[: 2 * PORTION + 1], 95, 4], 2 * PORTION + 1)
    trial.ask_many(trial.make_engine(max_num_batched_tokens=PORTION))


def preempted(trial: ConditionTrial) -> None:
    """Requests give way to others, and are computed again."""
    engine = trial.make_engine(num_blocks=20)
    trial.ask_many(engine)
    assert engine.stats().num_preemptions > 0 and engine.stats().num_swaps == 0


def swapped(trial: ConditionTrial) -> None:
    """Requests give way to others, go to the host, and come back."""
    budget = states_for(trial.make_engine(), 2, 8)
    engine = trial.make_engine(num_blocks=20, num_host_blocks=40, states=budget)
    trial.ask_many(engine)
    assert engine.stats().num_swaps > 0


def forked(trial: ConditionTrial) -> None:
    """Samples of one request, and branches."""
    trial.ask_forks(trial.make_engine(), trial.prompt(2 * B + 3))


def wholly_cached(trial: ConditionTrial) -> None:
    """A prompt comes again, and then its answer before a further question."""
    for length in (3 * B, 4 * B + 3):
        engine, prompt = trial.make_engine(), trial.prompt(length)
        answer = trial.ask(engine, prompt, 0)
        trial.ask(engine, prompt, length - 1)
        longer = [*prompt, *answer]
        trial.ask(engine, [*longer, 3, 5], len(longer) - 1)  # its last token was never computed
        trial.check(engine)


def evicted(trial: ConditionTrial) -> None:
    """Room for one checkpoint, which others take."""
    engine = trial.make_engine(states=states_for(trial.make_engine(), 1), max_num_seqs=1)
    prompt = trial.prompt(4 * B + 3)
    for _ in range(2):
        trial.ask(engine, prompt, 0)
        for number in range(1, 4):
            trial.warm(engine, trial.prompt(9, number))
    assert engine.stats().blocks.slots.evicted > 0
    trial.check(engine)


def from_host(trial: ConditionTrial) -> None:
    """Checkpoints that others have sent to the host."""
    budget = states_for(trial.make_engine(), 1, 16)
    engine = trial.make_engine(num_host_blocks=64, states=budget, max_num_seqs=1)
    prompt = trial.prompt(4 * B + 3)
    trial.ask(engine, prompt, 0)
    for number in range(1, 4):
        trial.warm(engine, trial.prompt(9, number))
    assert engine.stats().blocks.slots.num_host_checkpoints > 0
    trial.ask(engine, prompt, len(prompt) - 1)
    trial.check(engine)


def from_disk(trial: ConditionTrial) -> None:
    """One process stores, and another one goes on."""
    prompts = prompts_of(trial.seed)
    with tempfile.TemporaryDirectory() as folder:
        first = serve(Path(folder), trial.seed, [trial.kind])[trial.kind]
        second = serve_elsewhere(Path(folder), trial.seed, [trial.kind])[trial.kind]
    for served, hits in ((first, [0, 0, NUM_COMMON, 0]), (second, [len(prompt) - 1 for prompt in prompts])):
        trial.compare_all(prompts, [tokens for tokens, _ in served])
        assert [num_cached for _, num_cached in served] == hits, f"{trial.kind}, seed {trial.seed}: {served}"


CONDITIONS: dict[str, Condition] = {
    "from disk": from_disk,
    "shared in the second block": lambda trial: shared(trial, 1),
    "swapped": swapped,
    "shared in the first block": lambda trial: shared(trial, 0),
    "shared in the third block": lambda trial: shared(trial, 2),
    "in portions": in_portions,
    "preempted": preempted,
    "forked": forked,
    "wholly cached": wholly_cached,
    "evicted": evicted,
    "from the host": from_host,
}
"""By name. The first ones are those of the short form."""
