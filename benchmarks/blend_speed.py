"""Time to first token of blended prompts, through the engine: the measuring part of bench_blend."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM

from kvpage import CacheConfig
from kvpage.benchmarks.cells import Row
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.serving_workloads import Shape
from kvpage.benchmarks.serving_workloads import make_model as make_llama
from kvpage.blend import BlendConfig
from kvpage.blend.segments import MemorySegments
from kvpage.serving import Engine, EngineConfig, SamplingParams

BLOCK_SIZE = 16
QUESTION_TOKENS, VOCAB = 32, 4096
ONE = SamplingParams(max_tokens=1)
SMALL, LLAMA_3_8B = Shape(16, 768, 2048, 12, 12), Shape(32, 4096, 14336, 32, 8)
Key = tuple[str, float | None]
"""A method, and the ratio of blending."""
FULL, PREFIX = ("full", None), ("prefix", None)


def make_model(shape: Shape, device: str) -> Any:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return make_llama(shape, dtype, VOCAB, max_position_embeddings=16384, initializer_range=0.02)


def row_flops(shape: Shape, mean_keys: float) -> tuple[float, float]:
    """Return the operations of one row in one layer: of K and V, and of all with attention to so many keys."""
    kv = 4 * shape.hidden**2 * shape.kv_heads // shape.heads
    rest = 4 * shape.hidden**2 + 6 * shape.hidden * shape.intermediate
    return float(kv), kv + rest + 4.0 * shape.hidden * mean_keys


def full_flops(shape: Shape, cached: int, num_tokens: int) -> float:
    """Return the operations of all rows after `cached` tokens, each of which attends to the tokens before it."""
    return blend_flops(shape, cached, num_tokens, None, num_tokens - cached)


def blend_flops(shape: Shape, cached: int, num_tokens: int, check_layer: int | None, num_chosen: int) -> float:
    """The layers before the check layer for all rows, its K and V for all, and the rest for those that were chosen; all
    layers for these alone where they are chosen before (None)."""
    kv, row = row_flops(shape, (cached + num_tokens) / 2)
    num_rows = num_tokens - cached
    if check_layer is None:
        return shape.layers * num_chosen * row
    behind = (shape.layers - check_layer) * num_chosen * row
    return check_layer * num_rows * row + behind + (num_rows - num_chosen) * kv


def work(shape: Shape, key: Key, num_tokens: int, segment: int, check_layer: int | None, num_recomputed: int) -> float:
    """flops of a prompt whose first segment is cached, but for a full recompute."""
    cached = segment // BLOCK_SIZE * BLOCK_SIZE
    if key in (FULL, PREFIX):
        return full_flops(shape, cached if key == PREFIX else 0, num_tokens)
    return blend_flops(shape, cached, num_tokens, check_layer, num_recomputed + QUESTION_TOKENS)


class Prompts:
    """Segments of tokens, each prompt in an order of its own after a first token of its own, then a question."""

    def __init__(self, num_tokens: int, segment_tokens: int, vocab_size: int, seed: int = 0) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self._vocab_size = vocab_size
        self.segments = [self.tokens(segment_tokens) for _ in range(num_tokens // segment_tokens)]

    def tokens(self, count: int) -> list[int]:
        """Return random ones."""
        return torch.randint(1, self._vocab_size, (count,), generator=self._draw).tolist()

    def next(self, num_segments: int | None = None) -> tuple[list[int], list[int]]:
        """A prompt of all segments, or so many, of which the first is the first one ever, and their lengths."""
        order = [0, *(1 + torch.randperm(len(self.segments) - 1, generator=self._draw)).tolist()][:num_segments]
        parts = [self.segments[index] for index in order]
        tokens = [token for part in parts for token in part]
        return tokens + self.tokens(QUESTION_TOKENS), [len(part) for part in parts]


class First(NamedTuple):
    """A prompt's first token, after how many seconds of the clock and of the processor, with how many reused tokens
    computed again."""

    token: int
    seconds: float
    cpu: float
    num_recomputed: int


def first_token(engine: Engine, tokens: list[int], lengths: list[int] | None, namespace: bytes = b"") -> First:
    """lengths: of the prompt's segments, to blend them."""
    before, cpu_before = time.perf_counter(), time.process_time()
    request = engine.add_request(tokens, ONE, None, namespace, blend=lengths is not None, segments=lengths)
    outputs: dict[str, Any] = {}
    while engine.has_unfinished:
        outputs |= {one.request_id: one.output for one in engine.step() if one.output}
    taken, cpu, output = time.perf_counter() - before, time.process_time() - cpu_before, outputs[request]
    return First(output.token_ids[0], taken, cpu, output.num_recomputed_tokens)


