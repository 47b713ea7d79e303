"""Items of the attention kernel: each tile of queries and each of its splits once, wherever the lengths lie."""

import os
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("for the interpreter", allow_module_level=True)

from support.kernel_calls import ON_KERNELS  # noqa: E402

from kvpage.kernels.attention_tiles import find, item_of  # noqa: E402

SEARCH, TILE_KEYS, LEAST, MOST = 4, 8, 2, 16


@triton.jit
def items_kernel(
    found_ptr, seq_len_ptr, query_len_ptr, num_seqs, capacity, window, num_pieces, BY_ROW: tl.constexpr, A: tl.constexpr
):
    target = tl.program_id(0)
    place = found_ptr + target * 6
    if BY_ROW:
        seq, queries, row, item, splits = find(
            target, seq_len_ptr, query_len_ptr, None, num_seqs, capacity, window, num_pieces, True, False, True, A
        )
        tl.store(place + 4, item)
    else:
        seq, queries, row, query, split, splits = item_of(
            target, seq_len_ptr, query_len_ptr, None, 0, num_seqs, capacity, window, num_pieces, True, A
        )
        tl.store(place + 3, query)
        tl.store(place + 4, split)
    tl.store(place, seq)
    tl.store(place + 1, queries)
    tl.store(place + 2, row)
    tl.store(place + 5, splits)


def constants(tile_tokens, bounded):
    sizes = {
        "TILE_TOKENS": tile_tokens,
        "TILE_KEYS": TILE_KEYS,
        "BOUNDED": bounded,
        "IS_FIXED": False,
        "IS_OWN": False,
        "IS_SHARED": False,
    }
    return SimpleNamespace(value=SimpleNamespace(SEARCH=SEARCH, MIN_SPLIT_TILES=LEAST, MAX_SPLITS=MOST, **sizes))


def expected(lengths, queries, tile_tokens, num_pieces):
    """(sequence, its queries, first row, tile's first query, split, splits) of each item, and each row's first item."""
    tiles, spans = [-(-count // tile_tokens) for count in queries], [-(-length // TILE_KEYS) for length in lengths]
    total = sum(count * span for count, span in zip(tiles, spans, strict=True))
    piece = max(-(-total // num_pieces), LEAST)
    items, first_items, row = [], [], 0
    for seq, (count, span) in enumerate(zip(queries, spans, strict=True)):
        splits = min(max(-(-span // piece), 1), MOST)
        first_items += [(seq, count, row, len(items), splits)] * count
        for query in range(0, count, tile_tokens):
            items += [(seq, count, row, query, split, splits) for split in range(splits)]
        row += count
    return items, first_items


@ON_KERNELS
@pytest.mark.parametrize("tile_tokens", [1, 3])
@pytest.mark.parametrize("num_pieces", [1, 7, 40])
@pytest.mark.parametrize("lengths", [[1], [0, 5], [900, 3, 4, 5, 60], [8] * 9, [17, 300, 0, 1, 9, 64, 65, 500]])
def test_each_item_is_found_once(where, lengths, num_pieces, tile_tokens):
    queries = [1 if tile_tokens == 1 else seq % 5 for seq in range(len(lengths))]
    items, rows = expected(lengths, queries, tile_tokens, num_pieces)
    assert len(items) <= num_pieces + sum(-(-count // tile_tokens) for count in queries)
    given = None if tile_tokens == 1 else torch.tensor(queries)
    for by_row, want in ((False, items), (True, rows)):
        found = torch.full((len(want) + 1, 6), -1)
        items_kernel[(len(found),)](
            found,
            torch.tensor(lengths),
            given,
            len(lengths),
            10_000,
            0,
            num_pieces,
            by_row,
            constants(tile_tokens, False),
        )
        columns = [0, 1, 2, 4, 5] if by_row else list(range(6))
        assert [tuple(row) for row in found[:-1, columns].tolist()] == want
        assert found[-1, 0] == len(lengths)  # one too many
