"""Time to first token of blended prompts, through the engine: the measuring part of bench_blend."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM

from kvpage import CacheConfig
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.serving_workloads import Shape as Sizes
from kvpage.benchmarks.serving_workloads import make_model as make_llama
from kvpage.blend import BlendConfig
from kvpage.blend.segments import MemorySegments
from kvpage.serving import Engine, EngineConfig, SamplingParams

BLOCK_SIZE = 16
QUESTION_TOKENS, VOCAB = 32, 4096
ONE = SamplingParams(max_tokens=1)


class Shape(NamedTuple):
    """The shape of a Llama with random weights."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int


SMALL = Shape("16 layers of 768", 16, 768, 2048, 12, 12)
LLAMA_3_8B = Shape("Llama-3-8B's shape", 32, 4096, 14336, 32, 8)


class Ttft(NamedTuple):
    """Times of one prompt. ratio: None for full recompute and prefix caching. seconds: by the clock. cpu: the process's
    processor time, which on a busy machine is surer than the clock. speedup: over the full recompute of the same turn,
    by the clock and by the processor's time.

    flops: of the products with weights and of attention; those of a full recompute over them are the ceiling of the
    speed-up.
    """

    method: str
    num_tokens: int
    ratio: float | None
    seconds: Figure
    cpu: Figure
    speedup: Figure
    cpu_speedup: Figure
    flops: float
    num_recomputed: int


