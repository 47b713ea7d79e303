"""vLLM's operations on latents and on an indexer's keys, against loops over tokens: every byte of every destination."""

import math
import struct

import pytest
import torch
from support.vllm_tensors import (
    BLOCK_SIZE,
    DEVICES,
    FP8,
    RANK,
    ROPE,
    Unchanged,
    bits,
    code,
    fp32,
    noise,
    power_from,
    quotient,
)

from kvpage import ops
from kvpage.integrations import vllm_ops

ONE = torch.tensor(1.0)


# --- fp8_ds_mla ------------------------------------------------------------------------------------------------------


def naive_entry(latents, rotary):
    """The 656 bytes of one token."""
    numbers = latents.float().tolist()
    codes, scales = [], b""
    for begin in range(0, 512, 128):
        tile = numbers[begin : begin + 128]
        largest = max([abs(number) for number in tile if not math.isnan(number)], default=0.0)
        scale = power_from(max(quotient(largest, 448.0), fp32(1e-4)))
        scales += struct.pack("<f", scale)
        codes += [code(number, scale) for number in tile]
    tail = bits(rotary).tolist() if len(rotary) else [0] * 128
    return torch.tensor([*codes, *scales, *tail], dtype=torch.uint8)


def rows_of(num_tokens, rope=64, device="cpu"):
    """Latents of many magnitudes: tiles of zeros, of powers of two, of a NaN among numbers."""
    kv_c = torch.randn(num_tokens, 512) * torch.logspace(-6, 6, max(num_tokens, 1))[:num_tokens, None]
    if num_tokens > 2:
        kv_c[0, :128] = 0
        kv_c[1, 128:256] = 448.0
        kv_c[2, 7] = math.nan
    return kv_c.bfloat16().to(device), torch.randn(num_tokens, rope).bfloat16().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("rope", [64, 0])
def test_entries_of_ds_mla(device, num_tokens, rope):
    kv_c, k_pe = rows_of(num_tokens + 2, rope, device)  # two rows of padding
    slots = torch.tensor([14, 0, -1, 5, 6][:num_tokens], dtype=torch.int64, device=device)
    cache = noise(5, BLOCK_SIZE, 656, device=device)
    expected = cache.cpu().clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = naive_entry(kv_c[token].cpu(), k_pe[token].cpu())
    vllm_ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "fp8_ds_mla", ONE)
    assert torch.equal(cache.cpu(), expected)


def test_entries_of_ds_mla_in_a_strided_cache_of_8_bit_floats():
    slab = noise(3, 2, BLOCK_SIZE, 656)
    expected = slab.clone()
    kv_c, k_pe = rows_of(2)
    expected[2, 1, 3], expected[0, 1, 0] = naive_entry(kv_c[0], k_pe[0]), naive_entry(kv_c[1], k_pe[1])
    vllm_ops.concat_and_cache_mla(kv_c, k_pe, slab.view(FP8)[:, 1], torch.tensor([11, 0]), "fp8_ds_mla", ONE)
    assert torch.equal(slab, expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_c": torch.zeros(2, 256).bfloat16()}, r"kv_c must be \[num_tokens, 512\], got shape \(2, 256\)"),
        ({"k_pe": torch.zeros(2, 32).bfloat16()}, r"k_pe must be \[num_tokens, 64 or 0\]"),
        ({"kv_c": torch.zeros(2, 512).half()}, "kv_c.dtype must be torch.bfloat16, got torch.float16"),
        ({"kv_cache": noise(5, 4, 576)}, r"kv_cache must be \[num_blocks, block_size, 656\]"),
        ({"kv_cache": torch.zeros(5, 4, 656)}, "kv_cache.dtype must be torch.uint8 or torch.float8_e4m3fn"),
        ({"slot_mapping": torch.tensor([0, 20])}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([0, 0])}, "slot_mapping must name a slot once"),
        ({"slot_mapping": torch.tensor([0, 1, 2])}, "slot_mapping must name a slot for each of at most 2 rows"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype must be one of fp8, fp8_e4m3, fp8_e5m2, got 'nvfp4_ds_"),
    ],
)
def test_bad_entries_write_nothing(changes, message):
    kv_c, k_pe = rows_of(2)
    given = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": noise(5, 4, 656), "slot_mapping": torch.tensor([0, 1])}
    given |= {"kv_cache_dtype": "fp8_ds_mla", "scale": ONE} | changes
    with Unchanged(given["kv_cache"]), pytest.raises(ValueError, match=message):
        vllm_ops.concat_and_cache_mla(**given)


