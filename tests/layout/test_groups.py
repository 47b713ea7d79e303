"""Groups of a model's cache, and the place of every byte of a state slot."""

import math
from typing import Any

import pytest
import torch

from kvpage.layout.groups import ALIGNMENT, CacheGroup, GroupKind, StateLayout, StatePart

CONV = StatePart(2, "conv", 0, (5, 3), torch.bfloat16)
RECURRENT = StatePart(2, "recurrent", 0, (2, 4, 4), torch.float32)
SECOND = StatePart(2, "conv", 1, (1,), torch.float32)
EARLY = StatePart(0, "conv", 0, (16,), torch.float32)
EACH_SIZE = [1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1]


def test_parts_lie_one_after_the_other() -> None:
    layout = StateLayout.of_parts([RECURRENT, SECOND, CONV, EARLY])
    assert layout.parts == (EARLY, CONV, SECOND, RECURRENT)
    assert layout.offsets == (0, 64, 128, 192)
    assert layout.slot_bytes == 320


@pytest.mark.parametrize("num_bytes", EACH_SIZE)
def test_parts_and_slots_are_aligned(num_bytes: int) -> None:
    parts = [StatePart(layer, "conv", 0, (num_bytes,), torch.int8) for layer in range(3)]
    layout, padded = StateLayout.of_parts(parts), math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT
    assert layout.offsets == (0, padded, 2 * padded) and layout.slot_bytes == 3 * padded


def test_a_digest_names_layers_shapes_and_dtypes() -> None:
    others = [
        StatePart(3, "conv", 0, (5, 3), torch.bfloat16),
        StatePart(2, "recurrent", 0, (5, 3), torch.bfloat16),
        StatePart(2, "conv", 1, (5, 3), torch.bfloat16),
        StatePart(2, "conv", 0, (3, 5), torch.bfloat16),
        StatePart(2, "conv", 0, (5, 3), torch.float16),
    ]
    digests = {StateLayout.of_parts([part]).digest for part in [CONV, *others]}
    assert len(digests) == 6 and {len(digest) for digest in digests} == {32}
    assert StateLayout.of_parts([CONV, EARLY]).digest == StateLayout.of_parts([EARLY, CONV]).digest


def test_the_layout_of_groups() -> None:
    full = CacheGroup(GroupKind.FULL, (1, 3))
    state = CacheGroup(GroupKind.STATE, (0, 2), parts=(CONV, EARLY))
    assert StateLayout.of_groups([full]) is None
    assert StateLayout.of_groups([full, state]) == StateLayout.of_parts([EARLY, CONV])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((-1, "conv", 0, (1,), torch.float32), "layer_id must be an integer of at least 0, got -1"),
        ((0, "conv", -1, (1,), torch.float32), "index must be an integer of at least 0, got -1"),
        ((0, "key", 0, (1,), torch.float32), "name must be 'conv' or 'recurrent', got 'key'"),
        ((0, "conv", 0, (2, 0), torch.float32), "a size of shape must be an integer of at least 1, got 0"),
        ((0, "conv", 0, (1,), "float32"), "dtype must be a torch.dtype, got 'float32'"),
    ],
)
def test_bad_parts(fields: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StatePart(*fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("full", (0,)), "kind must be a GroupKind, got 'full'"),
        ((GroupKind.FULL, ()), "layer_ids must be some layers in ascending order"),
        ((GroupKind.FULL, (1, 0)), "layer_ids must be some layers in ascending order"),
        ((GroupKind.FULL, (0, 0)), "layer_ids must be some layers in ascending order"),
        ((GroupKind.FULL, (0,), 4), "window must be given exactly for a group 'window', full got 4"),
        ((GroupKind.WINDOW, (0,)), "window must be given exactly for a group 'window', window got None"),
        ((GroupKind.WINDOW, (0,), 0), "window must be an integer of at least 1, got 0"),
        ((GroupKind.STATE, (2,)), "parts must be given exactly for a group 'state', state got 0"),
        ((GroupKind.FULL, (2,), None, (CONV,)), "parts must be given exactly for a group 'state', full got 1"),
        ((GroupKind.STATE, (0, 2), None, (CONV,)), r"parts must be of the layers \(0, 2\)"),
        ((GroupKind.FULL, (None,)), "a layer of layer_ids must be an integer of at least 0, got None"),
        ((GroupKind.FULL, (-1,)), "a layer of layer_ids must be an integer of at least 0, got -1"),
    ],
)
def test_bad_groups(fields: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CacheGroup(*fields)


def test_bad_layouts() -> None:
    with pytest.raises(ValueError, match="parts must be one or more, got 0"):
        StateLayout(())
    with pytest.raises(ValueError, match="parts must differ in layer_id, name or index"):
        StateLayout((CONV, CONV))


@pytest.mark.parametrize("parts", [[CONV, None], [[CONV]], {0: CONV}, "x"])
def test_what_is_no_part(parts: Any) -> None:
    for make in (StateLayout, StateLayout.of_parts, lambda parts: CacheGroup(GroupKind.STATE, (2,), None, parts)):
        with pytest.raises(TypeError, match="parts must be StateParts, got (NoneType|list|int|str)"):
            make(parts)


def test_what_is_no_group() -> None:
    with pytest.raises(TypeError, match="groups must be CacheGroups, got StatePart"):
        StateLayout.of_groups([CONV])  # type: ignore[list-item]