def make_engine(
    model: LlamaForCausalLM, num_tokens: int, blend: BlendConfig | None, segments: MemorySegments | None = None
) -> Engine:
    most = num_tokens + QUESTION_TOKENS + BLOCK_SIZE
    config = EngineConfig(
        CacheConfig(BLOCK_SIZE, 4 * most // BLOCK_SIZE + 64), max_num_batched_tokens=most, blend=blend
    )
    return Engine.from_model(model, config, segments=segments)


def warming(shape: Shape, num_tokens: int, rounds: int, device: str) -> Row:
    """Measure the warming of a segment of so many tokens, in turns: computed by itself ("alone"), and with its
    sensitivity, once more after itself ("measured")."""
    model = make_model(shape, device)
    prompts = Prompts(0, 1, model.config.vocab_size, seed=1)
    engines = {uses: make_engine(model, 2 * num_tokens, BlendConfig(uses_sensitivity=uses)) for uses in (False, True)}
    calls = {
        name: lambda engine=engines[uses]: engine.warm_segments([prompts.tokens(num_tokens)])
        for name, uses in (("alone", False), ("measured", True))
    }
    taken = in_turns(calls, rounds)
    figures = {name: Figure.of(each) for name, each in taken.items()}
    return {**figures, "times_as_long": Figure.ratio(taken["measured"], taken["alone"])}


def engines_of(model: Any, prompts: Prompts, ratios: Sequence[float], check_layer: int | None) -> dict[Key, Engine]:
    """Return the engines that are compared. Segments are kept once for all; each engine that blends has the first one
    in its own prefix tree."""
    num_tokens = sum(map(len, prompts.segments))
    engines: dict[Key, Engine] = {key: make_engine(model, num_tokens, None) for key in (FULL, PREFIX)}
    kept = MemorySegments(1 << 40)
    for ratio in ratios:
        config = BlendConfig(ratio, check_layer, uses_sensitivity=check_layer is None)
        engine = engines["blend", ratio] = make_engine(model, num_tokens, config, kept)
        engine.warm_segments(prompts.segments)
        engine.generate([prompts.segments[0]], ONE)
    return engines


def measure(
    shape: Shape,
    num_tokens: int,
    ratios: Sequence[float],
    check_layer: int | None,
    rounds: int,
    device: str,
    segment: int,
) -> list[Row]:
    """Return a row a method; they take turns.

    check_layer: None for the default: rows are chosen before the first layer, as the segments know their sensitivity.
    Else it chooses without.
    """
    model = make_model(shape, device)
    prompts = Prompts(num_tokens, segment, model.config.vocab_size)
    engines = engines_of(model, prompts, ratios, check_layer)
    first: dict[Key, list[First]] = {key: [] for key in engines}
    for turn in range(rounds + 1):
        tokens, lengths = prompts.next(None if turn else 2)  # the first round warms up
        # What earlier prompts began with, beyond the first segment, must not be found.
        alone = str(turn).encode()
        first_token(engines[PREFIX], prompts.segments[0], None, alone)
        for key, engine in engines.items():
            if key == FULL:
                engine.reset_prefix_cache()
            is_blend = key not in (FULL, PREFIX)
            first[key].append(first_token(engine, tokens, lengths if is_blend else None, b"" if is_blend else alone))
    exact = [key for key in (PREFIX, ("blend", 1.0)) if key in first]
    for key in exact:
        given, wanted = ([one.token for one in first[which]] for which in (key, FULL))
        assert given == wanted, f"{key[0]} gives other tokens"
    flops = {
        key: work(shape, key, len(tokens), segment, check_layer, each[-1].num_recomputed) for key, each in first.items()
    }
    return [row(key, len(tokens), each[1:], first[FULL][1:], flops) for key, each in first.items()]


def row(key: Key, num_tokens: int, each: Sequence[First], full: Sequence[First], flops: dict[Key, float]) -> Row:
    """Return the times of a method: by the clock, and by the process's processor time, which on a busy machine is
    surer. Speed-ups are over the full recompute of the same turn. Its flops, of the products with weights and of
    attention, over the method's are their ceiling."""
    seconds, cpu = [one.seconds for one in each], [one.cpu for one in each]
    speedup, ceiling = Figure.ratio([one.seconds for one in full], seconds), flops[FULL] / flops[key]
    return {
        "method": key[0],
        "num_tokens": num_tokens,
        "ratio": key[1],
        "seconds": Figure.of(seconds),
        "cpu": Figure.of(cpu),
        "speedup": speedup,
        "cpu_speedup": Figure.ratio([one.cpu for one in full], cpu),
        "flops": flops[key],
        "num_recomputed": each[-1].num_recomputed,
        "ceiling": ceiling,
        "of ceiling": speedup.median / ceiling,
    }
