"""Conditions under which models with windows are served: with blocks of their own, or one table and a host tier."""

import tempfile
from pathlib import Path

import torch
from support.condition_trial import Condition, ConditionTrial
from support.disk_engines import NUM_COMMON, prompts_of, serve, serve_elsewhere
from support.models import WINDOW
from support.window_engines import B

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
            trial.warm(engine, common)
            trial.ask(engine, trial.diverging(common, position), position // B * B)
        trial.check(engine)


def in_portions(trial: ConditionTrial) -> None:
    """Portions of 7, longer than a window."""
    engine, first = trial.make_engine(max_num_batched_tokens=PORTION), trial.prompt(7 * B + 3)
    trial.ask(engine, first, 0)
    trial.ask(engine, trial.diverging(first, 3 * PORTION), 3 * PORTION // B * B)
    trial.ask_many(trial.make_engine(max_num_batched_tokens=PORTION))


def preempted(trial: ConditionTrial) -> None:
    """Requests give way to others where windows have the least of blocks, and are computed again."""
    engine = trial.make_engine(num_blocks=40, num_window_blocks=LEAST, max_num_batched_tokens=13)
    trial.ask_many(engine)
    assert engine.stats().num_preemptions > 0


def forked(trial: ConditionTrial) -> None:
    """Samples of one request, and branches."""
    trial.ask_forks(trial.make_engine(), trial.prompt(3 * B + 2))


def wholly_cached(trial: ConditionTrial) -> None:
    """A prompt comes again, and then its answer before a further question."""
    for length in (3 * B, 7 * B + 3):
        engine, prompt = trial.make_engine(), trial.prompt(length)
        answer = trial.ask(engine, prompt, 0)
        trial.ask(engine, prompt, (length - 1) // B * B)
        longer = [*prompt, *answer]
        trial.ask(engine, [*longer, 3, 5], (len(longer) - 1) // B * B)
        trial.check(engine)


def evicted(trial: ConditionTrial) -> None:
    """The blocks behind the window are others' by then: nothing is found, though the full layers have all."""
    engine = trial.make_engine(num_window_blocks=LEAST, max_num_batched_tokens=PORTION)
    prompt = trial.prompt(7 * B + 1)
    for _ in range(2):
        trial.ask(engine, prompt, 0)
    trial.check(engine)


def swapped(trial: ConditionTrial) -> None:
    """One table of all layers: requests give way to others, go to the host, and come back."""
    engine = trial.make_engine(num_blocks=20, num_window_blocks=None, num_host_blocks=40)
    trial.ask_many(engine)
    assert engine.stats().num_swaps > 0


def from_host(trial: ConditionTrial) -> None:
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


def from_memory(trial: ConditionTrial) -> None:
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


def from_disk(trial: ConditionTrial) -> None:
    """One process stores, and another one goes on."""
    prompts = prompts_of(trial.seed)
    shared = NUM_COMMON // B * B
    with tempfile.TemporaryDirectory() as folder:
        first = serve(Path(folder), trial.seed, [trial.kind])[trial.kind]
        second = serve_elsewhere(Path(folder), trial.seed, [trial.kind])[trial.kind]
    ends = [(len(prompt) - 1) // B * B for prompt in prompts]
    for served, hits in ((first, [0, shared, shared, ends[-1]]), (second, ends)):
        trial.compare_all(prompts, [tokens for tokens, _ in served])
        assert [num_cached for _, num_cached in served] == hits, f"{trial.kind}, seed {trial.seed}: {served}"


CONDITIONS: dict[str, Condition] = {
    "preempted": preempted,
    "from disk": from_disk,
    "evicted": evicted,
    "from the host": from_host,
    "swapped": swapped,
    "from memory": from_memory,
    "shared in the first block": lambda trial: shared(trial, 0),
    "shared in the second block": lambda trial: shared(trial, 1),
    "shared in the third block": lambda trial: shared(trial, 2),
    "in portions": in_portions,
    "forked": forked,
    "wholly cached": wholly_cached,
}
"""By name. The first ones are those of the short form."""
