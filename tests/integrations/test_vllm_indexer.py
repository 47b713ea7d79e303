"""vLLM's operations on an indexer's keys, against loops over tokens and tiles: every byte of every destination."""

import struct

import pytest
import torch
from support.vllm_tensors import DEVICES, FP8, Unchanged, code, fp32, noise, power_from, quotient

from kvpage import ops
from kvpage.integrations import vllm_ops
from kvpage.integrations.vllm_ops.fp8_tiles import power_of_two_from

BLOCK_SIZE = 4


def naive_scale(tile, kind):
    largest = max(abs(number) for number in tile)
    scale = quotient(max(largest, fp32(1e-4)), 448.0)
    return scale if kind == "auto" else power_from(scale)


def naive_write(block, offset, key, tile_size, kind):
    """Writes a token's codes and scales into a block's bytes, [block_size * (head_dim + 4 * tiles)]."""
    head_dim, tiles = len(key), len(key) // tile_size
    numbers = key.float().tolist()
    for tile in range(tiles):
        part = numbers[tile * tile_size : (tile + 1) * tile_size]
        scale = naive_scale(part, kind)
        begin = offset * head_dim + tile * tile_size
        block[begin : begin + tile_size] = torch.tensor([code(n, scale) for n in part], dtype=torch.uint8)
        if kind == "mxfp8":
            stored = [(struct.unpack("<I", struct.pack("<f", scale))[0] >> 23) & 255] * 4
        else:
            stored = list(struct.pack("<f", scale))
        at = BLOCK_SIZE * head_dim + (offset * tiles + tile) * 4
        block[at : at + 4] = torch.tensor(stored, dtype=torch.uint8)


def keys_of(num_tokens, head_dim, dtype=torch.bfloat16):
    keys = torch.randn(num_tokens, head_dim) * torch.logspace(-7, 5, max(num_tokens, 1))[:num_tokens, None]
    keys[num_tokens // 2 : num_tokens // 2 + 1] = 0
    return keys.to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["auto", "ue8m0", "mxfp8"])
