"""Conditions under which models with states, or with windows of their own blocks, are served.

A trial compares each answer with that of model.generate.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from support.condition_trial import Condition, ConditionTrial
from support.disk_engines import NUM_COMMON, prompts_of, serve, serve_elsewhere
from support.models import WINDOW
from support.state_engines import B, states_for

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata

PORTION = 7
LEAST = WINDOW // B + 2  # blocks of a window that one sequence needs


def shared(trial: ConditionTrial, block: int) -> None:
    """A prefix that ends at each offset of one block, at once and in portions."""
    common = trial.prompt(3 * B + 1)
    for num_tokens in (512, PORTION):
        engine = trial.make_engine(max_num_batched_tokens=num_tokens)
        for position in range(block * B + 1, (block + 1) * B + 1):
            engine.reset_prefix_cache()
            trial.poison(engine)
            trial.warm(engine, common, **({"cache_at": [position]} if trial.has_states else {}))
            trial.ask(engine, trial.diverging(common, position), trial.found_at(position))
        trial.check(engine)


def forked(trial: ConditionTrial) -> None:
    """Samples of one request, and branches."""
    trial.ask_forks(trial.make_engine(), trial.prompt(3 * B + 2))


def wholly_cached(trial: ConditionTrial) -> None:
    """A prompt comes again, and then its answer before a further question.

    Mixers with limits compute an answer by another rule than a prompt: these answers are private, see States.
    """
    for length in (3 * B, 7 * B + 3):
        engine, prompt = trial.make_engine(), trial.prompt(length)
        answer = trial.ask(engine, prompt, 0)
        trial.ask(engine, prompt, trial.found_at(length - 1))
        longer, states = [*prompt, *answer], engine.manager.states
        shares_answers = states is None or states.options.shares_answers
        num_shared = len(longer) - 1 if shares_answers else length - 1  # its last token was never computed
        trial.ask(engine, [*longer, 3, 5], trial.found_at(num_shared))
        trial.check(engine)


def from_disk(trial: ConditionTrial) -> None:
    """One process stores, and another one goes on."""
    prompts = prompts_of(trial.seed)
    with tempfile.TemporaryDirectory() as folder:
        first = serve(Path(folder), trial.seed, [trial.kind])[trial.kind]
        second = serve_elsewhere(Path(folder), trial.seed, [trial.kind])[trial.kind]
    ends, common = [trial.found_at(len(prompt) - 1) for prompt in prompts], NUM_COMMON // B * B
    hits = [0, 0, NUM_COMMON, 0] if trial.has_states else [0, common, common, ends[-1]]
    for served, expected in ((first, hits), (second, ends)):
        trial.compare_all(prompts, [tokens for tokens, _ in served])
        assert [num_cached for _, num_cached in served] == expected, f"{trial.kind}, seed {trial.seed}: {served}"


COMMON: dict[str, Condition] = {
    "shared in the first block": partial(shared, block=0),
    "shared in the second block": partial(shared, block=1),
    "shared in the third block": partial(shared, block=2),
    "forked": forked,
    "wholly cached": wholly_cached,
}

# --- models with states ---


def states_in_portions(trial: ConditionTrial) -> None:
    """Portions of 7, with a mark amid one, and where prompts diverge."""
    engine, first = trial.make_engine(max_num_batched_tokens=PORTION), trial.prompt(4 * B + 3)
    trial.ask(engine, first, 0, cache_at=[PORTION + 3])
    trial.ask(engine, trial.diverging(first, PORTION + 3), PORTION + 3)
    trial.ask(engine, trial.diverging(first, 2 * PORTION + 1), PORTION + 3)
    trial.ask(engine, [*first[: 2 * PORTION + 1], 95, 4], 2 * PORTION + 1)
    trial.ask_many(trial.make_engine(max_num_batched_tokens=PORTION))


def states_preempted(trial: ConditionTrial) -> None:
    """Requests give way to others, and are computed again."""
    engine = trial.make_engine(num_blocks=20)
    trial.ask_many(engine)
    assert engine.stats().num_preemptions > 0 and engine.stats().num_swaps == 0


def states_swapped(trial: ConditionTrial) -> None:
    """Requests give way to others, go to the host, and come back."""
    budget = states_for(trial.make_engine(), 2, 8)
    engine = trial.make_engine(num_blocks=20, num_host_blocks=40, states=budget)
    trial.ask_many(engine)
    assert engine.stats().num_swaps > 0


def states_evicted(trial: ConditionTrial) -> None:
    """Room for one checkpoint, which others take."""
    engine = trial.make_engine(states=states_for(trial.make_engine(), 1), max_num_seqs=1)
    prompt = trial.prompt(4 * B + 3)
    for _ in range(2):
        trial.ask(engine, prompt, 0)
        for number in range(1, 4):
            trial.warm(engine, trial.prompt(9, number))
    assert engine.stats().blocks.slots.evicted > 0
    trial.check(engine)


def states_from_host(trial: ConditionTrial) -> None:
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


STATES: dict[str, Condition] = {
    "from disk": from_disk,
    "shared in the second block": COMMON["shared in the second block"],
    "swapped": states_swapped,
    "in portions": states_in_portions,
    "preempted": states_preempted,
    "evicted": states_evicted,
    "from the host": states_from_host,
    **COMMON,
}
"""By name. The first ones are those of the short form."""

# --- models with windows ---


def windows_in_portions(trial: ConditionTrial) -> None:
    """Portions of 7, longer than a window."""
    engine, first = trial.make_engine(max_num_batched_tokens=PORTION), trial.prompt(7 * B + 3)
    trial.ask(engine, first, 0)
    trial.ask(engine, trial.diverging(first, 3 * PORTION), 3 * PORTION // B * B)
    trial.ask_many(trial.make_engine(max_num_batched_tokens=PORTION))


def windows_preempted(trial: ConditionTrial) -> None:
    """Requests give way to others where windows have the least of blocks, and are computed again."""
    engine = trial.make_engine(num_blocks=40, num_window_blocks=LEAST, max_num_batched_tokens=13)
    trial.ask_many(engine)
    assert engine.stats().num_preemptions > 0


def windows_evicted(trial: ConditionTrial) -> None:
    """The blocks behind the window are others' by then: nothing is found, though the full layers have all."""
    engine = trial.make_engine(num_window_blocks=LEAST, max_num_batched_tokens=PORTION)
    prompt = trial.prompt(7 * B + 1)
    for _ in range(2):
        trial.ask(engine, prompt, 0)
    trial.check(engine)


