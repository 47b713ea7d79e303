"""Tiled attention against the definition, one query and one head at a time, in fp64."""

import math

import numpy as np
import pytest
import torch

from kvpage.layout.attention import Attention
from kvpage.serving.model import dense_attention
from kvpage.serving.model.dense_attention import attend


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: Attention,
    positions: list[int] | None = None,
) -> torch.Tensor:
    query, key, value = query.double(), key.double(), value.double()
    first, group = len(key) - len(query), query.shape[1] // key.shape[1]
    output = torch.empty(len(query), query.shape[1], value.shape[2], dtype=torch.float64)
    for row in range(len(query)):
        position = first + row if positions is None else positions[row]
        low = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
        for head in range(query.shape[1]):
            scores = key[low : position + 1, head // group] @ query[row, head] * options.scale
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            weights = scores.exp()
            total = weights.sum()
            if options.sinks is not None:
                total = total + math.exp(options.sinks[head])
            output[row, head] = (weights / total) @ value[low : position + 1, head // group]
    return output


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Strided as a model gives them: [num_tokens, heads, size] over memory [heads, num_tokens, size]."""
    return torch.randn(shape[1], shape[0], shape[2], dtype=dtype).transpose(0, 1)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": Attention(0.3),
    "window 1": Attention(0.3, sliding_window=1),
    "window 5": Attention(0.3, sliding_window=5),
    "window of all": Attention(0.3, sliding_window=23),
    "softcap": Attention(0.3, softcap=0.7),
    "sinks": Attention(0.3, sinks=SINKS),
    "all": Attention(0.3, sliding_window=5, softcap=0.7, sinks=SINKS),
}


@pytest.mark.parametrize("tile_rows", [1, 3, 256])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("num_queries, num_keys", [(1, 1), (1, 23), (2, 23), (7, 23), (22, 23), (23, 23)])
def test_equals_the_definition(
    num_queries: int, num_keys: int, name: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_attention, "MAX_TILE_ROWS", tile_rows)
    torch.manual_seed(0)
    query, key, value = rows(num_queries, 4, 8), rows(num_keys, 2, 8), rows(num_keys, 2, 8)
    found = attend(query, key, value, OPTIONS[name])
    assert found.shape == (num_queries, 4, 8) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), naive(query, key, value, OPTIONS[name]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("tile_rows", [1, 3, 256])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("positions", [[0], [22], [4, 5, 9], [0, 1, 7, 8, 20, 22], list(range(23))])
def test_queries_at_some_positions(
    positions: list[int], name: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_attention, "MAX_TILE_ROWS", tile_rows)
    torch.manual_seed(0)
    query, key, value = rows(len(positions), 4, 8), rows(23, 2, 8), rows(23, 2, 8)
    found = attend(query, key, value, OPTIONS[name], np.array(positions))
    expected = naive(query, key, value, OPTIONS[name], positions)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("key_size, value_size", [(8, 5), (5, 8)])
def test_keys_and_values_of_different_sizes(key_size: int, value_size: int, name: str) -> None:
    torch.manual_seed(0)
    query, key, value = rows(6, 4, key_size), rows(9, 2, key_size), rows(9, 2, value_size)
    found = attend(query, key, value, OPTIONS[name])
    assert found.shape == (6, 4, value_size)
    torch.testing.assert_close(found.double(), naive(query, key, value, OPTIONS[name]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.bfloat16, 2e-2)])
def test_dtypes(dtype: torch.dtype, tolerance: float, name: str) -> None:
    torch.manual_seed(0)
    query, key, value = rows(6, 4, 8, dtype=dtype), rows(9, 4, 8, dtype=dtype), rows(9, 4, 8, dtype=dtype)
    found = attend(query, key, value, OPTIONS[name])
    assert found.dtype == dtype
    expected = naive(query, key, value, OPTIONS[name])
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["window 5", "all"])
def test_no_mask_or_score_beyond_the_limits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_attention, "MAX_MASK_ENTRIES", 64)
    monkeypatch.setattr(dense_attention, "MAX_SCORES", 256)
    tiles = list(dense_attention._tiles(range(10, 50), 50, 4, OPTIONS[name], torch.device("cpu")))
    assert [tile.rows.start for tile in tiles[1:]] == [tile.rows.stop for tile in tiles[:-1]]
    assert (tiles[0].rows.start, tiles[-1].rows.stop) == (0, 40)
    for tile in tiles:
        num_entries = (tile.rows.stop - tile.rows.start) * (tile.span.stop - tile.span.start)
        assert num_entries <= 64
        assert tile.span.stop - tile.span.start <= 5 + tile.rows.stop - tile.rows.start