def test_a_skipped_scale_is_one():
    given = torch.randn(2, 12), torch.randn(2, 4)
    caches = [torch.zeros(3, 4, 16, dtype=torch.uint8) for _ in range(2)]
    slots = torch.tensor([5, 2])
    vllm_ops.concat_and_cache_mla(*given, caches[0], slots, "fp8", torch.tensor(9.0), True)
    vllm_ops.concat_and_cache_mla(*given, caches[1], slots, "fp8", ONE)
    assert torch.equal(*caches) and caches[0].any()


# --- gathering entries -----------------------------------------------------------------------------------------------


def naive_row(entry):
    """576 bf16 numbers of the 656 bytes of an entry."""
    codes = entry[:512].view(FP8).float()
    scales = struct.unpack("<4f", bytes(entry[512:528].tolist()))
    products = [codes[at] * fp32(scales[at // 128]) for at in range(512)]
    return torch.cat([torch.stack(products).bfloat16(), entry[528:].clone().view(torch.bfloat16)])


def entries(*shape, device="cpu"):
    cache = noise(*shape, 656)
    cache[..., :512] &= 0x77  # no NaN
    scales = torch.randn(*shape, 4).exp()
    cache[..., 512:528] = scales.view(torch.uint8).view(*shape, 16)
    return cache.to(device)


def upconversion(device="cpu", **changes):
    """Rows 2 to 6 of dst from the first sequence, from its token 3 on, none of the second, 7 to 8 of the third."""
    given = {
        "src_cache": entries(6, BLOCK_SIZE),
        "dst": torch.randn(9, 576).bfloat16(),
        "block_table": torch.tensor([[1, 3, 1 << 30], [-9, -9, -9], [5, 0, -7], [7, 7, 7]], dtype=torch.int32),
        "workspace_starts": torch.tensor([2, 7, 7, -1], dtype=torch.int32),
        "batch_size": 3,
        "seq_starts": torch.tensor([3, 0, 1], dtype=torch.int32),
    } | changes
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


PLACES = [7, 12, 13, 14, 15, 21, 22]  # of the tokens above


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.uint8, FP8, torch.float8_e5m2])
def test_entries_are_gathered_as_floats(device, kind):
    given = upconversion(device)
    cache, expected = given["src_cache"].cpu().view(-1, 656), given["dst"].cpu().clone()
    for row, place in enumerate(PLACES, 2):
        expected[row] = naive_row(cache[place])
    given["src_cache"] = given["src_cache"].view(kind)
    vllm_ops.cp_gather_and_upconvert_fp8_kv_cache(**given)
    assert torch.equal(bits(given["dst"].cpu()), bits(expected))


def test_entries_are_gathered_from_the_first_token_on_by_default():
    given = upconversion(seq_starts=None)
    cache, expected = given["src_cache"].view(-1, 656), given["dst"].clone()
    for row, place in enumerate([4, 5, 6, 7, 12, 20, 21], 2):
        expected[row] = naive_row(cache[place])
    vllm_ops.cp_gather_and_upconvert_fp8_kv_cache(**given)
    assert torch.equal(bits(given["dst"]), bits(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_entries_come_from_host_rows_too(device):
    """device_row_ids: places of the cache, or -1; then host_row_ids says which row of the host's."""
    host = entries(8)
    in_device = torch.full((6, BLOCK_SIZE), -1, dtype=torch.int32)
    in_host = torch.full((24,), 1 << 30, dtype=torch.int32)
    sources = [("host", 3), ("device", 23), ("host", 0), ("device", 0), ("host", 7), ("host", 3), ("device", 23)]
    for place, (where, row) in zip(PLACES, sources, strict=True):
        (in_host if where == "host" else in_device.view(-1))[place] = row
    given = upconversion(device, host_row_ids=in_host, device_row_ids=in_device) | {"host_cache": host}
    cache, expected = given["src_cache"].cpu().view(-1, 656), given["dst"].cpu().clone()
    for row, (where, source) in enumerate(sources, 2):
        expected[row] = naive_row((host if where == "host" else cache)[source])
    vllm_ops.cp_gather_and_upconvert_fp8_kv_cache(**given)
    assert torch.equal(bits(given["dst"].cpu()), bits(expected))


@pytest.mark.parametrize("num_rows, starts", [(0, []), (0, [0, 0]), (3, []), (3, [3, 3])])
def test_no_entries_write_nothing(num_rows, starts):
    dst = torch.randn(num_rows, 576).bfloat16()
    with Unchanged(dst):
        vllm_ops.cp_gather_and_upconvert_fp8_kv_cache(
            entries(2, 4),
            dst,
            torch.zeros(2, 1, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            len(starts),
        )


HOSTED = {
    "host_cache": noise(8, 656),
    "host_row_ids": torch.zeros(24, dtype=torch.int32),
    "device_row_ids": torch.full((24,), -1, dtype=torch.int32),
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dst": torch.zeros(9, 512).bfloat16()}, r"dst must be \[num_rows, 576\]"),
        ({"dst": torch.zeros(9, 576)}, "dst.dtype must be torch.bfloat16"),
        ({"src_cache": noise(6, 4, 576)}, r"src_cache must be \[num_blocks, block_size, 656\]"),
        ({"batch_size": 5}, "batch_size must be at most the sequences of block_table and of workspace_starts, got 5"),
        ({"batch_size": -1}, "batch_size must be at most"),
        ({"workspace_starts": torch.tensor([2, 1, 7], dtype=torch.int32)}, "workspace_starts must ascend within the 9"),
        ({"workspace_starts": torch.tensor([2, 7, 10], dtype=torch.int32)}, "workspace_starts must ascend"),
        ({"workspace_starts": torch.tensor([-1, 7, 7], dtype=torch.int32)}, "workspace_starts must ascend"),
        ({"workspace_starts": torch.tensor([2, 7, 7])}, "workspace_starts.dtype must be torch.int32"),
        ({"seq_starts": torch.tensor([8, 0, 1], dtype=torch.int32)}, "seq_starts must leave 5 tokens within the block"),
        ({"seq_starts": torch.tensor([-1, 0, 1], dtype=torch.int32)}, "seq_starts must leave 5 tokens"),
        ({"seq_starts": torch.tensor([3, 0, 4], dtype=torch.int32), "block_table": torch.tensor([[1, 3], [0, 0],
          [0, 6]], dtype=torch.int32)}, "block_table must name 24 places, got 24"),
        ({"host_cache": HOSTED["host_cache"]}, "host_cache, host_row_ids and device_row_ids must be given together"),
        (HOSTED | {"host_cache": noise(8, 600)}, r"host_cache must be \[num_host_rows, 656\]"),
        (HOSTED | {"host_row_ids": torch.full((24,), 8, dtype=torch.int32)}, "host_row_ids must name 8 rows of host_"),
        (HOSTED | {"device_row_ids": torch.full((24,), 24, dtype=torch.int32)}, "device_row_ids must name 24 rows of"),
        (HOSTED | {"host_row_ids": torch.zeros(9, dtype=torch.int32)}, "must be as many, got 9 and 24"),
        (HOSTED | {name: HOSTED[name][:20] for name in ("host_row_ids", "device_row_ids")}, "block_table must name 20"),
    ],
)  # fmt: skip
def test_a_bad_upconversion_writes_nothing(changes, message):
    given = upconversion(**changes)
    with Unchanged(given["dst"]), pytest.raises(ValueError, match=message):
        vllm_ops.cp_gather_and_upconvert_fp8_kv_cache(**given)


# --- turning ---------------------------------------------------------------------------------------------------------


def rotation(device="cpu", dtype=torch.bfloat16, **changes):
    """Seven tokens, two of which are padding by their slots and one past them."""
    table = torch.randn(9, ROPE)
    given = {
        "positions": torch.tensor([0, 8, 99, 3, 3, 7, -5]),
        "q_pe": torch.randn(7, 3, RANK + ROPE)[..., RANK:].to(dtype),
        "k_pe": torch.randn(7, 2 * ROPE)[:, ::2].contiguous().to(dtype),
        "kv_c": torch.randn(7, RANK).to(dtype),
        "cos_sin_cache": table.to(dtype),
        "is_neox": True,
        "slot_mapping": torch.tensor([19, 0, -1, 6, 5, -1]),
        "kv_cache": torch.randn(5, BLOCK_SIZE, RANK + ROPE).to(dtype),
        "kv_cache_dtype": "auto",
        "kv_cache_scale": torch.tensor([0.5]),
    } | changes
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def naive_turn(row, angles, is_neox):
    half = len(row) // 2
    turned = row.float().clone()
    for pair in range(half):
        x, y = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
        cos, sin = angles[pair].float(), angles[pair + half].float()
        turned[x] = row[x].float() * cos - row[y].float() * sin
        turned[y] = row[y].float() * cos + row[x].float() * sin
    return turned.to(row.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_latents_are_written_with_their_rotary_part_turned(device, is_neox, dtype, kind):
    given = rotation(device, dtype, is_neox=is_neox, kv_cache_dtype=kind)
    if kind == "fp8":
        given["kv_cache"] = noise(5, BLOCK_SIZE, RANK + ROPE, device=device)
    expected = {name: given[name].cpu().clone() for name in ("q_pe", "k_pe", "kv_cache")}
    for token, slot in enumerate(given["slot_mapping"].tolist()):
        if slot < 0:
            continue
        angles = given["cos_sin_cache"][given["positions"][token]].cpu()
        expected["k_pe"][token] = naive_turn(expected["k_pe"][token], angles, is_neox)
        for head in range(3):
            expected["q_pe"][token, head] = naive_turn(expected["q_pe"][token, head], angles, is_neox)
        row = torch.cat([given["kv_c"][token].cpu(), expected["k_pe"][token]])
        if kind == "fp8":
            row = (row.float() / 0.5).clamp(-448, 448).to(FP8).view(torch.uint8)
        expected["kv_cache"][slot // BLOCK_SIZE, slot % BLOCK_SIZE] = row
    vllm_ops.concat_and_cache_mla_rope_fused(**given)
    for name, want in expected.items():
        got = given[name].cpu()
        if device == "cpu":
            assert torch.equal(bits(got), bits(want)), name
        else:  # its compiler may fuse a product with a sum
            torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_a_position_out_of_range_is_skipped_on_a_gpu():
    given = rotation("cuda", positions=torch.tensor([0, 9, 0, 3, 3, 0, 0]))
    before = {name: given[name].clone() for name in ("q_pe", "k_pe", "kv_cache")}
    vllm_ops.concat_and_cache_mla_rope_fused(**given)
    with pytest.raises(ValueError, match="slot"):
        ops.check_device("cuda")
    assert torch.equal(given["kv_cache"][0, 0], before["kv_cache"][0, 0])
    assert torch.equal(given["q_pe"][1], before["q_pe"][1]) and torch.equal(given["k_pe"][1], before["k_pe"][1])
    assert not torch.equal(given["q_pe"][0], before["q_pe"][0])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"positions": torch.tensor([0, 9, 0, 3, 3, 0, 0])}, r"positions must be in \[0, 9\), got 9"),
        ({"positions": torch.tensor([-1, 0, 0, 3, 3, 0, 0])}, r"positions must be in \[0, 9\), got -1"),
        ({"positions": torch.zeros(7, dtype=torch.int32)}, "positions.dtype must be torch.int64"),
        ({"positions": torch.zeros(6, dtype=torch.int64)}, r"kv_c must be \[6, kv_lora_rank\]"),
        ({"slot_mapping": torch.tensor([19, 20])}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([1, 1])}, "slot_mapping must name a slot once"),
        ({"slot_mapping": torch.zeros(8, dtype=torch.int64)}, "slot_mapping must name a slot for each of at most 7"),
        ({"cos_sin_cache": torch.zeros(9, 6)}, r"cos_sin_cache must be \[max_position, 4\]"),
        ({"cos_sin_cache": torch.zeros(0, 4)}, "cos_sin_cache must have a row for each position"),
        ({"q_pe": torch.zeros(7, 3, 4)}, "q_pe.dtype must be the cache's, torch.bfloat16, got torch.float32"),
        ({"q_pe": torch.zeros(7, 1, 4).bfloat16().expand(7, 3, 4)}, "q_pe must have memory for each of its elements"),
        ({"k_pe": torch.zeros(7, 3).bfloat16(), "q_pe": torch.zeros(7, 3, 3), "cos_sin_cache": torch.zeros(9, 3)},
         "the rotary part must have an even number of elements, got 3"),
        ({"kv_cache": torch.zeros(5, 4, 13).bfloat16()}, "kv_cache must have entries of 12 elements"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype must be one of fp8"),
    ],
)  # fmt: skip
def test_what_is_not_written_is_not_turned(changes, message):
    given = rotation(**changes)
    with Unchanged(given["kv_cache"], given["q_pe"], given["k_pe"]), pytest.raises(ValueError, match=message):
        vllm_ops.concat_and_cache_mla_rope_fused(**given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_queries_are_put_together(dtype, num_tokens):
    nope, rotary = torch.randn(3, num_tokens, 10).transpose(0, 1).to(dtype), torch.randn(num_tokens, 3, 4).to(dtype)
    whole = torch.randn(num_tokens, 3, 20).to(dtype)
    expected = whole.clone()
    expected[..., 2:16] = torch.cat([nope, rotary], -1)
    vllm_ops.concat_mla_q(nope, rotary, whole[..., 2:16])
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q_out": torch.zeros(2, 3, 13)}, r"q_out must be \[2, 3, 14\]"),
        ({"q_pe": torch.zeros(2, 2, 4)}, r"q_pe must be \[2, 3, rope_size\]"),
        ({"ql_nope": torch.zeros(2, 3, 10).half()}, "ql_nope.dtype must be torch.float32"),
        ({"ql_nope": torch.zeros(2, 30)}, r"ql_nope must be \[num_tokens, num_heads, size\]"),
    ],
)
def test_bad_queries_write_nothing(changes, message):
    given = {"ql_nope": torch.ones(2, 3, 10), "q_pe": torch.ones(2, 3, 4), "q_out": torch.zeros(2, 3, 14)} | changes
    with Unchanged(given["q_out"]), pytest.raises(ValueError, match=message):
        vllm_ops.concat_mla_q(**given)
