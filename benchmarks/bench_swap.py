"""How fast do swaps between GPU and pinned host memory, and copies within the GPU, move scattered pieces?

Bounds, measured in the same run: for swaps one contiguous pinned copy_ of 256 MiB over the same bus, for copies one
within the device. Moved are pieces of one size between random places, at most 512 MiB at once, by the copy engines, by
the SM kernel (on at most --groups thread groups) and by the one that the calibration chooses. Targets on an H200, of
the bound, from 64 MiB on: pieces of 2 MiB (a packed block of Llama-3-8B) 0.95, of 32 KiB (K or V of a block in one
layer) 0.9, of 8 KiB 0.6; copies 0.85.

Fixed cost of a call for 256 blocks in 32 layers: the host's time from Python until the work is enqueued on an idle
stream; the target is 30 us. Its part that needs no GPU, checking the pairs and making the plan, is "plan, host only".

The peer of swaps is the driver's own cuMemcpyBatchAsync over the same pieces, whose arrays are made before
(raw_batch_copy.py): "raw", and the chosen executor's part "of raw", which is 1.0 where kvpage adds nothing.

Medians of rounds in which every case is measured once. Before anything is timed, every destination byte is compared.

Without a GPU it measures the plan, says so, and ends.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from kvpage import CacheConfig, CacheEngine, Calibration, DeviceConfig, ModelConfig, build_info, calibrate
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import in_turns, seconds, within
from kvpage.benchmarks.pictures import panels
from kvpage.benchmarks.raw_batch_copy import RawBatchCopy, find_call
from kvpage.benchmarks.script import finish, option, parse
from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops.copies import BlockCopier

SETTLED_BYTES = 64 << 20
TARGETS = {("in", 2 << 20): 0.95, ("in", 32 << 10): 0.9, ("in", 8 << 10): 0.6}
TARGETS |= {("out", size): target for (_, size), target in TARGETS.items()}
COLUMNS = (
    "{direction:<9} {piece_bytes:>11} {num_pieces:>10} {engine:>9.2f} {kernel:>9.2f} {raw:>9.2f} {chosen:>7} "
    "{same_bytes:>10.2f} {bound:>9.2f} {of_bound:>8.2f} {of_raw:>7.2f} {enqueue_us:>10.1f} {is_met:>7}"
)
NEVER, ALWAYS = 0, 1 << 40


class Sizes(NamedTuple):
    """piece_bytes: those of a target first. most_bytes: that are moved at once. large_bytes: of the bound's copy.
    call_blocks: of the calls whose time on the host is measured."""

    piece_bytes: tuple[int, ...]
    num_pieces: tuple[int, ...]
    most_bytes: int
    large_bytes: int
    call_blocks: int


SIZES = {
    "whole": Sizes(
        (32 << 10, 2 << 20, 8 << 10, 64 << 10, 4 << 10, 2 << 10), (65536, 4096, 256, 16), 512 << 20, 256 << 20, 256
    ),
    "tiny": Sizes((1 << 10,), (4,), 1 << 14, 1 << 13, 1),
}
TARGETS |= {("copy", size): 0.85 for size in SIZES["whole"].piece_bytes}


class Memory:
    """As many bytes as are moved at most, and one more piece of the largest size: pinned, and twice on the device."""

    def __init__(self, sizes: Sizes) -> None:
        num_bytes = sizes.most_bytes + max(sizes.piece_bytes)
        self.host = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).pin_memory()
        self.device = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
        self.other = torch.empty_like(self.device)

    def sides(self, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
        sides = {"in": (self.host, self.device), "out": (self.device, self.host), "copy": (self.device, self.other)}
        return sides[direction]


class Case:
    """Pieces of one size in one direction, one more at each end than are moved."""

    def __init__(self, memory: Memory, direction: str, piece_bytes: int, num_pieces: int, groups: int) -> None:
        layout = CacheLayout(1, 1, piece_bytes, torch.uint8, backend="mla")
        shape = layout.shape(num_pieces + 1)
        self.src, self.dst = (side[: (num_pieces + 1) * piece_bytes].view(shape) for side in memory.sides(direction))
        self.num_bytes = num_pieces * piece_bytes
        self.mapping = torch.stack([torch.randperm(num_pieces), torch.randperm(num_pieces) + 1], 1)
        limits = {"engine": NEVER, "kernel": ALWAYS} if direction != "copy" else {"kernel": NEVER}
        self.copiers: dict[str, Callable[[], object]] = {
            name: functools.partial(BlockCopier([self.src], [self.dst], layout, limit, groups).run, self.mapping)
            for name, limit in limits.items()
        }
        call = None if direction == "copy" else find_call()
        if call is not None:  # on a stream of its own: it takes no legacy one
            places = self.mapping * piece_bytes + torch.tensor([self.src.data_ptr(), self.dst.data_ptr()])
            sources, targets = places.T.tolist()
            raw, stream = RawBatchCopy(call, sources, targets, piece_bytes), torch.cuda.Stream()
            self.copiers["raw"] = lambda: raw.run(stream.cuda_stream)

    def check(self) -> None:
        for name, copier in self.copiers.items():
            self.dst.fill_(255)
            torch.cuda.synchronize()
            copier()
            torch.cuda.synchronize()
            src, dst, mapping = self.src.cuda(), self.dst.cuda(), self.mapping.cuda()
            if not torch.equal(dst[mapping[:, 1]], src[mapping[:, 0]]):
                raise SystemExit(f"{name}: {len(self.mapping)} pieces differ")
            if bool((dst[0] != 255).any()):
                raise SystemExit(f"{name}: a piece that nobody named was written")


def clock(body: Callable[[], object]) -> tuple[float, float]:
    """Seconds until the call returned, and until the work was done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    body()
    enqueued = time.perf_counter() - start
    torch.cuda.synchronize()
    return enqueued, time.perf_counter() - start


