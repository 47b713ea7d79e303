"""Tests of token ids in their usual forms: what is read at once, and what is left to the reading of everything else."""

from typing import Any

import numpy as np
import pytest

from kvpage._C import ids_below

LENGTHS = (0, 1, 3, 4, 63, 64, 65, 129)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("limit", [1, 7, 1 << 30])
def test_ids_below_takes_what_is_in_range(length: int, limit: int) -> None:
    ids = np.random.default_rng(length).integers(0, limit, length).astype(np.int32)
    assert ids_below(ids, limit) is ids
    read = ids_below(ids.tolist(), limit)
    assert read is not None and read.dtype == np.int32
    assert np.array_equal(read, ids)


@pytest.mark.parametrize("length", LENGTHS[1:])
@pytest.mark.parametrize("wrong", [-(1 << 29), -1, 7, 8, (1 << 29) + 7])
def test_ids_below_refuses_one_wrong_id_anywhere(length: int, wrong: int) -> None:
    for at in {0, length // 2, length - 1}:
        ids = np.arange(length, dtype=np.int32) % 7
        ids[at] = wrong
        assert ids_below(ids, 7) is None
        assert ids_below(ids.tolist(), 7) is None


@pytest.mark.parametrize("number", [-(1 << 31), (1 << 31) - 1])
def test_ids_below_at_the_ends_of_32_bits(number: int) -> None:
    ids = np.array([number], np.int32)
    for limit in (-(1 << 40), -1, 0, 1, (1 << 31) - 1, 1 << 31, 1 << 40):
        assert (ids_below(ids, limit) is not None) == (0 <= number < limit)


@pytest.mark.parametrize(
    "tokens",
    [
        [True, 1],
        [1, 2.0],
        [1, None],
        [1 << 30],
        [1 << 70],
        (1, 2),
        "ab",
        None,
        np.array([1, 2]),
        np.array([1, 2], np.uint32),
        np.array([1, 2], ">i4"),
        np.array([[1, 2]], np.int32),
        np.array(1, np.int32),
        np.arange(8, dtype=np.int32)[::2],
        np.ma.array([1, 2], dtype=np.int32),
        np.frombuffer(b"\0" * 9, np.uint8)[1:].view(np.int32),
    ],
    ids=str,
)
def test_ids_below_leaves_every_other_form_alone(tokens: Any) -> None:
    assert ids_below(tokens, 1 << 40) is None
