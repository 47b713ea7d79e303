"""The cut of attention into tiles and splits: plain arithmetic, as the device does it."""

import pytest
import torch

pytest.importorskip("triton")

from support.attention_compiled import CASES, sizes_and_tile  # noqa: E402

from kvpage.benchmarks.compiling_driver import SHARED_MEMORY  # noqa: E402
from kvpage.kernels.attention_plan import (  # noqa: E402
    MAX_SPLITS,
    Sizes,
    choose_items,
    choose_pieces,
    choose_tile,
    min_keys_of_split,
    shared_bytes,
    split_columns,
)

ANY_MEMORY = 2**20  # room for whatever registers have room for


def test_tiles_hold_their_columns():
    for size in (*range(1, 300), 512, 576, 1000, 1024):
        tile, tail = split_columns(size)
        assert size <= tile + tail <= max(2 * size, 16)
        assert all(n & (n - 1) == 0 and n >= 16 for n in (tile, tail) if n)
    assert split_columns(576) == (512, 64) and split_columns(80) == (64, 16) and split_columns(112) == (128, 0)


LATENTS = Sizes(128, 576, 512, 2, 2, True, False, block_size=64)


@pytest.mark.parametrize("capability", [80, 90])
def test_latents_are_read_once_for_64_heads(capability):
    """By one thread block for up to 64 heads, and by two neighbours for 128."""
    for heads, rows in ((8, 16), (16, 16), (32, 32), (40, 64), (64, 64), (128, 64)):
        tile = choose_tile(LATENTS._replace(group_size=heads), heads, capability, ANY_MEMORY)
        assert tile.rows == rows and tile.num_tokens(heads, 1) == 1
        assert rows < 64 or tile.keys == 32


@pytest.mark.parametrize(
    "capability, other",
    [(86, {}), (89, {}), (100, {}), (120, {}), (90, {"stored_bytes": 1}), (90, {"block_size": 8}),
     (90, {"stored_bytes": 4, "compute_bytes": 4}), (90, {"shares_rows": False})],
)  # fmt: skip
def test_latents_are_read_more_often_where_shared_memory_or_registers_are_too_few(capability, other):
    assert choose_tile(LATENTS._replace(**other), 128, capability, ANY_MEMORY).rows <= 32


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("name", CASES)
def test_every_case_fits_into_shared_memory(name, arch):
    """By the plan's arithmetic; test_attention_compile.py compares it with what the compiler reports."""
    sizes, tile = sizes_and_tile(arch, **CASES[name])
    assert shared_bytes(tile, sizes, arch) <= SHARED_MEMORY[arch]
    roomy = choose_tile(sizes, CASES[name]["group"] * CASES[name]["queries"], arch, ANY_MEMORY)
    assert (tile == roomy) == (shared_bytes(roomy, sizes, arch) <= SHARED_MEMORY[arch])


HEADS_OF_256 = Sizes(8, 256, 256, 2, 2, False, False)
WIDE_HEADS = Sizes(1, 576, 576, 2, 2, False, False)
WIDEST_HEADS = Sizes(1, 2048, 2048, 2, 2, False, False)


@pytest.mark.parametrize("arch", [86, 89, 120])
@pytest.mark.parametrize(
    "sizes, wanted, rows, keys, stages",
    [
        (HEADS_OF_256, 4096, 64, 16, 3),  # of Gemma 2 and 3, and of Qwen3-Next
        (HEADS_OF_256, 8, 16, 32, 3),
        (LATENTS._replace(stored_bytes=4, compute_bytes=4), 128, 16, 16, 2),
        (WIDE_HEADS, 512, 16, 16, 2),
        (LATENTS, 128, 32, 16, 3),
    ],
)
def test_tiles_are_smaller_where_shared_memory_is_99_kib(sizes, wanted, rows, keys, stages, arch):
    """Fewer keys of a tile, at last no tile under way while another one is multiplied."""
    tile = choose_tile(sizes, wanted, arch, SHARED_MEMORY[arch])
    assert (tile.rows, tile.keys, tile.num_stages) == (rows, keys, stages)
    assert choose_tile(sizes, wanted, 80, SHARED_MEMORY[80]).num_stages == 3


