"""kvpage.integrations.vllm_ops: signatures, forms that callers use, raw addresses, and errors that change nothing.

What the operations write is compared over vLLM's own parameters in test_vllm_grid.py.
"""

import inspect
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.vllm_tensors import Unchanged

from kvpage.integrations import vllm_ops
from kvpage.layout.kv_view import KVView
from kvpage.layout.view_layout import layout_of
from kvpage.ops import rows as token_ops
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.cuda.launches import Launches

ONE = torch.tensor(1.0)
SIGNATURES = {
    "swap_blocks": "src dst block_size_in_bytes block_mapping",
    "swap_blocks_batch": "src_ptrs dst_ptrs sizes is_src_access_order_any",
    "copy_blocks": "key_caches value_caches block_mapping",
    "copy_blocks_mla": "kv_caches block_mapping",
    "reshape_and_cache": "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale interleaved_v",
    "reshape_and_cache_flash": "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
    "concat_and_cache_mla": "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale skip_scale",
    "gather_and_maybe_dequant_cache": "src_cache dst block_table cu_seq_lens token_to_seq num_tokens kv_cache_dtype "
    "scale seq_starts",
    "cp_gather_cache": "src_cache dst block_table cu_seq_lens batch_size seq_starts",
    "convert_fp8": "output input scale kv_dtype",
    "concat_and_cache_mla_grouped": "kv_c k_pe kv_cache_ptrs slot_mapping block_size block_stride entry_stride "
    "kv_scales kv_cache_dtype",
    "concat_and_cache_mla_rope_fused": "positions q_pe k_pe kv_c cos_sin_cache is_neox slot_mapping kv_cache "
    "kv_cache_dtype kv_cache_scale",
    "concat_mla_q": "ql_nope q_pe q_out",
    "cp_gather_and_upconvert_fp8_kv_cache": "src_cache dst block_table workspace_starts batch_size seq_starts "
    "host_cache host_row_ids device_row_ids",
    "indexer_k_quant_and_cache": "k kv_cache slot_mapping quant_block_size kv_cache_dtype",
    "cp_gather_indexer_k_quant_cache": "kv_cache dst_k dst_scale block_table cu_seq_lens",
}