def windows_swapped(trial: ConditionTrial) -> None:
    """One table of all layers: requests give way to others, go to the host, and come back."""
    engine = trial.make_engine(num_blocks=20, num_window_blocks=None, num_host_blocks=40)
    trial.ask_many(engine)
    assert engine.stats().num_swaps > 0


def windows_from_host(trial: ConditionTrial) -> None:
    """One table of all layers: blocks that others have sent to the host."""
    engine = trial.make_engine(num_blocks=16, num_window_blocks=None, num_host_blocks=96, load_or_compute=False)
    prompt = trial.prompt(7 * B + 3)
    trial.ask(engine, prompt, 0)
    for number in range(1, 4):
        trial.warm(engine, trial.prompt(7 * B, number))
    before = engine.stats().blocks.space.promoted_blocks
    trial.ask(engine, prompt, len(prompt) - 1)
    assert engine.stats().blocks.space.promoted_blocks > before
    trial.check(engine)


def windows_from_memory(trial: ConditionTrial) -> None:
    """Blocks of their own, and a store of memory: what all groups have forgotten comes back from there."""
    metadata = KVStoreMetadata(trial.kind, kv_dtype=torch.float32)
    engine, prompt = trial.make_engine(load_or_compute=False), trial.prompt(7 * B + 3)
    with KVStore(KVStoreConfig(2 * B, ("memory://?size=8MiB",)), metadata) as store:
        engine.use_store(store)
        for num_cached in (0, len(prompt) // B * B):
            trial.ask(engine, prompt, num_cached)
            engine.reset_prefix_cache()  # it waits for the store
        engine.close()
        assert store.stats().corrupt_records == 0


WINDOWS: dict[str, Condition] = {
    "preempted": windows_preempted,
    "from disk": from_disk,
    "evicted": windows_evicted,
    "from the host": windows_from_host,
    "swapped": windows_swapped,
    "from memory": windows_from_memory,
    "in portions": windows_in_portions,
    **COMMON,
}
"""By name. The first ones are those of the short form."""
