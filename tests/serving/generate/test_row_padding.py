"""Padding of rows: of masks, and of the rows of a view, against lists."""

import numpy as np
import pytest
import torch

from kvpage.serving.generate.view.packed_rows import PackedRows
from kvpage.serving.generate.view.row_padding import check_places, pads_of_mask


def test_pads_of_masks() -> None:
    assert pads_of_mask(None, 3) == [0, 0, 0]
    assert pads_of_mask(torch.tensor([[1], [1]]), 2) == [0, 0]
    assert pads_of_mask(torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]]), 3) == [2, 0, 1]


@pytest.mark.parametrize("mask", [[[0, 0]], [[1, 0]], [[1, 0, 1]], [[0, 1], [0, 1]], [1, 1]])
def test_masks_that_are_refused(mask: list) -> None:
    with pytest.raises(ValueError, match="attention_mask must"):
        pads_of_mask(torch.tensor(mask), 1)


def test_places_of_a_forward() -> None:
    pads, mask = [2, 0], torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = torch.tensor([[1, 0], [1, 2]])
    check_places({"attention_mask": mask[:, :3], "position_ids": positions}, pads, 1, 3)
    check_places({"attention_mask": mask}, pads, 3, 4)
    check_places({}, [0, 0], 3, 4)
    for wrong in (
        {},
        {"attention_mask": mask},
        {"attention_mask": torch.ones(2, 3)},
        {"attention_mask": mask[:, :3], "position_ids": positions + 1},
        {"attention_mask": mask[:, :3], "position_ids": positions[:1]},
        {"attention_mask": mask[:, :3], "cache_position": torch.tensor([0, 1])},
    ):
        with pytest.raises(ValueError, match="must"):
            check_places(wrong, pads, 1, 3)


@pytest.mark.parametrize("num_logits", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 2, 5])
def test_rows_are_packed_and_unpacked(start: int, num_logits: int) -> None:
    """A logit is the token, and the position of its row."""
    pads, tokens = [0, 1, 3, 9], np.arange(12, dtype=np.int32).reshape(4, 3) + 100
    rows = PackedRows.of(tokens, start, pads, num_logits)
    at = [(row, j) for row in range(4) for j in range(3) if start + j >= pads[row]]
    assert rows.packed.token_ids.tolist() == [int(tokens[place]) for place in at]
    assert rows.packed.positions().tolist() == [start + j - pads[row] for row, j in at]
    logits = torch.tensor([[tokens[row, j], start + j - pads[row]] for row, j in at])[rows.packed.wanted]
    out = rows.unpacked(logits, 4, num_logits)
    for row in range(4):
        for j in range(3 - num_logits, 3):
            expected = [int(tokens[row, j]), start + j - pads[row]] if (row, j) in at else [0, 0]
            assert out[row, j - 3 + num_logits].tolist() == expected


def test_rows_of_padding_alone() -> None:
    rows = PackedRows.of(np.zeros((2, 3), np.int32), 0, [3, 4], 1)
    assert rows.rows == [] and len(rows.packed.token_ids) == 0
    assert torch.equal(rows.unpacked(torch.zeros(0, 7), 2, 1), torch.zeros(2, 1, 7))
