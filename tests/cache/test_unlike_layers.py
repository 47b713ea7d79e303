"""Swaps and copies of blocks whose layers have heads and sizes of their own, every byte compared."""

import numpy as np
import pytest
import torch
from support.unlike_layers import PLACES, SHAPES, blocks_of, make_engine

from kvpage.blocks.moves import BlockMove
from kvpage.ops.copies import BlockCopier

IDS = dict(ids=lambda place: "-".join(place.values()))
PAIRS = [(0, 4), (1, 5), (2, 0), (6, 1)]


def moved(before: list[torch.Tensor], sources: list[torch.Tensor], pairs: list[tuple[int, int]]) -> list[torch.Tensor]:
    """What blocks hold after a copy, block by block."""
    after = [layer.clone() for layer in before]
    for layer, source in zip(after, sources, strict=True):
        for src, dst in pairs:
            layer[dst] = source[src]
    return after


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for layer, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"layer {layer}"


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("place", PLACES, **IDS)
@pytest.mark.parametrize("kind", SHAPES)
def test_swaps_and_copies(kind: str, place: dict, by_layer: bool) -> None:
    engine = make_engine(kind, 8, 7, **place)
    gpu, cpu = (blocks_of(engine, tier) for tier in (engine.gpu_cache, engine.cpu_cache))
    pairs = torch.tensor(PAIRS)
    transfer = engine.swap_out(pairs, non_blocking=True, by_layer=by_layer)
    transfer.wait()
    assert transfer.num_bytes == len(PAIRS) * sum(layer.nbytes for layer in engine.gpu_cache) // 8
    cpu = moved(cpu, gpu, PAIRS)
    assert_equal(blocks_of(engine, engine.cpu_cache), cpu)
    engine.swap_in(pairs)
    gpu = moved(gpu, cpu, PAIRS)
    engine.copy(torch.tensor([(0, 7), (1, 3)]))
    gpu = moved(gpu, gpu, [(0, 7), (1, 3)])
    moves = [BlockMove("swap_out", np.array([[3, 6]])), BlockMove("copy", np.array([[2, 6]]))]
    engine.start_moves(engine.layered_moves(moves)).wait()
    cpu, gpu = moved(cpu, gpu, [(3, 6)]), moved(gpu, gpu, [(2, 6)])
    engine.poll()
    assert_equal(blocks_of(engine, engine.gpu_cache), gpu)
    assert_equal(blocks_of(engine, engine.cpu_cache), cpu)


@pytest.mark.parametrize("kind", SHAPES)
def test_packed_blocks_and_separate_ones(kind: str) -> None:
    """A block of all packed layers is one run of memory; between the two kinds each layer is a run or several."""
    packed, other = make_engine(kind, 5, seed=1, layer_layout="packed"), make_engine(kind, 6, seed=2, kv_layout="HND")
    expected = moved(blocks_of(other, other.gpu_cache), blocks_of(packed, packed.gpu_cache), [(1, 5), (4, 0)])
    BlockCopier(packed.gpu_cache, other.gpu_cache, packed.layouts).run(torch.tensor([(1, 5), (4, 0)]))
    assert_equal(blocks_of(other, other.gpu_cache), expected)
    within = BlockCopier(packed.gpu_cache, packed.gpu_cache, packed.layouts)
    assert within._native.num_fragments == 1
    assert within._native.block_bytes == sum(layout.block_bytes for layout in packed.layouts)


def test_layouts_that_do_not_fit_the_caches() -> None:
    engine = make_engine("gemma4", 4)
    before = blocks_of(engine, engine.gpu_cache)
    layouts = list(engine.layouts)
    for wrong, words in (
        (layouts[:-1], "layout must be one for each of 5 layers"),
        ([*layouts[:-1], layouts[0]], r"src\[4\].shape must be"),
        (layouts[0], r"src\[2\].shape must be"),
    ):
        with pytest.raises(ValueError, match=words):
            BlockCopier(engine.gpu_cache, engine.gpu_cache, wrong)
    with pytest.raises(ValueError, match=r"must name destination blocks in \[0, 4\), got 4"):
        engine.copy(torch.tensor([(0, 4)]))
    assert_equal(blocks_of(engine, engine.gpu_cache), before)