@pytest.mark.parametrize("head_dim, tile", [(128, 128), (256, 128), (64, 16)])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5])
def test_keys_are_written_with_their_scales(device, kind, head_dim, tile, num_tokens):
    if kind == "mxfp8" and head_dim != tile:
        pytest.skip("mxfp8 is of one tile")
    keys = keys_of(num_tokens + 1, head_dim)
    slots = torch.tensor([14, 0, -1, 5, 6][:num_tokens], dtype=torch.int64)
    slab = noise(5, 2, BLOCK_SIZE, head_dim + 4 * head_dim // tile)  # two layers: blocks lie apart
    expected = slab.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            naive_write(expected[slot // BLOCK_SIZE, 1].view(-1), slot % BLOCK_SIZE, keys[token], tile, kind)
    slab = slab.to(device)
    vllm_ops.indexer_k_quant_and_cache(keys.to(device), slab[:, 1], slots.to(device), tile, kind)
    assert torch.equal(slab.cpu(), expected)


@pytest.mark.parametrize("exponent", range(-30, 31))
def test_powers_of_two_stay_and_what_is_above_goes_up(exponent):
    power = torch.tensor([2.0**exponent])
    above, below = (torch.nextafter(power, torch.tensor([bound])) for bound in (torch.inf, 0.0))
    found = power_of_two_from(torch.cat([power, above, below])).tolist()
    assert found == [2.0**exponent, 2.0 ** (exponent + 1), 2.0**exponent]


def gathered(device="cpu", **changes):
    given = {
        "kv_cache": noise(6, BLOCK_SIZE, 136),
        "dst_k": noise(9, 128),
        "dst_scale": noise(9, 8),
        "block_table": torch.tensor([[1, 3, 1 << 30], [-9, -9, -9], [5, 1 << 30, -7]], dtype=torch.int32),
        "cu_seq_lens": torch.tensor([0, 5, 5, 7], dtype=torch.int32),
    } | changes
    return {name: value.to(device) for name, value in given.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.uint8, FP8])
def test_keys_are_gathered_with_their_scales(device, kind):
    given = gathered(device)
    cache, codes, scales = (given[name].cpu().clone() for name in ("kv_cache", "dst_k", "dst_scale"))
    for row, (block, offset) in enumerate([(1, 0), (1, 1), (1, 2), (1, 3), (3, 0), (5, 0), (5, 1)]):
        held = cache[block].view(-1)
        codes[row] = held[offset * 128 :][:128]
        scales[row] = held[BLOCK_SIZE * 128 + offset * 8 :][:8]
    given["dst_k"] = given["dst_k"].view(kind)
    vllm_ops.cp_gather_indexer_k_quant_cache(**given)
    assert torch.equal(given["dst_k"].cpu().view(torch.uint8), codes)
    assert torch.equal(given["dst_scale"].cpu(), scales)
    if device == "cuda":
        ops.check_device("cuda")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"slot_mapping": torch.tensor([0, 20])}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([7, 7])}, "slot_mapping must name a slot once"),
        ({"slot_mapping": torch.tensor([0, 1, 2])}, "slot_mapping must name a slot for each of at most 2 rows"),
        ({"quant_block_size": 0}, "quant_block_size must divide head_dim, 256, got 0"),
        ({"quant_block_size": 96}, "quant_block_size must divide head_dim, 256, got 96"),
        ({"quant_block_size": 64}, r"kv_cache must be \[num_blocks, block_size, 272\]"),
        ({"kv_cache_dtype": "mxfp8"}, "head_dim and quant_block_size must be 128 for mxfp8, got 256 and 128"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, ue8m0, mxfp8, got 'nvfp4'"),
        ({"k": torch.zeros(2, 256).double()}, "k.dtype must be"),
        ({"k": torch.zeros(2, 2, 128)}, r"k must be \[num_tokens, head_dim\]"),
        ({"kv_cache": noise(5, 4, 2, 264)[:, :, 0]}, "a block of kv_cache must be one run of memory"),
        ({"kv_cache": torch.zeros(5, 4, 264)}, "kv_cache.dtype must be torch.uint8 or torch.float8_e4m3fn"),
    ],
)
def test_bad_keys_write_nothing(changes, message):
    given = {"k": torch.randn(2, 256), "kv_cache": noise(5, 4, 264), "slot_mapping": torch.tensor([0, 1])}
    given |= {"quant_block_size": 128, "kv_cache_dtype": "ue8m0"} | changes
    with Unchanged(given["kv_cache"]), pytest.raises(ValueError, match=message):
        vllm_ops.indexer_k_quant_and_cache(**given)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cu_seq_lens": torch.tensor([0, 5, 5, 10], dtype=torch.int32)}, "cu_seq_lens must end with at most 9"),
        ({"cu_seq_lens": torch.tensor([0, 5, 4, 7], dtype=torch.int32)}, "cu_seq_lens must begin with 0 and not desce"),
        ({"cu_seq_lens": torch.tensor([0, 5, 7], dtype=torch.int32)}, r"cu_seq_lens must be \[4\]"),
        ({"cu_seq_lens": torch.tensor([0, 5, 6, 7], dtype=torch.int32)}, "block_tables"),
        ({"dst_scale": noise(9, 6)}, "dst_scale must have 4 bytes for each tile of dst_k, got 6 for 128"),
        ({"dst_scale": noise(8, 8)}, r"dst_scale must be \[9, scale_bytes\]"),
        ({"dst_scale": torch.zeros(9, 2)}, "dst_scale.dtype must be torch.uint8, got torch.float32"),
        ({"dst_k": noise(9, 64)}, r"kv_cache must be \[num_blocks, block_size, 72\]"),
    ],
)
def test_a_bad_gather_of_keys_writes_nothing(changes, message):
    given = gathered(**changes)
    with Unchanged(given["dst_k"], given["dst_scale"]), pytest.raises(ValueError, match=message):
        vllm_ops.cp_gather_indexer_k_quant_cache(**given)