def test_rows_are_fewer_where_few_keys_are_not_enough():
    tile = choose_tile(HEADS_OF_256, 4096, 89, 50_000)
    assert (tile.rows, tile.keys, tile.num_warps, tile.num_stages) == (16, 16, 4, 3)


def test_heads_that_no_tile_holds_are_refused():
    with pytest.raises(ValueError, match=r"must fit into .* 101376 bytes .* got K of 2048 and V of 2048 elements"):
        choose_tile(WIDEST_HEADS, 1, 89, SHARED_MEMORY[89])


LLAMA = Sizes(4, 128, 128, 2, 2, False, False)


def splits_of(lengths, head_tiles, tile, multiprocessors, tiles=None):
    """The splits of each sequence, as kvpage.kernels.attention_tiles adds them up on the device."""
    tiles = tiles or [1] * len(lengths)
    num_pieces = choose_pieces(sum(tiles), head_tiles, max(lengths), tile, max(tiles) == 1, multiprocessors)
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
    tile = choose_tile(LLAMA, 4, 90, ANY_MEMORY)
    assert tile.rows == 16
    assert splits_of([131072], 8, tile, 132) == [128]
    assert set(splits_of([8192] * 64, 8, tile, 132)) <= {2, 3, 4}
    assert set(splits_of([8192] * 512, 8, tile, 132)) == {1}
    assert splits_of([100], 8, tile, 132) == [1]  # too few keys for a second thread block
    wide = choose_tile(LLAMA, 4 * 512, 90, ANY_MEMORY)
    assert wide.rows == 128 and splits_of([65536], 8, wide, 132, [64]) == [1]
    assert 1 < splits_of([65536], 8, wide, 132, [8])[0] <= 8


def test_one_long_sequence_among_short_ones_is_split_alone():
    """Thread blocks with work fill the device, and partial results have few rows."""
    tile = choose_tile(LLAMA, 4, 90, ANY_MEMORY)
    *short, long = splits_of([200] * 63 + [100_000], 8, tile, 132)
    assert short == [1] * 63 and long >= 100 and 8 * (63 + long) > 8 * 132
    rows = choose_items(64, choose_pieces(64, 8, 100_000, tile, True, 132), 100_000, tile)
    assert rows * 32 * 128 * 4 < 4 * 2**20


def test_decodes_over_latents_are_split_whatever_their_number():
    """One long sequence does not hold up the others. Partial results are less than a sixth of the latents' bytes."""
    tile = choose_tile(LATENTS._replace(group_size=64), 64, 90, ANY_MEMORY)
    *short, long = splits_of([500] * 199 + [100_000], 1, tile, 132)
    assert short == [1] * 199 and long >= 60
    items = sum(splits_of([8192] * 64, 1, tile, 132))
    assert items >= 2 * 132 and items * 64 * 512 * 4 * 2 < 64 * 8192 * 1152 / 6


@pytest.mark.parametrize("seed", range(20))
def test_no_split_is_much_longer_than_the_others(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = (2.0 ** (17 * torch.rand(1 + 13 * seed, generator=generator))).int().add(1).tolist()
    tile = choose_tile(LLAMA, 4, 90, ANY_MEMORY)
    splits = splits_of(lengths, 8, tile, 132)
    longest = max(-(-length // split) for length, split in zip(lengths, splits, strict=True))
    fair = max(sum(lengths) / 132, min_keys_of_split(tile), max(lengths) / MAX_SPLITS)
    assert longest <= fair + 2 * tile.keys


def test_a_kernel_is_compiled_for_few_sizes_of_tiles():
    for capability in (80, 90):
        assert len({choose_tile(LLAMA, rows, capability, ANY_MEMORY) for rows in range(1, 3000)}) <= 3
