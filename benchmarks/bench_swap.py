"""How fast do swaps between GPU and host memory, and copies within the GPU, move scattered blocks?

Bounds, measured in the same run: for swaps one pinned, contiguous copy_ of as many bytes over the same bus, for copies
one contiguous copy_ within the device. Moved are blocks of 16 tokens, 8 heads of 128 in bf16 (32 KiB of K, 32 of V) in
32 layers, between random places: 64 extents a block with separate layers, one with packed ones. Also the time that the
CPU spends from the Python call until the work is enqueued; the goal is 30 us for 256 blocks with packed layers.
Medians of rounds in which every case is measured once. Before anything is timed, all destination bytes are compared.

Usage: python benchmarks/bench_swap.py [--blocks 1 16 256] [--rounds 20] [--device cuda] [--plot PATH]
(--device cpu tries the script itself on a machine without a GPU; its figures mean nothing.)
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from kvpage import build_info, reference
from kvpage.block_copy import BlockCopier
from kvpage.layout import CacheLayout

NUM_LAYERS = 32
HOST = torch.device("cpu")


class Tiers:
    """The caches of both tiers, twice as many blocks as are moved, and a random mapping between their halves."""

    def __init__(self, layer_layout: str, num_blocks: int, device: torch.device) -> None:
        self.layout = CacheLayout(16, 8, 128, torch.bfloat16, layer_layout=layer_layout)
        self.device = self.layout.allocate(2 * num_blocks, NUM_LAYERS, device)
        self.host = self.layout.allocate(2 * num_blocks, NUM_LAYERS, HOST, device.type == "cuda")
        for cache in (*self.device, *self.host):
            cache.view(torch.int16).random_()
        self.mapping = torch.stack([torch.randperm(num_blocks), torch.randperm(num_blocks) + num_blocks], 1)
        self.num_bytes = num_blocks * NUM_LAYERS * self.layout.block_bytes

    def sides(self) -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        return {
            "swap in": (self.host, self.device),
            "swap out": (self.device, self.host),
            "copy": (self.device, self.device),
        }


def check(name: str, srcs: list[torch.Tensor], dsts: list[torch.Tensor], tiers: Tiers, copier: BlockCopier) -> None:
    expected = [dst.clone() for dst in dsts]
    for src, dst in zip(srcs, expected, strict=True):
        reference.swap_blocks(src, dst, tiers.mapping, tiers.layout)
    copier.run(tiers.mapping)
    wait(tiers)
    for layer, (dst, wanted) in enumerate(zip(dsts, expected, strict=True)):
        if not torch.equal(dst.view(torch.int16), wanted.view(torch.int16)):
            raise SystemExit(f"{name}: layer {layer} differs from torch's")


def wait(tiers: Tiers) -> None:
    if tiers.device[0].is_cuda:
        torch.cuda.synchronize()


def clock(body: Callable[[], object], tiers: Tiers) -> tuple[float, float]:
    """Seconds until the call returned, and until the work was done."""
    wait(tiers)
    start = time.perf_counter()
    body()
    enqueued = time.perf_counter() - start
    wait(tiers)
    return enqueued, time.perf_counter() - start


def bounds(num_bytes: int, device: torch.device) -> dict[str, Callable[[], object]]:
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    one, two = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return {
        "swap in": lambda: one.copy_(host, non_blocking=True),
        "swap out": lambda: host.copy_(one, non_blocking=True),
        "copy": lambda: two.copy_(one),
    }


def run_layout(layer_layout: str, num_blocks: int, rounds: int, device: torch.device) -> list[dict]:
    tiers = Tiers(layer_layout, num_blocks, device)
    best = bounds(tiers.num_bytes, device)
    cases: dict[tuple[str, str], Callable[[], object]] = {}
    for name, (srcs, dsts) in tiers.sides().items():
        copier = BlockCopier(srcs, dsts, tiers.layout)
        check(name, srcs, dsts, tiers, copier)
        cases[name, "bound"] = best[name]
        cases[name, "kvpage"] = lambda copier=copier: copier.run(tiers.mapping)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in cases}
    for round_ in range(rounds + 1):  # the first one warms up
        for key, body in cases.items():
            took = clock(body, tiers)
            if round_:
                times[key].append(took)
    return [row(layer_layout, name, tiers.num_bytes, times) for name in tiers.sides()]


def row(layer_layout: str, name: str, num_bytes: int, times: dict[tuple[str, str], list[tuple[float, float]]]) -> dict:
    enqueued = statistics.median(first for first, _ in times[name, "kvpage"])
    done = statistics.median(last for _, last in times[name, "kvpage"])
    bound = statistics.median(last for _, last in times[name, "bound"])
    return {
        "layers": layer_layout, "case": name, "mib": num_bytes / 2**20, "gb_per_s": num_bytes / done / 1e9,
        "bound_gb_per_s": num_bytes / bound / 1e9, "of_bound": bound / done, "enqueue_us": enqueued * 1e6,
    }  # fmt: skip


def plot(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.5))
    places = range(len(rows))
    axes.bar(places, [row["bound_gb_per_s"] for row in rows], 0.8, color="lightgray", label="contiguous copy_")
    axes.bar(places, [row["gb_per_s"] for row in rows], 0.5, label="kvpage")
    axes.set_xticks(places, [f"{row['case']}\n{row['layers']}\n{row['mib']:.0f} MiB" for row in rows], fontsize=6)
    axes.set_yscale("log")
    axes.set_ylabel("GB/s moved")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plot")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device; --device cpu tries the script without one")
    torch.manual_seed(0)
    rows = []
    print(f"{'layers':9} {'case':9} {'blocks':>6} {'GB/s':>8} {'bound':>8} {'of it':>6} {'enqueue us':>10}")
    for layer_layout in ("separate", "packed"):
        for num_blocks in options.blocks:
            for found in run_layout(layer_layout, num_blocks, options.rounds, torch.device(options.device)):
                rows.append(found | {"blocks": num_blocks})
                print(
                    f"{layer_layout:9} {found['case']:9} {num_blocks:6} {found['gb_per_s']:8.2f} "
                    f"{found['bound_gb_per_s']:8.2f} {found['of_bound']:6.2f} {found['enqueue_us']:10.1f}"
                )
    if options.plot:
        plot(rows, options.plot)
    print(json.dumps({"bench": "swap", "device": options.device, "build": build_info(), "rows": rows}))


if __name__ == "__main__":
    main()