def pairs(*rows):
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def filled(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_vllms_names_and_order(name):
    assert list(inspect.signature(getattr(vllm_ops, name)).parameters) == SIGNATURES[name].split()


def documented():
    """The table of docs/vllm_ops.md: (status, note) of each operation."""
    lines = (Path(__file__).parents[2] / "docs" / "vllm_ops.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert len({name for name, *_ in rows}) == len(rows)
    return {name.strip("`"): (status, note) for name, status, note in rows}


def test_the_documented_operations_are_those_of_the_module():
    statuses = {name: status for name, (status, _) in documented().items()}
    assert {name for name, status in statuses.items() if status == "served"} == set(SIGNATURES)
    assert set(vllm_ops.__all__) == {*SIGNATURES, "register_caches", "unregister_caches"}
    refused = {name: note for name, (status, note) in documented().items() if status == "refused"}
    assert refused == dict(vllm_ops.REFUSED)
    assert set(statuses.values()) == {"served", "refused"}


@pytest.mark.parametrize("name", sorted(vllm_ops.REFUSED))
def test_what_is_not_served_is_refused_by_name_with_a_reason(name):
    assert not hasattr(vllm_ops, name)
    with pytest.raises(AttributeError, match=f"'{name}': this operation of vLLM is not served") as caught:
        getattr(vllm_ops, name)
    assert vllm_ops.REFUSED[name] in str(caught.value)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kvpage.integrations.vllm_ops' has no attribute 'silu_and_mul'$"):
        vllm_ops.silu_and_mul  # noqa: B018


# --- tokens ----------------------------------------------------------------------------------------------------------


def flash_caches(num_blocks=4, dtype=torch.float32):
    return filled(num_blocks, 4, 2, 8, dtype=dtype), filled(num_blocks, 4, 2, 8, dtype=dtype)


def test_rows_past_the_slots_and_slots_of_minus_one_are_padding():
    key_cache, value_cache = flash_caches()
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    key, value = filled(2, 7, 2, 8)
    vllm_ops.reshape_and_cache_flash(key, value, key_cache, value_cache, torch.tensor([5, -1, 15]), "auto", ONE, ONE)
    for token, slot in ((0, 5), (2, 15)):
        expected_key[slot // 4, slot % 4], expected_value[slot // 4, slot % 4] = key[token], value[token]
    assert torch.equal(key_cache, expected_key)
    assert torch.equal(value_cache, expected_value)


@pytest.mark.parametrize("kind, stored", [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_both_8_bit_floats_as_themselves_and_as_bytes(kind, stored, as_bytes):
    caches = [torch.zeros(4, 4, 2, 8, dtype=torch.uint8 if as_bytes else stored) for _ in range(2)]
    key, value = filled(2, 3, 2, 8)
    slots = torch.tensor([1, 14, 6])
    vllm_ops.reshape_and_cache_flash(key, value, *caches, slots, kind, torch.tensor([0.5]), torch.tensor([2.0, 0.1]))
    want = (key / 0.5).to(stored), (value / torch.tensor([2.0, 0.1])[:, None]).to(stored)
    for cache, rows in zip(caches, want, strict=True):
        assert torch.equal(cache.view(torch.uint8).view(16, 2, 8)[slots], rows.view(torch.uint8))
        assert cache.view(torch.uint8).view(16, -1).any(1).sum() == 3


def test_no_call_keeps_a_cache_alive_and_calls_alike_have_equal_layouts():
    """What remembers calls by their layouts must tell caches apart by where V lies, and must not hold them."""

    def layout(key, value):
        held = KVView(key.unsqueeze(3)), KVView(value.unsqueeze(3))
        return layout_of(*held, 8), held

    (key, value), other = flash_caches(), filled(4, 4, 2, 8)
    first, same, moved = layout(key, value), layout(key, value), layout(key, other)
    assert first[0] == same[0] and hash(first[0]) == hash(same[0])
    assert first[0] != moved[0]
    assert first[0] != layout(key[:, :, :1], value[:, :, :1])[0]
    references = [weakref.ref(view.rows) for view in first[1]]
    remembered = first[0]
    del first
    assert [reference() for reference in references] == [None, None]
    assert remembered == same[0]


def test_calls_are_repeated_on_a_gpu_where_k_and_v_lie_alike(monkeypatch):
    """Layers that are cut alike share a launch on a GPU, on their own addresses."""
    calls, launches, error = [], [], torch.zeros(1, dtype=torch.int32)

    def capture(key, value, cache, slots, layout, scales):
        bound = BoundCache(cache, layout, scales)
        calls.append(((key, value, bound, slots), [view.rows.data_ptr() for view in bound.views]))

    monkeypatch.setattr(token_ops, "reshape_and_cache", capture)
    layers = torch.zeros(4, 4, 2, 3, 2, 8).unbind(0)  # [num_blocks, 2, ...] each
    apart = flash_caches()
    key, value = filled(2, 1, 2, 8)
    for key_cache, value_cache in [*((layer[:, 0], layer[:, 1]) for layer in layers), apart]:
        vllm_ops.reshape_and_cache_flash(key, value, key_cache, value_cache, torch.tensor([0]), "auto", ONE, ONE)
    known = Launches()
    known.keep(*calls[0][0], SimpleNamespace(again=lambda *call: launches.append(call) or True))
    assert [known.repeat(*rows, error) for rows, _ in calls[1:]] == [True, True, True, False]
    assert [list(addresses[2:4]) for addresses, *_ in launches] == [where for _, where in calls[1:4]]


def test_a_value_smaller_than_its_key():
    key_cache, value_cache = filled(4, 2, 2, 4, 4), filled(4, 2, 6, 4)
    key, value = filled(3, 2, 8), filled(3, 2, 6)
    vllm_ops.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([0, 7, 9]), "auto", ONE, ONE)
    assert torch.equal(value_cache[2, :, :, 1], value[2])
    assert torch.equal(key_cache[2, :, :, 1], key[2].view(2, 2, 4))


FLASH_ERRORS = {
    "a slot past the cache": ({"slots": torch.tensor([0, 16])}, "slot_mapping"),
    "a slot under -1": ({"slots": torch.tensor([0, -2])}, "slot_mapping"),
    "a slot twice": ({"slots": torch.tensor([3, 3])}, "slot"),
    "more slots than rows": ({"slots": torch.arange(4)}, "slot_mapping must name a slot for each of at most 3 rows"),
    "slots of int32": ({"slots": torch.zeros(2, dtype=torch.int32)}, "slot_mapping.dtype must be torch.int64"),
    "another dtype": ({"key": filled(3, 2, 8, dtype=torch.bfloat16)}, "key.dtype must be the cache's, torch.float32"),
    "too large a head": ({"value": filled(3, 2, 9)}, r"value must be \[num_tokens, num_heads, 1 to 8\]"),
    "other heads": ({"key": filled(3, 3, 8)}, "key.shape must be"),
    "rows without heads": ({"key": filled(3, 16)}, r"key must be \[num_tokens, num_heads, 1 to 8\]"),
    "caches of different size": ({"key_cache": filled(5, 4, 2, 8)}, "must have as many blocks, slots and heads"),
    "a flat cache": ({"key_cache": filled(16, 2, 8)}, "key_cache must have 4 dimensions"),
    "a transposed cache": ({"key_cache": filled(4, 4, 8, 2).transpose(2, 3)}, "contiguous in its last dimension"),
    "an unknown dtype": ({"kind": "nvfp4"}, "kv_cache_dtype must be one of fp8, fp8_e4m3, fp8_e5m2, got 'nvfp4'"),
    "fp8 in floats": ({"kind": "fp8"}, "a cache of fp8 must be of torch.uint8 or torch.float8_e4m3fn, got torch.float"),
}


@pytest.mark.parametrize("name", FLASH_ERRORS)
def test_what_is_refused_is_not_written(name):
    changes, message = FLASH_ERRORS[name]
    given = dict(zip(("key_cache", "value_cache"), flash_caches(), strict=True))
    given |= {"key": filled(3, 2, 8), "value": filled(3, 2, 8), "slots": torch.tensor([0, 1]), "kind": "auto"} | changes
    with Unchanged(given["key_cache"], given["value_cache"]), pytest.raises(ValueError, match=message):
        vllm_ops.reshape_and_cache_flash(
            given["key"], given["value"], given["key_cache"], given["value_cache"], given["slots"], given["kind"],
            ONE, ONE,
        )  # fmt: skip


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor([1.0, float("nan")]), torch.ones(3)])
def test_scales_are_checked(scale):
    caches = [torch.zeros(4, 4, 2, 8, dtype=torch.uint8) for _ in range(2)]
    with (
        Unchanged(*caches),
        pytest.raises(ValueError, match="key must be finite and positive|must have 1 or 2 entries"),
    ):
        vllm_ops.reshape_and_cache_flash(
            filled(1, 2, 8), filled(1, 2, 8), *caches, torch.tensor([0]), "fp8", scale, ONE
        )


def test_a_dtype_by_name_is_that_of_the_cache():
    caches, expected = flash_caches(dtype=torch.bfloat16), torch.randn(1, 2, 8).bfloat16()
    vllm_ops.reshape_and_cache_flash(expected, expected, *caches, torch.tensor([3]), "bfloat16", ONE, ONE)
    assert all(torch.equal(cache[0, 3], expected[0]) for cache in caches)
    with (
        Unchanged(*caches),
        pytest.raises(ValueError, match="a cache of float16 must be of torch.float16, got torch.bf"),
    ):
        vllm_ops.reshape_and_cache_flash(expected, expected, *caches, torch.tensor([0]), "float16", ONE, ONE)


def test_values_in_runs_are_refused():
    caches = filled(4, 2, 2, 4, 4), filled(4, 2, 8, 4)
    with Unchanged(*caches), pytest.raises(ValueError, match="interleaved_v must be False"):
        vllm_ops.reshape_and_cache(filled(1, 2, 8), filled(1, 2, 8), *caches, torch.tensor([0]), "auto", ONE, ONE, True)


def test_paged_caches_have_five_and_four_dimensions():
    caches = flash_caches()
    with Unchanged(*caches), pytest.raises(ValueError, match="key_cache and value_cache must have 5 and 4 dimensions"):
        vllm_ops.reshape_and_cache(filled(1, 2, 8), filled(1, 2, 8), *caches, torch.tensor([0]), "auto", ONE, ONE)


@pytest.mark.parametrize(
    "kv_c, k_pe, message",
    [
        (filled(2, 12), filled(2, 3), "kv_cache must have entries of 15 elements"),
        (filled(2, 2, 12), filled(2, 4), "kv_c must be"),
        (filled(2, 12), filled(1, 4), "slot_mapping must name a slot for each of at most 1 rows"),
    ],
)
def test_latents_fill_their_entries(kv_c, k_pe, message):
    cache = filled(3, 4, 16)
    with Unchanged(cache), pytest.raises(ValueError, match=message):
        vllm_ops.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([0, 1]), "auto", ONE)


def test_rotary_parts_may_have_a_dimension_of_one_head():
    cache = torch.zeros(3, 4, 16)
    kv_c, k_pe = filled(2, 12), filled(2, 1, 4)
    vllm_ops.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([5, 2]), "auto", ONE)
    assert torch.equal(cache[1, 1], torch.cat([kv_c[0], k_pe[0, 0]]))
    assert torch.equal(cache[0, 2], torch.cat([kv_c[1], k_pe[1, 0]]))