def medians(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median of `clock` of each case, in turns."""
    times = in_turns(cases, rounds, measure=lambda body, number: clock(body))
    return {name: tuple(map(statistics.median, zip(*of, strict=True))) for name, of in times.items()}


def measure(
    memory: Memory, direction: str, size: int, count: int, calibration: Calibration, rounds: int, large_bytes: int
) -> Row:
    case = Case(memory, direction, size, count, calibration.max_groups)
    case.check()
    bodies = dict(case.copiers)
    src, dst = memory.sides(direction)
    bodies["large"] = lambda: dst[:large_bytes].copy_(src[:large_bytes], non_blocking=True)
    bodies["same"] = lambda: dst[: case.num_bytes].copy_(src[: case.num_bytes], non_blocking=True)
    times = medians(bodies, rounds)
    rates = {name: case.num_bytes / times[name][1] / 1e9 for name in (*case.copiers, "same")}
    most = {"in": calibration.max_bytes_in, "out": calibration.max_bytes_out, "copy": ALWAYS}[direction]
    best, bound = "kernel" if size <= most else "engine", large_bytes / times["large"][1] / 1e9
    target = TARGETS.get((direction, size)) if case.num_bytes >= SETTLED_BYTES else None
    return {
        "direction": direction, "piece_bytes": size, "num_pieces": count, "engine": rates.get("engine"),
        "kernel": rates["kernel"], "raw": rates.get("raw"), "chosen": best, "chosen_gb_per_s": rates[best],
        "same_bytes": rates["same"],
        "bound": bound, "of_bound": rates[best] / bound, "enqueue_us": times[best][0] * 1e6,
        "of_raw": rates[best] / rates["raw"] if "raw" in rates else None,
        "target": target, "is_met": None if target is None else rates[best] / bound >= target,
    }  # fmt: skip


def plan_us(rounds: int = 2000) -> float:
    """Checking 256 pairs and making their plan, over 32 layers of K and V; the blocks' size does not matter."""
    layout = CacheLayout(1, 1, 8, torch.float16)
    srcs, dsts = (layout.allocate(1024, 32, torch.device("cpu")) for _ in range(2))
    copier = BlockCopier(srcs, dsts, layout)
    mapping = torch.stack([torch.randperm(1024)[:256], torch.randperm(1024)[:256]], 1)
    return statistics.median(seconds(lambda: copier.check(mapping)) for _ in range(rounds)) * 1e6


def call_us(calibration: Calibration, layer_layout: str, most: int, rounds: int, num_blocks: int) -> dict[str, float]:
    """The host's time in CacheEngine's calls for blocks of 16 tokens, 8 heads of 128 in bf16, 32 layers."""
    fixed = dataclasses.replace(calibration, max_bytes_in=most, max_bytes_out=most)
    config = CacheConfig(16, 2 * num_blocks, 2 * num_blocks, cache_dtype="bf16", layer_layout=layer_layout)
    model = ModelConfig(128, 8, ("full_attention",) * 32)
    engine = CacheEngine(config, model, None, DeviceConfig("cuda"), calibration=fixed)
    mapping = torch.stack([torch.randperm(num_blocks), torch.randperm(num_blocks) + num_blocks], 1)
    calls: dict[str, Callable[[], object]] = {
        "out": lambda: engine.swap_out(mapping),
        "in": lambda: engine.swap_in(mapping),
        "copy": lambda: engine.copy(mapping),
        "out, asynchronous": lambda: engine.swap_out(mapping, non_blocking=True),
        "in, asynchronous": lambda: engine.swap_in(mapping, non_blocking=True),
    }
    return {name: enqueued * 1e6 for name, (enqueued, _) in medians(calls, rounds).items()}


def every_call_us(calibration: Calibration, rounds: int, num_blocks: int) -> dict[str, dict[str, float]]:
    found = {}
    for layout, (name, most) in itertools.product(("separate", "packed"), (("kernel", ALWAYS), ("engine", NEVER))):
        took = found[f"{layout}, {name}"] = call_us(calibration, layout, most, rounds, num_blocks)
        words = ", ".join(f"{what} {us:.1f} us" for what, us in took.items())
        print(f"host time of a call, {num_blocks} blocks, {layout:8}, {name}: {words}")
    return found


def each_swap(calibration: Calibration, rounds: int, sizes: Sizes) -> Iterator[Row]:
    """Measure as many pieces as fit of each size in all directions, then fewer."""
    memory = Memory(sizes)
    most = {size: min(max(sizes.num_pieces), sizes.most_bytes // size) for size in sizes.piece_bytes}
    cases = {(size, min(count, most[size])) for size in most for count in sizes.num_pieces}
    order = {size: place for place, size in enumerate(sizes.piece_bytes)}
    for size, count in sorted(cases, key=lambda case: (case[1] != most[case[0]], order[case[0]], -case[1])):
        for direction in ("out", "in", "copy"):
            yield measure(memory, direction, size, count, calibration, rounds, sizes.large_bytes)


def with_most_pieces(rows: list[Row]) -> list[Row]:
    """Return, of each direction and size, the row with the most pieces; the size in KiB, too."""
    ordered = sorted(rows, key=lambda row: (row["piece_bytes"], row["num_pieces"]))
    most = {(row["direction"], row["piece_bytes"]): row for row in ordered}
    return [{**row, "KiB": row["piece_bytes"] / 1024} for row in most.values()]


def main() -> None:
    options = parse(
        "swap",
        __doc__,
        rounds=10,
        groups=16,
        seconds=option(math.inf, "after which no further swap is measured"),
        sizes=option("whole", "tiny shows that it runs", choices=SIZES),
    )
    torch.manual_seed(0)
    found: dict[str, Any] = {"build": build_info(), "plan_us": plan_us()}
    print(f"plan, host only: {found['plan_us']:.1f} us for 256 pairs in 32 layers")
    if not torch.cuda.is_available() or found["build"]["cuda_error"]:
        print(f"moving blocks needs a GPU: {found['build']['cuda_error'] or 'this torch cannot use it'}")
        finish(options, **found)
        return
    calibration, sizes = calibrate("cuda", options.groups), SIZES[options.sizes]
    print(f"calibration: kernel up to {calibration.max_bytes_in} bytes in, {calibration.max_bytes_out} out; "
          f"{calibration.seconds:.2f} s")  # fmt: skip
    print("GB/s by the copy engines, by the kernel, by the driver's own call; same_bytes: one copy of as many")
    rows = shown(COLUMNS, within(options.seconds, each_swap(calibration, options.rounds, sizes)))
    calls = every_call_us(calibration, options.rounds, sizes.call_blocks)
    found |= {"calibration": dataclasses.asdict(calibration), "rows": rows, "call_us": calls}
    most, names = with_most_pieces(rows), ("engine", "kernel", "raw", "bound")
    draw = functools.partial(panels, rows=most, panel="direction", x="KiB", values=names, ylabel="GB/s")
    finish(options, draw, **found)


if __name__ == "__main__":
    main()
