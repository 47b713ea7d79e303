"""How fast does a swap between two tiers of host memory move scattered blocks?

Bound: memory bandwidth. One torch copy_ of as many contiguous bytes, with as many threads, is measured in the same run;
the swap moves 4,096 blocks of 32 KiB, K and V, in 8 layers (2 GiB), between random places. The goal is 0.85 of it.
Each round measures every case once, in turn, so that a busy machine slows all alike; medians of the rounds count.
Before anything is timed, every destination byte is compared with what plain torch gives.
"""

from collections.abc import Callable, Iterator

import torch

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import finish, parse
from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops import reference
from kvpage.ops.copies import BlockCopier

NUM_LAYERS = 8
CPU = torch.device("cpu")
COLUMNS = "{layers:<10} {case:<10} {gb_per_s:>20.2f} {of_copy_:>17.2f}"


class Swap:
    """A swap between two caches, and one copy of as many bytes. layer_layout: packed layers, or separate ones."""

    def __init__(self, layer_layout: str, num_blocks: int) -> None:
        self.layout = CacheLayout(16, 8, 128, torch.bfloat16, layer_layout=layer_layout)  # 32 KiB of K a block
        self.src, self.dst = (self.layout.allocate(num_blocks, NUM_LAYERS, CPU) for _ in range(2))
        for cache in self.src:
            cache.view(torch.int16).random_()
        for cache in self.dst:
            cache.fill_(1)  # every page is there before the clock starts
        self.copier = BlockCopier(self.src, self.dst, self.layout)
        self.num_bytes = num_blocks * self.layout.block_bytes * NUM_LAYERS
        self.scattered = torch.stack([torch.randperm(num_blocks), torch.randperm(num_blocks)], 1)
        self.in_order = torch.arange(num_blocks).repeat(2, 1).t()

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return the copy, which takes the caches' own memory, and the swaps."""
        flat = [(_memory(a), _memory(b)) for a, b in zip(self.src, self.dst, strict=True)]
        if self.layout.layer_layout == "packed":
            flat = flat[:1]  # all layers are in one slab
        return {
            "copy_": lambda: [b.copy_(a) for a, b in flat],
            "scattered": lambda: self.copier.run(self.scattered),
            "in order": lambda: self.copier.run(self.in_order),
        }

    def check(self) -> None:
        """SystemExit unless every byte is that of plain torch."""
        self.copier.run(self.scattered)
        plain = CacheLayout(16, 8, 128, torch.bfloat16)
        for layer, (a, b) in enumerate(zip(self.src, self.dst, strict=True)):
            expected = torch.ones_like(b)
            reference.swap_blocks(a, expected, self.scattered, plain)
            if not torch.equal(b.view(torch.int16), expected.view(torch.int16)):
                raise SystemExit(f"layer {layer} of the swap differs from torch's")


def _memory(cache: torch.Tensor) -> torch.Tensor:
    """Return all of the memory that a cache is in, flat."""
    return cache.as_strided((cache.untyped_storage().size() // cache.element_size(),), (1,), 0)


def measure(layer_layout: str, num_blocks: int, rounds: int) -> Iterator[Row]:
    swap = Swap(layer_layout, num_blocks)
    swap.check()
    times = in_turns(swap.calls(), rounds)
    for name, taken in times.items():
        figures = {"gb_per_s": Figure.rate(swap.num_bytes / 1e9, taken)}
        yield {"layers": layer_layout, "case": name, **figures, "of_copy_": Figure.ratio(times["copy_"], taken)}


def main() -> None:
    options = parse("swap_host", __doc__, rounds=9, threads=torch.get_num_threads(), blocks=4096)
    torch.manual_seed(0)
    layouts = ("separate", "packed")
    rows = shown(COLUMNS, (row for layout in layouts for row in measure(layout, options.blocks, options.rounds)))
    results = {layout: {row["case"]: row for row in rows if row["layers"] == layout} for layout in layouts}
    series = {layout: [row["gb_per_s"] for row in of_layout.values()] for layout, of_layout in results.items()}
    names = list(results["packed"])
    finish(options, lambda path: grouped(path, names, series, "GB/s moved"), results=results)


if __name__ == "__main__":
    main()