def make_model(shape: Shape, device: str) -> Any:
    sizes = Sizes(shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return make_llama(sizes, dtype, VOCAB, max_position_embeddings=16384, initializer_range=0.02)


def row_flops(shape: Shape) -> tuple[float, float, float]:
    """Operations of one row in one layer: K and V, attention to one key, all else but attention."""
    kv = 4 * shape.hidden_size**2 * shape.num_kv_heads // shape.num_heads
    rest = 4 * shape.hidden_size**2 + 6 * shape.hidden_size * shape.intermediate_size
    return float(kv), 4.0 * shape.hidden_size, float(rest)


def full_flops(shape: Shape, cached: int, num_tokens: int) -> float:
    """Return the operations of all rows after `cached` tokens, each of which attends to those before it."""
    kv, key, rest = row_flops(shape)
    return shape.num_layers * (num_tokens - cached) * (kv + rest + key * (cached + num_tokens) / 2)


def blend_flops(shape: Shape, cached: int, num_tokens: int, check_layer: int | None, num_chosen: int) -> float:
    """The layers before the check layer for all rows, its K and V for all, and the rest for those that were chosen; all
    layers for these alone where they are chosen before (None)."""
    kv, key, rest = row_flops(shape)
    num_rows, mean_keys = num_tokens - cached, (cached + num_tokens) / 2
    if check_layer is None:
        return shape.num_layers * num_chosen * (kv + rest + key * mean_keys)
    before = check_layer * num_rows * (kv + rest + key * mean_keys)
    behind = (shape.num_layers - check_layer) * num_chosen * (kv + rest + key * mean_keys)
    return before + behind + (num_rows - num_chosen) * kv


class Prompts:
    """Segments of tokens, each prompt in an order of its own after a first token of its own, then a question."""

    def __init__(self, num_tokens: int, segment_tokens: int, vocab_size: int, seed: int = 0) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self._vocab_size = vocab_size
        self.segments = [self._tokens(segment_tokens) for _ in range(num_tokens // segment_tokens)]

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(1, self._vocab_size, (count,), generator=self._draw).tolist()

    def next(self, num_segments: int | None = None) -> tuple[list[int], list[int]]:
        """A prompt of all segments, or so many, of which the first is the first one ever, and their lengths."""
        order = [0, *(1 + torch.randperm(len(self.segments) - 1, generator=self._draw)).tolist()][:num_segments]
        parts = [self.segments[index] for index in order]
        tokens = [token for part in parts for token in part]
        return tokens + self._tokens(QUESTION_TOKENS), [len(part) for part in parts]


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
    model: LlamaForCausalLM,
    num_tokens: int,
    blend: BlendConfig | None,
    caching: bool = True,
    segments: MemorySegments | None = None,
) -> Engine:
    num_blocks = 4 * -(-num_tokens // BLOCK_SIZE) + 64
    return Engine.from_model(
        model,
        EngineConfig(
            CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks),
            max_num_batched_tokens=num_tokens + QUESTION_TOKENS + BLOCK_SIZE,
            enable_prefix_caching=caching,
            blend=blend,
        ),
        segments=segments,
    )


class Warming(NamedTuple):
    """Seconds that keeping a segment takes: computed by itself, and with its sensitivity, once more after itself."""

    alone: Figure
    measured: Figure
    times_as_long: Figure


def warming(shape: Shape, num_tokens: int, rounds: int, device: str) -> Warming:
    """Measure the warming of a segment of so many tokens, with and without sensitivity, in turns."""
    model = make_model(shape, device)
    taken: dict[bool, list[float]] = {False: [], True: []}
    draw = torch.Generator().manual_seed(1)
    engines = {uses: make_engine(model, 2 * num_tokens, BlendConfig(uses_sensitivity=uses)) for uses in taken}
    for _ in range(rounds + 1):  # the first one warms up
        segment = torch.randint(1, model.config.vocab_size, (num_tokens,), generator=draw).tolist()
        for uses, engine in engines.items():
            before = time.perf_counter()
            engine.warm_segments([segment])
            taken[uses].append(time.perf_counter() - before)
    alone, measured = taken[False][1:], taken[True][1:]
    return Warming(Figure.of(alone), Figure.of(measured), Figure.ratio(measured, alone))


def measure(
    shape: Shape,
    num_tokens: int,
    ratios: Sequence[float],
    check_layer: int | None,
    rounds: int,
    device: str,
    segment: int,
) -> list[Ttft]:
    """The methods take turns. check_layer: None for the default: rows are chosen before the
    first layer, as the segments know their sensitivity. Else it chooses without."""
    model = make_model(shape, device)
    prompts = Prompts(num_tokens, segment, model.config.vocab_size)
    engines: dict[tuple[str, float | None], Engine] = {
        ("full", None): make_engine(model, num_tokens, None, caching=False),
        ("prefix", None): make_engine(model, num_tokens, None),
    }
    kept = MemorySegments(1 << 40)
    for ratio in ratios:
        engine = make_engine(
            model, num_tokens, BlendConfig(ratio, check_layer, uses_sensitivity=check_layer is None), segments=kept
        )
        # The segments are kept once for all; each engine has the first one in its own prefix tree.
        engine.warm_segments(prompts.segments)
        engine.generate([prompts.segments[0]], SamplingParams(max_tokens=1))
        engines["blend", ratio] = engine
    first: dict[tuple[str, float | None], list[First]] = {key: [] for key in engines}
    for turn in range(rounds + 1):
        tokens, lengths = prompts.next(None if turn else 2)  # the first round warms up
        # What earlier prompts began with, beyond the first segment, must not be found.
        alone = str(turn).encode()
        first_token(engines["prefix", None], prompts.segments[0], None, alone)
        for key, engine in engines.items():
            is_blend = key[0] == "blend"
            first[key].append(first_token(engine, tokens, lengths if is_blend else None, b"" if is_blend else alone))
    full = [one.token for one in first["full", None]]
    exact: tuple[tuple[str, float | None], ...] = (("prefix", None), ("blend", 1.0))
    for key in exact:
        given = [one.token for one in first.get(key, first["full", None])]
        assert given == full, f"{key[0]} gives other tokens"
    results = []
    for (method, share), each in first.items():
        again = each[-1].num_recomputed
        flops = work(shape, method, len(tokens), segment, check_layer, again)
        seconds, cpu = (list(times) for times in zip(*((one.seconds, one.cpu) for one in each[1:]), strict=True))
        base = first["full", None][1:]
        base_seconds, base_cpu = [one.seconds for one in base], [one.cpu for one in base]
        gains = Figure.ratio(base_seconds, seconds), Figure.ratio(base_cpu, cpu)
        taken = Figure.of(seconds), Figure.of(cpu)
        results.append(Ttft(method, len(tokens), share, *taken, *gains, flops, again))
    return results


def work(
    shape: Shape, method: str, num_tokens: int, segment: int, check_layer: int | None, num_recomputed: int
) -> float:
    """flops of a prompt whose first segment is cached, but for a full recompute."""
    cached = segment // BLOCK_SIZE * BLOCK_SIZE
    if method == "blend":
        return blend_flops(shape, cached, num_tokens, check_layer, num_recomputed + QUESTION_TOKENS)
    return full_flops(shape, cached if method == "prefix" else 0, num_tokens)