def gathered(**changes):
    """A gather of two sequences, 5 tokens from 3 on and 2 from 1 on, with what a test changes."""
    given = {
        "src_cache": filled(6, 4, 16),
        "dst": filled(9, 16),
        "block_table": torch.tensor([[1, 3, 1 << 30], [5, 1 << 30, -7]], dtype=torch.int32),
        "cu_seq_lens": torch.tensor([0, 5, 7], dtype=torch.int32),
        "token_to_seq": torch.tensor([0] * 5 + [1] * 2 + [9], dtype=torch.int32),
        "num_tokens": 7,
        "kv_cache_dtype": "auto",
        "scale": ONE,
        "seq_starts": torch.tensor([3, 1], dtype=torch.int32),
    }
    return given | changes


def test_heads_are_gathered_as_they_are():
    """[num_blocks, block_size, heads, head_size], HND in memory."""
    given = gathered(src_cache=filled(6, 2, 4, 8).transpose(1, 2), dst=filled(7, 2, 8))
    vllm_ops.gather_and_maybe_dequant_cache(**given)
    cache = given["src_cache"]
    want = [cache[1, 3], cache[3, 0], cache[3, 1], cache[3, 2], cache[3, 3], cache[5, 1], cache[5, 2]]
    assert torch.equal(given["dst"], torch.stack(want))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_tokens": 6}, "cu_seq_lens must end with num_tokens, 6, got 7"),
        ({"cu_seq_lens": torch.tensor([0, 7])}, r"cu_seq_lens must be \[3\]"),
        ({"cu_seq_lens": torch.tensor([0, 8, 7])}, "cu_seq_lens must begin with 0 and not descend"),
        ({"cu_seq_lens": torch.tensor([1, 5, 7])}, "cu_seq_lens must begin with 0"),
        ({"token_to_seq": torch.zeros(6)}, "token_to_seq must name 7 sequences"),
        ({"token_to_seq": torch.zeros(7)}, "token_to_seq must name the sequences that cu_seq_lens"),
        ({"seq_starts": torch.tensor([3, 4])}, "block_tables"),  # a block of the second sequence that is none
        ({"seq_starts": torch.tensor([8, 0])}, "seq_starts"),  # past the table
        ({"dst": filled(6, 16)}, "shape must be"),
        ({"dst": filled(9, 17)}, "head size must be in"),
        ({"dst": filled(9, 16, dtype=torch.bfloat16)}, "dtype must be"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of"),
        ({"src_cache": filled(6, 64)}, "src_cache must have 3 or 4 dimensions"),
        ({"dst": torch.tensor(1.0)}, r"dst must have 2 dimensions, got shape \(\)"),
        ({"dst": filled(9, 1, 16)}, r"dst must have 2 dimensions, got shape \(9, 1, 16\)"),
    ],
)
def test_a_bad_gather_writes_nothing(changes, message):
    given = gathered(**changes)
    with Unchanged(given["dst"]), pytest.raises(ValueError, match=message):
        vllm_ops.gather_and_maybe_dequant_cache(**given)


