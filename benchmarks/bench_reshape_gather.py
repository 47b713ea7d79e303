"""How near do writing tokens, gathering them, and moving them in chunks come to copying as many bytes?

The bound is memory: a torch copy_ that reads and writes together as many bytes as the operation does, measured in the
same run, alternating with the operation. Beside it what torch offers: index_copy_ and index_select for each of K and V
(and layer). Results are checked before anything is timed.

On a CPU: calls by the clock, medians with their quartiles, and shares of the copy of the same turn. With several
threads each waits until those of OpenMP, idle after torch's copy, have ceased to spin: they would keep a processor from
whatever comes next. On a CUDA device (--device cuda): by events around up to ten calls that wait behind a delay until
all are launched (benchmarks/device_clock.py), so that it is the device that is measured; and as "call us" the host's
time until a call returns. Chunks are of all layers of a model (of eight on a CPU), on the device ("device" in format
"vllm", "hf" in "huggingface"), and in pinned host memory (against one large copy_ over the bus). Scales are 1, or with
"heads" one a head. Targets: at least 0.7 of the copy on a CPU; on a GPU 0.85 from 8k tokens. Where others keep a
machine busy, one thread (--threads 1) tells more than several.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.device_clock import DeviceClock
from kvpage.benchmarks.figure import Figure, in_turns, seconds, within
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import DEVICE, finish, option, parse, positive
from kvpage.ops import reference

BLOCK_SIZE = 16
CPU_TOKENS, CUDA_TOKENS, CHUNK_TOKENS = (1, 64, 512, 2048, 8192, 32768), (128, 1024, 8192, 65536), (256, 2048)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CALLS = 10  # at most, behind one delay of the device
FIRST = 5  # of a chunk, within a block
Call = Callable[[], object]
REST = 0.01  # seconds; OpenMP's idle threads spin for some milliseconds
COLUMNS = (
    "{operation:<18} {case:<30} {tokens:>7} {MiB:>8.2f} {us:>27.1f} {GB/s:>17.1f} {of copy:>17.2f} {of index:>17.2f} "
    "{call us:>20.1f}"
)


class Case(NamedTuple):
    model: str
    layout: CacheLayout
    num_layers: int
    head_scales: bool = False

    @property
    def name(self) -> str:
        kind = self.layout.kv_layout if self.layout.backend == "flash" else self.layout.backend
        dtype = str(self.layout.dtype).removeprefix("torch.").removesuffix("fn")
        return f"{self.model} {kind} {dtype}{' heads' if self.head_scales else ''}"

    @property
    def scales(self) -> KVScales | None:
        """One a head, no power of two; else one for all, which is 1."""
        if not self.head_scales:
            return None
        each = 0.37 + torch.arange(self.layout.num_kv_heads) / 100
        return KVScales(each, each)


def cases(device: str) -> list[Case]:
    plain = [(BF16, "flash", "NHD"), (BF16, "flash", "HND"), (BF16, "paged", "NHD"), (FP8, "flash", "NHD")]
    scaled = [(FP8, "NHD"), (FP8, "HND"), (torch.float8_e5m2, "NHD")]
    others = [(torch.int8, "flash", "NHD"), (torch.int8, "flash", "HND"), (FP8, "paged", "NHD")]
    on_cpu = [llama(dtype, "flash", kv_layout, True) for dtype, kv_layout in scaled]
    on_cpu += [llama(*each) for each in (*others, (torch.int8, "paged", "NHD"))]
    latents = [Case("deepseek", CacheLayout(BLOCK_SIZE, 1, 576, dtype, "mla"), 61) for dtype in (BF16, FP8)]
    return [*(llama(*each) for each in plain), *(on_cpu if device == "cpu" else []), *latents]


def llama(dtype: torch.dtype, backend: str, kv_layout: str, head_scales: bool = False) -> Case:
    """Return one of Llama 3 8B: 4 KiB a token and layer in bf16. Latents of DeepSeek V3 have 1,152 bytes."""
    return Case("llama", CacheLayout(BLOCK_SIZE, 8, 128, dtype, backend, kv_layout), 32, head_scales)


class Clock:
    """Times calls on a device, in turns. rounds: of each call."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self._clock = DeviceClock() if device == "cuda" else None

    def row(self, operation: str, case: Case, num_tokens: int, num_bytes: int, calls: Sequence[Call]) -> Row:
        """Return the figures of an operation. calls: its own, the copy of as many bytes, and torch's indexing."""
        numbered = {str(number): call for number, call in enumerate(calls)}
        taken, copied, indexed = in_turns(numbered, self.rounds, 1, self._seconds, warmups=2).values()
        return {
            "operation": operation,
            "case": case.name,
            "tokens": num_tokens,
            "MiB": num_bytes / 2**20,
            "us": Figure.of(taken, 1e6),
            "GB/s": Figure.rate(num_bytes / 1e9, taken),  # read and written
            "of copy": Figure.ratio(copied, taken),
            "of index": Figure.ratio(indexed, taken),
            "call us": self._call_us(calls[0]),
        }

    def copy(self, num_bytes: int) -> Call:
        """Return a copy_ that reads and writes together num_bytes."""
        source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=self.device)
        return functools.partial(torch.empty_like(source).copy_, source)

    def _seconds(self, call: Call, number: int) -> float:
        if self._clock is not None:
            return self._clock.time(call, call, CALLS).seconds
        end = time.perf_counter() + (REST if torch.get_num_threads() > 1 else 0.0)
        while time.perf_counter() < end:  # after a sleep a processor would awake slowly and with cold caches
            pass
        return seconds(call)

    def _call_us(self, call: Call) -> Figure | None:
        """Return the host's time of one call: how long the device works is not in it. None on a CPU."""
        if self._clock is None:
            return None
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            times.append(seconds(call, CALLS))
        return Figure.of(times, 1e6)


