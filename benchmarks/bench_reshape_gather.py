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
from kvpage.benchmarks.figure import Figure, in_turns, within
from kvpage.benchmarks.figure import seconds as host_seconds
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import DEVICE, finish, option, parse, positive
from kvpage.ops import reference

BLOCK_SIZE = 16
CPU_TOKENS, CUDA_TOKENS, CHUNK_TOKENS = (1, 64, 512, 2048, 8192, 32768), (128, 1024, 8192, 65536), (256, 2048)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CALLS = 10  # at most, behind one delay of the device
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


def rest() -> None:
    """Waits without sleep, from which a processor would awake slowly and with cold caches."""
    end = time.perf_counter() + REST
    while time.perf_counter() < end:
        pass


def seconds(call: Callable[[], object], clock: DeviceClock | None) -> float:
    """Return the time of one call. clock: a CUDA device's; None on a CPU."""
    if clock is not None:
        return clock.time(call, call, CALLS).seconds
    if torch.get_num_threads() > 1:
        rest()
    return host_seconds(call)


def taken_in_turns(calls: Sequence[Callable[[], object]], device: str, rounds: int) -> list[list[float]]:
    """The seconds of each call in each round."""
    numbered = {str(n): call for n, call in enumerate(calls)}
    clock = DeviceClock() if device == "cuda" else None
    turns = in_turns(numbered, rounds, 1, lambda call, _: seconds(call, clock), warmups=2)
    return list(turns.values())


def call_seconds(call: Callable[[], object], device: str) -> Figure | None:
    """The host's time of one call: how long the device works is not in it."""
    if device == "cpu":
        return None
    taken = []
    for _ in range(20):
        torch.cuda.synchronize()
        taken.append(host_seconds(call, CALLS))
    return Figure.of(taken, 1e6)


def copy_of(num_bytes: int, device: str) -> Callable[[], object]:
    """A copy_ that reads and writes together num_bytes."""
    source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
    return functools.partial(torch.empty_like(source).copy_, source)


def row(
    operation: str, case: Case, num_tokens: int, num_bytes: int, times: Sequence[list[float]], call: Figure | None
) -> Row:
    """times: of the operation, the copy, and torch's indexing."""
    taken, copied, indexed = times
    return {
        "operation": operation,
        "case": case.name,
        "tokens": num_tokens,
        "MiB": num_bytes / 2**20,
        "us": Figure.of(taken, 1e6),
        "GB/s": Figure.rate(num_bytes / 1e9, taken),  # read and written
        "of copy": Figure.ratio(copied, taken),
        "of index": Figure.ratio(indexed, taken),
        "call us": call,
    }


def in_rows(cache: torch.Tensor, layout: CacheLayout) -> list[torch.Tensor]:
    """K and V as bits [num_slots, ...] for torch's indexing: views of NHD, of the others copies, for timing alone."""
    views = [view for view in layout.views(cache) if view is not None]
    return [view._bits().flatten(2).flatten(0, 1) for view in views]


