"""How fast does a swap between two tiers of host memory move scattered blocks?

Bound: memory bandwidth. One torch copy_ of as many contiguous bytes, with as many threads, is measured in the same run;
the swap moves 4,096 blocks of 32 KiB, K and V, in 8 layers (2 GiB), between random places. The goal is 0.85 of it.
Each round measures every case once, in turn, so that a busy machine slows all alike; medians of the rounds count.
Before anything is timed, every destination byte is compared with what plain torch gives.
"""

import functools
from pathlib import Path
from typing import Any

import torch

from kvpage.benchmarks.cells import Table
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.pictures import drawn
from kvpage.benchmarks.script import Options, finish
from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops import reference
from kvpage.ops.copies import BlockCopier

NUM_LAYERS = 8
CPU = torch.device("cpu")


def make_layout(layer_layout: str) -> CacheLayout:
    return CacheLayout(16, 8, 128, torch.bfloat16, layer_layout=layer_layout)  # 32 KiB of K a block and layer


def make_case(layer_layout: str, num_blocks: int) -> tuple[BlockCopier, list[torch.Tensor], list[torch.Tensor]]:
    layout = make_layout(layer_layout)
    src, dst = (layout.allocate(num_blocks, NUM_LAYERS, CPU) for _ in range(2))
    for cache in src:
        cache.view(torch.int16).random_()
    for cache in dst:
        cache.fill_(1)  # every page is there before the clock starts
    return BlockCopier(src, dst, layout), src, dst


def check(copier: BlockCopier, src: list[torch.Tensor], dst: list[torch.Tensor], mapping: torch.Tensor) -> None:
    copier.run(mapping)
    layout = make_layout("separate")
    for layer, (a, b) in enumerate(zip(src, dst, strict=True)):
        expected = torch.ones_like(b)
        reference.swap_blocks(a, expected, mapping, layout)
        if not torch.equal(b.view(torch.int16), expected.view(torch.int16)):
            raise SystemExit(f"layer {layer} of the swap differs from torch's")


def run_layout(layer_layout: str, num_blocks: int, rounds: int) -> dict[str, Any]:
    copier, src, dst = make_case(layer_layout, num_blocks)
    scattered = torch.stack([torch.randperm(num_blocks), torch.randperm(num_blocks)], 1)
    in_order = torch.arange(num_blocks).repeat(2, 1).t()
    check(copier, src, dst, scattered)
    num_bytes = num_blocks * make_layout(layer_layout).block_bytes * NUM_LAYERS
    # The contiguous copy uses the caches' own memory: a packed slab is one run, separate layers are one each.
    flat = [(a.view(-1), b.view(-1)) for a, b in zip(src, dst, strict=True)] if layer_layout == "separate" else [
        (slab(src), slab(dst))
    ]  # fmt: skip

    def contiguous() -> None:
        for a, b in flat:
            b.copy_(a)

    cases = {
        "copy_": contiguous,
        "scattered": lambda: copier.run(scattered),
        "in order": lambda: copier.run(in_order),
    }
    times = in_turns(cases, rounds)
    return {
        name: {"gb_per_s": Figure.rate(num_bytes / 1e9, taken), "of_copy_": Figure.ratio(times["copy_"], taken)}
        for name, taken in times.items()
    }


def slab(caches: list[torch.Tensor]) -> torch.Tensor:
    """The whole memory of packed layers, flat."""
    first = caches[0]
    return first.as_strided((first.untyped_storage().size() // first.element_size(),), (1,), 0)


def plot(results: dict[str, Any], path: Path) -> None:
    names = list(next(iter(results.values())))
    with drawn(path, size=(7, 3.5)) as axes:
        for i, (layer_layout, rows) in enumerate(results.items()):
            places, speeds = [x + 0.4 * i for x in range(len(names))], [rows[n]["gb_per_s"].median for n in names]
            axes.bar(places, speeds, 0.38, label=layer_layout)
        axes.set_xticks([x + 0.2 for x in range(len(names))], names)
        axes.set(ylabel="GB/s moved", title="Host-to-host swap of blocks")
        axes.legend()


def main() -> None:
    parser = Options("swap_host", __doc__, rounds=9, threads=torch.get_num_threads())
    parser.add("--blocks", 4096)
    options = parser.parse()
    torch.manual_seed(0)
    results, table = {}, Table("{layers:<10} {case:<10} {gb_per_s:>20.2f} {of_copy_:>17.2f}")
    for layer_layout in ("separate", "packed"):
        results[layer_layout] = run_layout(layer_layout, options.blocks, options.rounds)
        for name, row in results[layer_layout].items():
            table.show({"layers": layer_layout, "case": name, **row})
    finish(options, functools.partial(plot, results), results=results)


if __name__ == "__main__":
    main()