def test_cp_gather_takes_the_first_sequences_alone():
    given = gathered()
    expected = given["dst"].clone()
    cache, dst, table = given["src_cache"], given["dst"], given["block_table"]
    vllm_ops.cp_gather_cache(cache, dst, table, given["cu_seq_lens"], 1, given["seq_starts"])
    expected[:5] = torch.stack([cache[1, 3], *cache[3]])
    assert torch.equal(dst, expected)
    with Unchanged(dst):
        vllm_ops.cp_gather_cache(cache, dst, table, given["cu_seq_lens"], 0)
        with pytest.raises(ValueError, match="batch_size must be at most the sequences of block_table"):
            vllm_ops.cp_gather_cache(cache, dst, table, given["cu_seq_lens"], 3)
        with pytest.raises(ValueError, match=r"dst must have 2 dimensions, got shape \(\)"):
            vllm_ops.cp_gather_cache(cache, torch.tensor(1.0), table, given["cu_seq_lens"], 1)
        with pytest.raises(ValueError, match="dst.dtype must be the cache's"):
            vllm_ops.cp_gather_cache(cache, dst.bfloat16(), table, given["cu_seq_lens"], 1)


def test_conversion_saturates_and_asks_for_8_bits_and_floats():
    given = torch.tensor([1e9, -1e9, 448.0, 3.0, 0.0])
    stored = torch.empty(5, dtype=torch.float8_e4m3fn)
    vllm_ops.convert_fp8(stored, given, 2.0)
    assert stored.tolist() == [448, -448, 224, 1.5, 0]
    back = torch.empty(5, dtype=torch.float16)
    vllm_ops.convert_fp8(back, stored, 2.0, "fp8_e4m3")
    assert back.tolist() == [896, -896, 448, 3, 0]
    with Unchanged(stored, back):
        for output, source, scale, kind, message in (
            (back, stored[:4], 1.0, "fp8", "must have one shape"),
            (back, stored, 1.0, "auto", "kv_dtype must be one of fp8, fp8_e4m3, fp8_e5m2, got 'auto'"),
            (back, stored, 1.0, "fp8_e5m2", "a cache of fp8_e5m2 must be of torch.uint8 or"),
            (back, stored, 0.0, "fp8", "must be finite and positive"),
            (stored, stored, 1.0, "fp8", "input or output must be of floats"),
            (back, given, 1.0, "fp8", "a cache of fp8 must be of torch.uint8 or"),
        ):
            with pytest.raises(ValueError, match=message):
                vllm_ops.convert_fp8(output, source, scale, kind)


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", [False, True])
def test_both_forms_of_a_swap(keyword):
    src, dst = filled(4, 3, 2), filled(6, 3, 2)
    expected = dst.clone()
    mapping = pairs((3, 5), (0, 2))
    expected[5], expected[2] = src[3], src[0]
    if keyword:
        vllm_ops.swap_blocks(src, dst, block_mapping=mapping)
    else:
        vllm_ops.swap_blocks(src, dst, mapping)
    assert torch.equal(dst, expected)
    vllm_ops.swap_blocks(src, dst, 24, pairs((1, 0)))
    expected[0] = src[1]
    assert torch.equal(dst, expected)


