"""Checks of plain arguments: every error has the argument's name, the rule and the value."""

import numpy as np
import pytest
import torch

from kvpage.checks.tokens import as_tokens
from kvpage.checks.values import (
    MAX_NAMESPACE_BYTES,
    as_counts,
    as_integer,
    as_list,
    as_positions,
    check_at_least,
    check_flag,
    check_namespace,
)


@pytest.mark.parametrize("value", [0, -3, True, np.int64(7), torch.tensor(5)])
def test_integers_of_every_kind(value):
    assert as_integer("n", value) == int(value) and type(as_integer("n", value)) is int


@pytest.mark.parametrize("value", [1.0, "1", None, [1], torch.tensor(1.5)])
def test_other_values_are_no_integers(value):
    with pytest.raises(TypeError, match="n must be an integer, got "):
        as_integer("n", value)


@pytest.mark.parametrize("value, least", [(-1, 0), (0, 1), (True, 0), (2.0, 0), ("2", 0), (None, 0)])
def test_values_below_the_least_one(value, least):
    with pytest.raises(ValueError, match=f"n must be an integer of at least {least}, got {value!r}"):
        check_at_least("n", value, least)


def test_flags_are_bools():
    check_flag("flag", False)
    for value in (0, None, np.True_):
        with pytest.raises(TypeError, match="flag must be True or False, got "):
            check_flag("flag", value)


def test_namespaces_are_short_bytes():
    check_namespace(b"")
    check_namespace(b"x" * MAX_NAMESPACE_BYTES)
    with pytest.raises(ValueError, match=f"at most {MAX_NAMESPACE_BYTES} bytes, got {MAX_NAMESPACE_BYTES + 1}"):
        check_namespace(b"x" * (MAX_NAMESPACE_BYTES + 1))
    with pytest.raises(TypeError, match="namespace must be bytes, got str"):
        check_namespace("tenant")


def test_lists():
    assert as_list("ids", (1, 2)) == [1, 2] and as_list("ids", iter("ab")) == ["a", "b"]
    for value in (3, None, torch.tensor(3)):
        with pytest.raises(TypeError, match="ids must be a sequence, got "):
            as_list("ids", value)


def test_counts_are_one_for_all_or_one_each():
    assert as_counts("counts", 2, 3) == [2, 2, 2] and as_counts("counts", np.array([1, 0]), 5) == [1, 0]
    assert as_counts("counts", 2, 0) == []
    for value in (1.5, [1, 1.5], None):
        with pytest.raises(TypeError, match="counts must be an integer, or one integer a sequence, got "):
            as_counts("counts", value, 2)


def test_positions_are_one_each():
    assert as_positions("starts", [3, 0], 2).tolist() == [3, 0]
    assert as_positions("starts", [], 0).dtype == np.int64
    with pytest.raises(ValueError, match=r"starts must have one entry for each of 2 sequences, got shape \(3,\)"):
        as_positions("starts", [1, 2, 3], 2)
    with pytest.raises(TypeError, match="starts must be integers, got float64"):
        as_positions("starts", [1.0, 2.0], 2)


def test_tokens_are_int32_and_not_copied_without_need():
    ids = np.array([1, -2, 3], np.int32)
    assert as_tokens(ids) is ids or np.shares_memory(as_tokens(ids), ids)
    for given in ([1, -2, 3], np.array([1, -2, 3], np.int64), torch.tensor([1, -2, 3])):
        assert as_tokens(given).dtype == np.int32 and as_tokens(given).tolist() == [1, -2, 3]
    assert as_tokens([]).shape == (0,)


@pytest.mark.parametrize(
    "tokens, error, message",
    [
        ([[1]], ValueError, r"ids must be one-dimensional, got shape \(1, 1\)"),
        ([1.5], ValueError, "ids must be integers, got float64"),
        ([2**31], ValueError, "ids must fit into 32 bits, got 2147483648 to 2147483648"),
        ("text", TypeError, "ids must be token ids, got the text 'text'"),
        ({"input_ids": [1]}, TypeError, "ids must be token ids, got a dict: take the row of its 'input_ids'"),
        (torch.ones(1, requires_grad=True), ValueError, "ids must be readable as an array: "),
    ],
)
def test_what_is_no_token_id(tokens, error, message):
    with pytest.raises(error, match=message):
        as_tokens(tokens, "ids")
