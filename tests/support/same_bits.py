"""Lives of engines that must all give the same bits: random schedules of requests, against each request alone.

    oracle      one request at a time, the whole prompt in one step, nothing cached
    a life      random portions, blocks, tiers, threads and times of arrival; prefixes are shared; a step may fail

Outcomes are token ids and log-probabilities of the token and of the likeliest ones, as Python floats: compared by ==.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, RequestOutput, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of

B = 4
LONGEST = 90
CODECS = "raw", "zstd", "split"
Outcome = list[tuple[list[int], list[tuple[float, int, list[tuple[int, float]]]]]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: a prompt and its parameters."""

    tokens: list[int]
    params: SamplingParams


def make_engine(model: PreTrainedModel, portion: int = 256, num_blocks: int = 400, **options: Any) -> Engine:
    """options: of EngineConfig, but num_cpu_blocks, cache_dtype and backend of CacheConfig."""
    fields = {name: options.pop(name) for name in ("num_cpu_blocks", "cache_dtype", "backend") if name in options}
    config = EngineConfig(
        CacheConfig(B, num_blocks, **fields),
        max_num_batched_tokens=portion,
        load_or_compute=False,
        **{"same_bits": True, **options},
    )
    return Engine.from_model(model, config)


def outcome(output: RequestOutput) -> Outcome:
    """Everything of an answer that must not depend on anything else."""
    assert output.error is None, output.error
    return [
        (sample.token_ids, [(token.logprob, token.rank, token.top) for token in sample.logprobs or ()])
        for sample in output.samples
    ]


def alone(model: PreTrainedModel, asked: list[Asked], **options: Any) -> list[Outcome]:
    """The outcome of each request, computed by itself in one portion, where nothing is cached."""
    engine = make_engine(model, enable_prefix_caching=False, **options)
    return [outcome(engine.generate([one.tokens], one.params)[0]) for one in asked]


def requests(rng: random.Random, num: int, vocab_size: int) -> list[Asked]:
    """Prompts of 1 to LONGEST tokens, most of which begin like another one; greedy, and drawn with seeds."""
    asked: list[Asked] = []
    for _ in range(num):
        tokens = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, LONGEST))]
        if asked and rng.random() < 0.7:
            shared = rng.choice(asked).tokens
            tokens = (shared[: rng.randint(1, len(shared))] + tokens)[:LONGEST]
        drawn = {"temperature": 0.9, "top_p": 0.95, "top_k": 30, "seed": rng.randrange(1000), "n": rng.randint(1, 3)}
        rules = drawn if rng.random() < 0.5 else {"temperature": 0.0}
        asked.append(Asked(tokens, SamplingParams(max_tokens=rng.randint(1, 8), logprobs=2, ignore_eos=True, **rules)))
    return asked


@contextmanager
def threads(num: int) -> Iterator[None]:
    """torch has this number of threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def failing_once(model: PreTrainedModel, at: int) -> Iterator[None]:
    """Inside, the forward with this number raises."""
    calls = iter(range(1 << 30))

    def hook(*_: Any) -> None:
        if next(calls) == at:
            raise RuntimeError("a step that fails")

    handle = model.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def live(engine: Engine, asked: list[Asked], rng: random.Random) -> list[Outcome]:
    """Run the requests, which come at random times. Return the outcomes in their order."""
    waiting, ids, outputs = list(range(len(asked))), {}, dict[str, RequestOutput]()
    rng.shuffle(waiting)
    while waiting or engine.has_unfinished:
        while waiting and rng.random() < 0.5:
            index = waiting.pop()
            ids[index] = engine.add_request(asked[index].tokens, asked[index].params, priority=rng.randint(0, 1))
        try:
            steps = engine.step()
        except RuntimeError as error:
            assert "a step that fails" in str(error)
            continue
        outputs.update({step.request_id: step.output for step in steps if step.output})
    engine.manager.check()
    return [outcome(outputs[ids[index]]) for index in range(len(asked))]


def options_of(rng: random.Random) -> dict[str, Any]:
    """Random settings of an engine that change no bit. Few blocks make it preempt, with a host tier by swaps."""
    options: dict[str, Any] = {
        "portion": rng.choice([1, 3, 7, 16, 33, 256]),
        "num_blocks": rng.choice([40, 60, 400]),
        "num_cpu_blocks": rng.choice([0, 30, 200]),
        "max_num_seqs": rng.choice([3, 4, 8]),
        "share_parts": rng.random() < 0.5,
        "enable_prefix_caching": rng.random() < 0.9,
    }
    if rng.random() < 0.2:
        options["native_layers"] = False
    return options


def check_life(
    model: PreTrainedModel,
    rng: random.Random,
    folder: Path,
    num_requests: int,
    make: Callable[..., Engine] = make_engine,
    **fields: Any,
) -> None:
    """Assert that a random life gives the bits of each request alone. fields: of all of its engines.

    Native layers and torch's own round differently: both lives are of one kind.
    """
    options = options_of(rng)
    has_layers = options.pop("native_layers", True)
    fields = {**fields, "native_layers": has_layers}
    asked = requests(rng, num_requests, min(190, model.config.get_text_config().vocab_size))
    expected = alone(model, asked, **fields)
    engine = make(model, **options, **fields)
    if not options["enable_prefix_caching"]:
        with threads(rng.choice([1, 2, 4])), failing_once(model, rng.randint(2, 40)):
            assert live(engine, asked, rng) == expected, options
        return
    chunk, codec = (
        B * rng.choice([1, 2, 4]),
        rng.choice(CODECS[: 2 if model.dtype == torch.float32 else 3]),
    )  # fp32 has no split
    tier = rng.choice(["memory://?size=8MiB", f"disk://{folder}?size=16MiB&segment=8MiB"])
    config = KVStoreConfig(chunk, (tier,), codec=codec)
    with KVStore(config, metadata_of(engine.cache, "m")) as store:
        engine.use_store(store)
        for _ in range(2):  # the second time out of the store
            with threads(rng.choice([1, 2, 4])), failing_once(model, rng.randint(2, 40)):
                assert live(engine, asked, rng) == expected, (options, config)
            engine.reset_prefix_cache()
        engine.close()