def test_a_swap_of_both_parts_from_the_keys_on():
    """K and V of a block side by side: the block size says how far a block reaches, as vLLM's offloading has it."""
    src, dst = filled(4, 2, 5), filled(4, 2, 5)
    expected = dst.clone()
    expected[1] = src[3]
    vllm_ops.swap_blocks(src[:, 0], dst[:, 0], 40, pairs((3, 1)))
    assert torch.equal(dst, expected)
    expected[2, 1] = src[0, 1]
    vllm_ops.swap_blocks(src[:, 1], dst[:, 1], pairs((0, 2)))
    assert torch.equal(dst, expected)


def test_bytes_of_a_flat_tensor_are_blocks_too():
    src, dst = (torch.randint(0, 256, (50,), dtype=torch.uint8) for _ in range(2))
    expected = dst.clone()
    expected[21:28] = src[42:49]
    vllm_ops.swap_blocks(src, dst, 7, pairs((6, 3)))
    assert torch.equal(dst, expected)
    with Unchanged(dst), pytest.raises(ValueError, match=r"block_mapping must name source blocks in \[0, 7\), got 7"):
        vllm_ops.swap_blocks(src, dst, 7, pairs((7, 3)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((24, pairs((4, 0))), r"block_mapping must name source blocks in \[0, 4\), got 4"),
        ((24, pairs((0, 6))), r"block_mapping must name destination blocks in \[0, 6\), got 6"),
        ((24, pairs((0, 1), (2, 1))), "block_mapping must name each destination once"),
        ((pairs((-1, 0)),), "got -1"),
        ((0, pairs((0, 0))), "block_size_in_bytes must be positive, got 0"),
        ((10**6, pairs((0, 0))), "src must hold a block of 1000000 bytes"),
        ((24, pairs((0, 0)).int()), "block_mapping.dtype must be torch.int64"),
        ((24,), "block_mapping must be given"),
    ],
)
def test_a_bad_swap_copies_nothing(arguments, message):
    src, dst = filled(4, 3, 2), filled(6, 3, 2)
    with Unchanged(dst), pytest.raises(ValueError, match=message):
        vllm_ops.swap_blocks(src, dst, *arguments)