def measure(case: Case, num_tokens: int, device: str, rounds: int) -> Iterator[Row]:
    layout = case.layout
    num_used = -(-num_tokens // BLOCK_SIZE)
    cache = layout.allocate(4 * num_used, 1, torch.device(device))[0]
    used = torch.randperm(4 * num_used)[:num_used]
    slots = (used[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:num_tokens].to(device)
    tables = used.to(torch.int32)[None].to(device)
    key = torch.randn(num_tokens, layout.num_kv_heads, layout.head_size, device=device).to(BF16)
    value = None if layout.backend == "mla" else torch.randn_like(key)
    out = torch.empty_like(key), None if value is None else torch.empty_like(key)

    def reshape() -> None:
        ops.reshape_and_cache(key, value, cache, slots, layout, scales=case.scales)

    def gather() -> None:
        ops.gather_cache(cache, tables, [num_tokens], layout, out=out, scales=case.scales)

    reshape()
    gather()
    want = reference.gather_cache(cache, tables, torch.tensor([num_tokens]), layout, scales=case.scales, dtype=BF16)
    for rows, written, gathered in zip((key, value), want, out, strict=True):
        if rows is None or written is None or gathered is None:
            continue
        assert torch.equal(gathered, written), "gathered is not what the reference gathers"
        assert layout.is_quantized or torch.equal(gathered, rows), "gathered is not what was written"

    targets, width = in_rows(cache, layout), layout.num_kv_heads * layout.head_size
    given = [rows.view(num_tokens, width) for rows in (key, value) if rows is not None]
    taken = [rows.view(num_tokens, width) for rows in out if rows is not None]

    def index_copy() -> None:
        for target, rows in zip(targets, given, strict=True):
            target.index_copy_(0, slots, rows.to(layout.dtype).view(target.dtype))

    def index_select() -> None:
        for target, rows in zip(targets, taken, strict=True):
            rows.copy_(target.index_select(0, slots).view(layout.dtype))

    num_bytes = sum(rows.nbytes for rows in given) * (2 + layout.dtype.itemsize) // 2
    for name, call, indexed in (("reshape_and_cache", reshape, index_copy), ("gather_cache", gather, index_select)):
        times = taken_in_turns([call, copy_of(num_bytes, device), indexed], device, rounds)
        yield row(name, case, num_tokens, num_bytes, times, call_seconds(call, device))


def measure_chunks(
    case: Case, num_tokens: int, device: str, on_host: bool, rounds: int, fmt: str = "vllm"
) -> Iterator[Row]:
    """From the middle of a block on; on_host: a chunk in pinned memory, for caches on a CUDA device."""
    layout, start, parts = case.layout, 5, 1 if case.layout.backend == "mla" else 2
    num_used = -(-(num_tokens + start) // BLOCK_SIZE)
    num_layers = case.num_layers if device == "cuda" else 8
    caches = layout.allocate(2 * num_used, num_layers, torch.device(device))
    for cache in caches:
        cache.view(torch.uint8).random_(0, 96)  # finite in all dtypes
    ids = torch.randperm(2 * num_used)[:num_used].to(torch.int32).to(device)
    shape = (num_layers, parts, num_tokens, layout.num_kv_heads, layout.head_size)
    if fmt == "huggingface":
        shape = (*shape[:2], shape[3], shape[2], shape[4])
    chunk = torch.empty(shape, dtype=layout.dtype, device="cpu" if on_host else device, pin_memory=on_host)
    positions = torch.arange(start, start + num_tokens, device=device)
    slots = ids.long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    targets = [in_rows(cache, layout) for cache in caches]
    by_token = chunk.transpose(2, 3) if fmt == "huggingface" else chunk
    bits = by_token.contiguous().view(torch.uint8).to(device)
    one = chunk.view(torch.uint8).flatten()
    there = torch.empty_like(one, device=device)

    def store() -> None:
        ops.store_chunk(caches, ids, chunk, layout, start, fmt)

    def load() -> None:
        ops.load_chunk(caches, ids, chunk, layout, start, fmt)

    pairs = [(part.flatten(1), target) for layer, rows in zip(bits, targets, strict=True)
             for part, target in zip(layer, rows, strict=True)]  # fmt: skip

    def index_select() -> None:
        for part, target in pairs:
            part.copy_(target.index_select(0, slots).view(torch.uint8))

    def index_copy() -> None:
        for part, target in pairs:
            target.index_copy_(0, slots, part.view(target.dtype))

    store()
    if device == "cuda":
        torch.cuda.synchronize()
    want = torch.empty(by_token.shape, dtype=layout.dtype, device=device)
    reference.store_chunk(caches, ids, start, want, layout)
    got = by_token.contiguous().view(torch.uint8).cpu()
    assert torch.equal(want.view(torch.uint8).cpu(), got), "the chunk is not the reference's"
    num_bytes, place = 2 * chunk.nbytes, "host" if on_host else "device"
    place = "hf" if fmt == "huggingface" else place
    for name, call, indexed in (("store_chunk", store, index_select), ("load_chunk", load, index_copy)):
        out = name == "store_chunk"
        copy = (one.copy_, there) if out else (there.copy_, one)
        bound = functools.partial(copy[0], copy[1], non_blocking=True) if on_host else copy_of(num_bytes, device)
        times = taken_in_turns([call, bound, indexed], device, max(rounds // 5, 2) if on_host else rounds)
        yield row(f"{name} {place}", case, num_tokens, num_bytes, times, call_seconds(call, device))


def every_result(device: str, tokens: Sequence[int], chunk_tokens: Sequence[int], rounds: int) -> Iterator[Row]:
    for case in cases(device):
        for num_tokens in tokens:
            yield from measure(case, num_tokens, device, rounds)
        for num_tokens in chunk_tokens if case.layout.dtype != torch.int8 and not case.head_scales else ():
            for on_host in (False, True) if device == "cuda" else (False,):
                yield from measure_chunks(case, num_tokens, device, on_host, rounds)
            if case.layout.backend != "mla":
                yield from measure_chunks(case, num_tokens, device, False, rounds, "huggingface")


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
    measured = every_result(options.device, tokens, options.chunk_tokens, options.rounds)
    results = shown(COLUMNS, within(options.seconds, measured))
    whole = [row for row in results if row["operation"] in ("reshape_and_cache", "gather_cache")]
    label = "speed, in contiguous copies of as many bytes"
    draw = functools.partial(curves, rows=whole, x="tokens", values=["of copy"], by=("operation", "case"), lines=[1.0])
    finish(options, lambda path: draw(path, xscale="log", ylabel=label), results=results)


if __name__ == "__main__":
    main()