def in_rows(cache: torch.Tensor, layout: CacheLayout) -> list[torch.Tensor]:
    """K and V as bits [num_slots, ...] for torch's indexing: views of NHD, of the others copies, for timing alone."""
    return [view._bits().flatten(2).flatten(0, 1) for view in layout.views(cache) if view is not None]


def measure(case: Case, num_tokens: int, clock: Clock) -> Iterator[Row]:
    layout, device = case.layout, clock.device
    num_used = -(-num_tokens // BLOCK_SIZE)
    cache = layout.allocate(4 * num_used, 1, torch.device(device))[0]
    used = torch.randperm(4 * num_used)[:num_used]
    slots = (used[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:num_tokens].to(device)
    tables = used.to(torch.int32)[None].to(device)
    parts = 1 if layout.backend == "mla" else 2
    rows = torch.randn(parts, num_tokens, layout.num_kv_heads, layout.head_size, device=device).to(BF16)
    out = torch.empty_like(rows)
    (key, value), (key_out, value_out) = ((*part, None)[:2] for part in (rows, out))

    def reshape() -> None:
        ops.reshape_and_cache(key, value, cache, slots, layout, scales=case.scales)

    def gather() -> None:
        ops.gather_cache(cache, tables, [num_tokens], layout, out=(key_out, value_out), scales=case.scales)

    reshape()
    gather()
    want = reference.gather_cache(cache, tables, torch.tensor([num_tokens]), layout, scales=case.scales, dtype=BF16)
    for mine, other in zip((key_out, value_out), want, strict=True):
        assert mine is None or other is None or torch.equal(mine, other), "gathered is not what the reference gathers"
    assert layout.is_quantized or torch.equal(out, rows), "gathered is not what was written"
    targets, flat, flat_out = in_rows(cache, layout), rows.flatten(2), out.flatten(2)

    def index_copy() -> None:
        for target, part in zip(targets, flat, strict=True):
            target.index_copy_(0, slots, part.to(layout.dtype).view(target.dtype))

    def index_select() -> None:
        for target, part in zip(targets, flat_out, strict=True):
            part.copy_(target.index_select(0, slots).view(layout.dtype))

    num_bytes = rows.nbytes * (2 + layout.dtype.itemsize) // 2
    for name, call, indexed in (("reshape_and_cache", reshape, index_copy), ("gather_cache", gather, index_select)):
        yield clock.row(name, case, num_tokens, num_bytes, [call, clock.copy(num_bytes), indexed])


class ChunkMoves:
    """Chunks of all layers, from the middle of a block on. on_host: in pinned memory, for caches on a device."""

    def __init__(self, case: Case, num_tokens: int, device: str, on_host: bool, fmt: str) -> None:
        layout, parts = case.layout, 1 if case.layout.backend == "mla" else 2
        num_used = -(-(num_tokens + FIRST) // BLOCK_SIZE)
        num_layers = case.num_layers if device == "cuda" else 8
        self.layout, self.fmt, self.device = layout, fmt, device
        self.caches = layout.allocate(2 * num_used, num_layers, torch.device(device))
        for cache in self.caches:
            cache.view(torch.uint8).random_(0, 96)  # finite in all dtypes
        self.ids = torch.randperm(2 * num_used)[:num_used].to(torch.int32).to(device)
        shape = [num_layers, parts, num_tokens, layout.num_kv_heads, layout.head_size]
        if fmt == "huggingface":
            shape[2:4] = shape[3], shape[2]
        self.chunk = torch.empty(shape, dtype=layout.dtype, device="cpu" if on_host else device, pin_memory=on_host)
        self.by_token = self.chunk.transpose(2, 3) if fmt == "huggingface" else self.chunk
        positions = torch.arange(FIRST, FIRST + num_tokens, device=device)
        self.slots = self.ids.long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        bits = self.by_token.contiguous().view(torch.uint8).to(device).flatten(0, 1).flatten(2)
        targets = [rows for cache in self.caches for rows in in_rows(cache, layout)]
        self.pairs = list(zip(bits, targets, strict=True))
        self.flat = self.chunk.view(torch.uint8).flatten()
        self.there = torch.empty_like(self.flat, device=device)

    def store(self) -> None:
        ops.store_chunk(self.caches, self.ids, self.chunk, self.layout, FIRST, self.fmt)

    def load(self) -> None:
        ops.load_chunk(self.caches, self.ids, self.chunk, self.layout, FIRST, self.fmt)

    def index_select(self) -> None:
        for part, target in self.pairs:
            part.copy_(target.index_select(0, self.slots).view(torch.uint8))

    def index_copy(self) -> None:
        for part, target in self.pairs:
            target.index_copy_(0, self.slots, part.view(target.dtype))

    def check(self) -> None:
        self.store()
        if self.device == "cuda":
            torch.cuda.synchronize()
        want = torch.empty(self.by_token.shape, dtype=self.layout.dtype, device=self.device)
        reference.store_chunk(self.caches, self.ids, FIRST, want, self.layout)
        got = self.by_token.contiguous().view(torch.uint8).cpu()
        assert torch.equal(want.view(torch.uint8).cpu(), got), "the chunk is not the reference's"


def measure_chunks(case: Case, num_tokens: int, on_host: bool, clock: Clock, fmt: str = "vllm") -> Iterator[Row]:
    """Measure chunks; those on the host in fewer rounds, beside a copy over the bus."""
    moves = ChunkMoves(case, num_tokens, clock.device, on_host, fmt)
    moves.check()
    num_bytes = 2 * moves.chunk.nbytes
    place = "hf" if fmt == "huggingface" else "host" if on_host else "device"
    few = Clock(clock.device, max(clock.rounds // 5, 2)) if on_host else clock
    one, there = moves.flat, moves.there
    for name, call, indexed, copy in (
        ("store_chunk", moves.store, moves.index_select, functools.partial(one.copy_, there, non_blocking=True)),
        ("load_chunk", moves.load, moves.index_copy, functools.partial(there.copy_, one, non_blocking=True)),
    ):
        bound = copy if on_host else clock.copy(num_bytes)
        yield few.row(f"{name} {place}", case, num_tokens, num_bytes, [call, bound, indexed])


def every_result(tokens: Sequence[int], chunk_tokens: Sequence[int], clock: Clock) -> Iterator[Row]:
    for case in cases(clock.device):
        for num_tokens in tokens:
            yield from measure(case, num_tokens, clock)
        for num_tokens in chunk_tokens if case.layout.dtype != torch.int8 and not case.head_scales else ():
            for on_host in (False, True) if clock.device == "cuda" else (False,):
                yield from measure_chunks(case, num_tokens, on_host, clock)
            if case.layout.backend != "mla":
                yield from measure_chunks(case, num_tokens, False, clock, "huggingface")


def main() -> None:
    options = parse(
        "reshape_gather",
        __doc__,
        rounds=15,
        threads=torch.get_num_threads(),
        device=DEVICE,
        tokens=option(None, "of a call", type=positive, nargs="+"),
        chunk_tokens=CHUNK_TOKENS,
        seconds=option(math.inf, "after which nothing further begins"),
    )
    torch.manual_seed(0)
    tokens = options.tokens or (CUDA_TOKENS if options.device == "cuda" else CPU_TOKENS)
    measured = every_result(tokens, options.chunk_tokens, Clock(options.device, options.rounds))
    results = shown(COLUMNS, within(options.seconds, measured))
    whole = [row for row in results if row["operation"] in ("reshape_and_cache", "gather_cache")]
    label = "speed, in contiguous copies of as many bytes"
    draw = functools.partial(curves, rows=whole, x="tokens", values=["of copy"], by=("operation", "case"), lines=[1.0])
    finish(options, lambda path: draw(path, xscale="log", ylabel=label), results=results)


if __name__ == "__main__":
    main()
