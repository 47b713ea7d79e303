"""StateCache: views of parts, and copies of whole slots, byte by byte."""

import numpy as np
import pytest
import torch

from kvpage.blocks.moves import BlockMove
from kvpage.cache.state_cache import StateCache
from kvpage.layout.groups import StateLayout, StatePart

PARTS = (
    StatePart(0, "conv", 0, (5, 3), torch.bfloat16),
    StatePart(0, "recurrent", 0, (2, 4, 4), torch.float32),
    StatePart(3, "conv", 0, (7,), torch.float32),
)
LAYOUT = StateLayout.of_parts(PARTS)


def filled(num_slots: int, num_host_slots: int) -> StateCache:
    """Every byte of every slot is random, those between parts too."""
    cache = StateCache(LAYOUT, num_slots, num_host_slots)
    cache.slots.random_(0, 256)
    cache.host_slots.random_(0, 256)
    return cache


@pytest.mark.parametrize("num_slots", [0, 1, 2, 5])
def test_views_are_the_slots_bytes(num_slots: int) -> None:
    cache = filled(num_slots, 0)
    for part, offset in zip(LAYOUT.parts, LAYOUT.offsets, strict=True):
        view = cache.part(part)
        assert view.shape == (num_slots, *part.shape) and view.dtype == part.dtype
        expected = cache.slots[:, offset : offset + part.num_bytes]
        assert torch.equal(view.contiguous().view(torch.uint8).view(num_slots, part.num_bytes), expected)
        view.zero_()
        assert not cache.slots[:, offset : offset + part.num_bytes].any()


def test_new_slots_are_zeros_and_counted() -> None:
    cache = StateCache(LAYOUT, 3, 2)
    assert not cache.slots.any() and not cache.host_slots.any()
    assert cache.num_bytes == cache.slots.numel() == 3 * LAYOUT.slot_bytes
    assert cache.num_host_bytes == cache.host_slots.numel() == 2 * LAYOUT.slot_bytes


@pytest.mark.parametrize("kind", ["copy", "swap_out", "swap_in"])
@pytest.mark.parametrize("pairs", [[], [(0, 1)], [(2, 0)], [(3, 1), (0, 2)], [(1, 1)]])
def test_a_move_copies_slots_and_nothing_else(kind: str, pairs: list[tuple[int, int]]) -> None:
    cache = filled(4, 4)
    before = cache.slots.clone(), cache.host_slots.clone()
    source, target = {"copy": (0, 0), "swap_out": (0, 1), "swap_in": (1, 0)}[kind]
    expected = [tier.clone() for tier in before]
    for from_slot, to_slot in pairs:
        expected[target][to_slot] = before[source][from_slot]
    cache.do_move(BlockMove(kind, np.array(pairs, np.int64).reshape(-1, 2)))
    assert torch.equal(cache.slots, expected[0]) and torch.equal(cache.host_slots, expected[1])


@pytest.mark.parametrize("pairs", [[(0, 4)], [(-1, 0)], [(0, 1), (2, 1)], [(0, 1), (1, 2)]])
def test_bad_pairs_copy_nothing(pairs: list[tuple[int, int]]) -> None:
    cache = filled(4, 4)
    before = cache.slots.clone()
    with pytest.raises(ValueError):
        cache.copy(torch.tensor(pairs))
    assert torch.equal(cache.slots, before)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="layout must be a StateLayout, got tuple"):
        StateCache(PARTS, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_slots must be an integer of at least 0, got -1"):
        StateCache(LAYOUT, -1)
    with pytest.raises(ValueError, match="num_host_slots must be an integer of at least 0, got True"):
        StateCache(LAYOUT, 1, True)
    with pytest.raises(TypeError, match="calibration must be a Calibration, got tuple"):
        StateCache(LAYOUT, 1, calibration=(1, 1))  # type: ignore[arg-type]
    cache = StateCache(LAYOUT, 1)
    with pytest.raises(TypeError, match="part must be a StatePart, got tuple"):
        cache.part(PARTS[0].key)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind must be 'copy', 'swap_out' or 'swap_in', got 'out'"):
        cache.do_move(BlockMove("out", np.zeros((0, 2), np.int64)))  # type: ignore[arg-type]
    for other in (StatePart(1, "conv", 0, (5, 3), torch.bfloat16), StatePart(3, "conv", 0, (8,), torch.float32)):
        with pytest.raises(ValueError, match="part must be of the layout"):
            cache.part(other)