@pytest.mark.parametrize("size", [float("inf"), float("nan"), 24.5, "24"])
def test_blocks_have_whole_bytes(size):
    src, dst = filled(4, 3, 2), filled(6, 3, 2)
    with Unchanged(dst), pytest.raises(TypeError, match="block_size_in_bytes must be an integer, got"):
        vllm_ops.swap_blocks(src, dst, size, pairs((0, 0)))


def test_copies_within_all_layers():
    """Layers of their own, and strided ones: K and V of one tensor, heads before tokens."""
    whole = filled(5, 2, 2, 4, 8)
    key_caches = [filled(5, 4, 2, 8), whole[:, 0].transpose(1, 2)]
    value_caches = [filled(5, 4, 2, 8), whole[:, 1].transpose(1, 2)]
    expected = [cache.clone() for cache in (*key_caches, *value_caches)]
    for cache in expected:
        cache[4], cache[2] = cache[1], cache[1]
    vllm_ops.copy_blocks(key_caches, value_caches, pairs((1, 4), (1, 2)))
    for cache, want in zip((*key_caches, *value_caches), expected, strict=True):
        assert torch.equal(cache, want)
    latent = filled(5, 4, 12)
    want = latent.clone()
    want[0] = want[3]
    vllm_ops.copy_blocks_mla([latent], pairs((3, 0)))
    assert torch.equal(latent, want)
    vllm_ops.copy_blocks([], [], pairs())


def test_a_bad_copy_changes_nothing():
    keys, values = [filled(5, 4, 2, 8)], [filled(5, 4, 2, 8)]
    with Unchanged(*keys, *values):
        for arguments, message in (
            ((keys, [], pairs((0, 1))), "key_caches and value_caches must be as many, got 1 and 0"),
            ((keys, values, pairs((0, 5))), "got 5"),
            ((keys, values, pairs((0, 1), (1, 2))), "block_mapping must not read a block that it also writes"),
            ((keys, [values[0][:, ::2]], pairs((0, 1))), "a block of kv_caches must be one run of memory"),
            ((keys, [filled(5, 4, 2, 9)], pairs((0, 1))), "shape must be"),
        ):
            with pytest.raises(ValueError, match=message):
                vllm_ops.copy_blocks(*arguments)
