"""torch.ops.kvpage: registered as torch asks for it, and the same as the functions of kvpage.ops."""

import itertools

import pytest
import torch
from support.torch_calls import (
    CPU,
    EVERY_LAYOUT,
    LAYOUTS,
    SLOTS,
    bits,
    calls,
    clones,
    equal_bits,
    make_caches,
    make_rows,
    make_scales,
    row_dtype,
)

from kvpage import CacheLayout, KVScales, ops
from kvpage.ops import reference


def options(name):
    """All options of attention, by name."""
    attends = {"scale": 0.3, "sliding_window": 5, "softcap": 20.0, "sinks": torch.randn(4), "value_size": 8}
    positions = torch.tensor([4, 7, 8, 0, 5])
    return {**attends, "query_positions": positions} if name == "paged_attention" else {}


NAMES = list(calls(LAYOUTS[0]))


def test_all_of_them_are_tested():
    registered = torch._C._dispatch_get_all_op_names()
    assert set(NAMES) == {name.removeprefix("kvpage::") for name in registered if name.startswith("kvpage::")}


@EVERY_LAYOUT
@pytest.mark.parametrize("name", NAMES)
def test_registration(layout, name):
    """Schema, fake, autograd keys and functionalisation, as torch checks them."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if layout.dtype == torch.float8_e4m3fn:  # the check of schemas multiplies, which torch does not do for these
        checks.remove("test_schema")
    operation = getattr(torch.ops.kvpage, name).default
    torch.library.opcheck(operation, calls(layout)[name], options(name), test_utils=checks)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_with_fake_tensors_touches_no_memory(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = calls(LAYOUTS[0])[name], options(name)
    with FakeTensorMode() as mode:
        arguments, named = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, real)
        assert getattr(torch.ops.kvpage, name)(*arguments, **named) is None


def test_a_function_called_with_fake_tensors_touches_no_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    layout = LAYOUTS[0]
    with FakeTensorMode():
        cache = layout.allocate(6, 1, CPU)[0]
        key, value = make_rows(layout, 5)
        ops.reshape_and_cache(key, value, cache, torch.arange(5), layout)
        got = ops.gather_cache(cache, torch.zeros(1, 3, dtype=torch.int32), [7], layout)
    assert got[0].shape == (7, 2, 8)


@EVERY_LAYOUT
def test_operations_do_what_the_functions_do(layout):
    found, caches = calls(layout), make_caches(layout, 2)
    key, value = make_rows(layout, 5)
    scales = None if make_scales(layout)[0] is None else KVScales(*make_scales(layout))
    other = clones(caches)
    torch.ops.kvpage.reshape_and_cache(key, value, caches[1], SLOTS, layout.spec, *make_scales(layout))
    reference.reshape_and_cache(key, value, other[1], SLOTS, layout, scales)
    assert equal_bits(caches, other)
    _, tables, lengths, starts, out_key, out_value, *_ = found["gather_cache"]
    torch.ops.kvpage.gather_cache(
        caches[1], tables, lengths, starts, out_key, out_value, layout.spec, *make_scales(layout)
    )
    expected = reference.gather_cache(caches[1], tables, lengths, layout, starts, scales, row_dtype(layout))
    assert torch.equal(out_key, expected[0])
    assert (value is None) == (expected[1] is None)
    assert value is None or torch.equal(out_value, expected[1])


def test_operations_check_what_the_functions_check():
    layout, cache = LAYOUTS[0], make_caches(LAYOUTS[0])[0]
    before = bits([cache])
    key, value = make_rows(layout, 1)
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] must be -1 or in \[0, 24\), got 24"):
        torch.ops.kvpage.reshape_and_cache(key, value, cache, torch.tensor([24]), layout.spec)
    with pytest.raises(ValueError, match="cache.dtype must be torch.float16, got torch.float32"):
        torch.ops.kvpage.reshape_and_cache(key, value, cache, torch.tensor([4]), "flash:NHD:separate:4:2:8:float16")
    with pytest.raises(ValueError, match="spec must be backend:kv_layout"):
        torch.ops.kvpage.reshape_and_cache(key, value, cache, torch.tensor([4]), "flash")
    assert torch.equal(bits([cache])[0], before[0])
    query, *others = calls(layout)["paged_attention"]
    with pytest.raises(ValueError, match=r"out must be \[num_tokens, num_heads, value_size\], got shape \(\)"):
        torch.ops.kvpage.paged_attention(query, *others[:4], torch.tensor(1.0), layout.spec)


def test_one_scale_without_the_other_is_refused():
    """It was taken for none, and blocks were written with scales of 1."""
    layout = CacheLayout(4, 1, 8, torch.float8_e4m3fn)
    cache = layout.allocate(2, 1, torch.device("cpu"))[0]
    rows, before = torch.ones(1, 1, 8), cache.view(torch.uint8).clone()
    for scales in ((torch.ones(1), None), (None, torch.ones(1)), (torch.ones(1).double(), torch.ones(1))):
        with pytest.raises(ValueError, match="must both be given|must be one row of fp32"):
            torch.ops.kvpage.reshape_and_cache(rows, rows, cache, torch.tensor([0]), layout.spec, *scales)
    assert torch.equal(cache.view(torch.uint8), before)


# --- specs -----------------------------------------------------------------------------------------------------------


def test_a_layout_and_its_spec():
    places = [("flash", "NHD"), ("flash", "HND"), ("flashinfer", "HND"), ("paged", "NHD"), ("mla", "NHD")]
    dtypes = [torch.float32, torch.half, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
    seen = set()
    for (backend, kv_layout), layers, dtype in itertools.product(places, ("separate", "packed"), dtypes):
        layout = CacheLayout(16, 1, 46, dtype, backend, kv_layout, layers)
        assert CacheLayout.from_spec(layout.spec) == layout
        seen.add(layout.spec)
    assert len(seen) == len(places) * 2 * len(dtypes)
    assert CacheLayout(16, 8, 128, torch.bfloat16).spec == "flash:NHD:separate:16:8:128:bfloat16"


@pytest.mark.parametrize(
    "spec, message",
    [
        ("", "spec must be backend:kv_layout:layer_layout:block_size:num_kv_heads:head_size:dtype, got ''"),
        ("flash:NHD:separate:16:8:bfloat16", "spec must be backend:"),
        ("flash:NHD:separate:16:8:128:bfloat", "spec must be backend:"),
        ("flash:NHD:separate:16:8:-1:bfloat16", "spec must be backend:"),
        ("flash:NHD:separate:16:8:0:bfloat16", "head_size must be a positive integer, got 0"),
        ("flash:NHD:together:16:8:128:bfloat16", "layer_layout must be one of separate, packed, got 'together'"),
        ("flash:DNH:separate:16:8:128:bfloat16", "kv_layout must be one that FlashBackend knows, got 'DNH'"),
        ("flesh:NHD:separate:16:8:128:bfloat16", "backend must be one of .*, got 'flesh'"),
    ],
)
def test_what_is_no_spec(spec, message):
    with pytest.raises(ValueError, match=message):
        CacheLayout.from_spec(spec)
