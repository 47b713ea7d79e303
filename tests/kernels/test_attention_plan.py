"""The cut of attention into tiles and splits: plain arithmetic, as the device does it."""

import pytest
import torch

pytest.importorskip("triton")

from kvpage.kernels.attention_plan import (  # noqa: E402
    MAX_SPLITS,
    Sizes,
    choose_items,
    choose_pieces,
    choose_tile,
    min_keys_of_split,
    split_columns,
)


def test_tiles_hold_their_columns():
    for size in (*range(1, 300), 512, 576, 1000, 1024):
        tile, tail = split_columns(size)
        assert size <= tile + tail <= max(2 * size, 16)
        assert all(n & (n - 1) == 0 and n >= 16 for n in (tile, tail) if n)
    assert split_columns(576) == (512, 64) and split_columns(80) == (64, 16) and split_columns(112) == (128, 0)


LLAMA = Sizes(4, 128, 128, 2, 2, False, False)


def splits_of(lengths, head_tiles, tile, multiprocessors, tiles=None):
    """The splits of each sequence, as kvpage.kernels.attention_tiles adds them up on the device."""
    tiles = tiles or [1] * len(lengths)
    num_pieces = choose_pieces(sum(tiles), head_tiles, max(lengths), tile, multiprocessors)
    if num_pieces == 0:
        return [1] * len(lengths)
    spans = [-(-length // tile.keys) for length in lengths]
    total = sum(count * span for count, span in zip(tiles, spans, strict=True))
    piece = max(-(-total // num_pieces), min_keys_of_split(tile) // tile.keys)
    splits = [min(max(-(-span // piece), 1), MAX_SPLITS) for span in spans]
    num_items = sum(count * split for count, split in zip(tiles, splits, strict=True))
    assert num_items <= choose_items(sum(tiles), num_pieces, max(lengths), tile) <= sum(tiles) + num_pieces
    return splits


def test_splits_fill_the_device_and_no_more():
    tile = choose_tile(LLAMA, 4, 90)
    assert tile.rows == 16
    assert splits_of([131072], 8, tile, 132) == [128]
    assert set(splits_of([8192] * 64, 8, tile, 132)) <= {2, 3, 4}
    assert set(splits_of([8192] * 512, 8, tile, 132)) == {1}
    assert splits_of([100], 8, tile, 132) == [1]  # too few keys for a second thread block
    wide = choose_tile(LLAMA, 4 * 512, 90)
    assert wide.rows == 128 and splits_of([65536], 8, wide, 132, [64]) == [1]
    assert 1 < splits_of([65536], 8, wide, 132, [8])[0] <= 8


def test_one_long_sequence_among_short_ones_is_split_alone():
    """Thread blocks with work fill the device, and partial results have few rows."""
    tile = choose_tile(LLAMA, 4, 90)
    *short, long = splits_of([200] * 63 + [100_000], 8, tile, 132)
    assert short == [1] * 63 and long >= 100 and 8 * (63 + long) > 8 * 132
    rows = choose_items(64, choose_pieces(64, 8, 100_000, tile, 132), 100_000, tile)
    assert rows * 32 * 128 * 4 < 4 * 2**20


@pytest.mark.parametrize("seed", range(20))
def test_no_split_is_much_longer_than_the_others(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = (2.0 ** (17 * torch.rand(1 + 13 * seed, generator=generator))).int().add(1).tolist()
    tile = choose_tile(LLAMA, 4, 90)
    splits = splits_of(lengths, 8, tile, 132)
    longest = max(-(-length // split) for length, split in zip(lengths, splits, strict=True))
    fair = max(sum(lengths) / 132, min_keys_of_split(tile), max(lengths) / MAX_SPLITS)
    assert longest <= fair + 2 * tile.keys


def test_a_kernel_is_compiled_for_few_sizes_of_tiles():
    for capability in (80, 90):
        assert len({choose_tile(LLAMA, rows, capability) for rows in range(1, 3000)}) <= 3
