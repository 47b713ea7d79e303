"""Runs of tokens' rows against the addresses of single elements."""

import itertools

import pytest
import torch

from kvpage.store.records.tensor_chunk import TokenParts

T, H, D = 7, 3, 16  # of float64: a row has 128 bytes


def parts_of(fmt: str, kind: str) -> list[list[torch.Tensor]]:
    """Two layers of K and V, arranged in memory as `kind` says."""
    whole = torch.arange(2 * 2 * T * H * D, dtype=torch.float64)
    if kind == "plain":
        kv = whole.view(2, 2, T, H, D) if fmt == "vllm" else whole.view(2, 2, H, T, D)
    elif kind == "turned":
        kv = (whole.view(2, 2, H, T, D) if fmt == "vllm" else whole.view(2, 2, T, H, D)).transpose(2, 3)
    elif kind == "gaps":
        wide = torch.zeros(2, 2, T, H, D + 2, dtype=torch.float64)[..., :D]
        kv = wide if fmt == "vllm" else wide.transpose(2, 3)
    else:  # K and V of a token side by side
        kv = whole.view(2, T, 2, H, D).transpose(1, 2)
        kv = kv if fmt == "vllm" else kv.transpose(2, 3)
    return [list(layer) for layer in kv]


def addresses(parts, fmt: str, begin: int, end: int, num_unwanted: int) -> list[int]:
    """Return the address of each element in the payload's order, 0 for one that is not wanted."""
    found, dim = [], 0 if fmt == "vllm" else 1
    tokens = [None] * num_unwanted + list(range(begin, end))
    order = itertools.product(tokens, range(H)) if fmt == "vllm" else itertools.product(range(H), tokens)
    rows = [one if fmt == "vllm" else one[::-1] for one in order]  # (token, head)
    for part in (part for layer in parts for part in layer):
        size = part.element_size()
        for token, head in rows:
            for at in range(D):
                place = None if token is None else token * part.stride(dim) + head * part.stride(1 - dim) + at
                found.append(0 if place is None else part.data_ptr() + place * size)
    return found


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("kind", ["plain", "turned", "gaps", "beside"])
def test_runs_are_the_elements_in_their_order(fmt: str, kind: str) -> None:
    parts = parts_of(fmt, kind)
    rows = TokenParts(parts, fmt)
    for begin, end, num_unwanted in [(0, T, 0), (0, 1, 0), (2, 5, 0), (0, 4, 1), (3, T, 4), (T - 1, T, 1)]:
        runs = rows.runs(begin, end, num_unwanted)
        single = [at + 8 * index if at else 0 for at, count in runs.tolist() for index in range(count // 8)]
        assert single == addresses(parts, fmt, begin, end, num_unwanted)
    assert len(parts_of(fmt, "plain")) * 2 == len(TokenParts(parts_of(fmt, "plain"), fmt).runs(0, T))


def test_parts_without_whole_rows_have_none() -> None:
    plain = parts_of("vllm", "plain")
    assert (
        TokenParts([[part.transpose(1, 2).contiguous().transpose(1, 2) for part in plain[0]]], "vllm").runs(0, T)
        is None
    )
    assert (
        TokenParts([[plain[0][0], plain[0][1].transpose(0, 1).contiguous().transpose(0, 1)]], "vllm").runs(0, T) is None
    )
    small = [[torch.zeros(T, 2, 4, dtype=torch.uint8)[:, ::2]]]  # rows of 4 bytes, with gaps
    assert TokenParts(small, "vllm").runs(0, T) is None
