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
from kvpage.ops.operation import operation


def options(name):
    """All options of attention, by name."""
    attends = {"scale": 0.3, "sliding_window": 5, "softcap": 20.0, "sinks": torch.randn(4), "value_size": 8}
    positions = torch.tensor([4, 7, 8, 0, 5])
    return {**attends, "query_positions": positions} if name == "paged_attention" else {}


def operators():
    """All that torch knows, by name."""
    registered = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return {name: getattr(torch.ops.kvpage, name).default for library, name in registered if library == "kvpage"}


NAMES = sorted(operators())


def test_each_operator_stands_for_an_operation_and_has_a_call():
    assert set(NAMES) == set(calls(LAYOUTS[0]))
    assert set(NAMES) <= set(ops.__all__)


def tensors_of(value):
    return [tensor for tensor in torch.utils._pytree.tree_leaves(value) if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_is_declared(name):
    """opcheck finds what is written and not declared, but not the contrary."""
    operator, written, declared = operators()[name], set(), set()
    for layout in LAYOUTS:
        values = calls(layout)[name]
        before = [bits(tensors_of(value)) for value in values]
        operator(*values)
        for argument, value, old in zip(operator._schema.arguments, values, before, strict=False):
            if not equal_bits(tensors_of(value), old):
                written.add(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and tensors_of(value):
                declared.add(argument.name)
    assert written == declared


OPTIONS = (
    "float? scale=None, int? sliding_window=None, float? softcap=None, Tensor? sinks=None, int? value_size=None, "
    "Tensor? query_positions=None"
)
SCHEMAS = {
    "paged_attention": (
        "Tensor query, Tensor cache, Tensor block_tables, Tensor seq_lens, Tensor? query_lens, Tensor(a!) out, "
        "Tensor? shared, str layout, Tensor? key_scale=None, Tensor? value_scale=None, int? max_query_len=None, "
        f"int? max_seq_len=None, *, {OPTIONS}"
    ),
    "gather_cache": (
        "Tensor cache, Tensor block_tables, Tensor seq_lens, Tensor? seq_starts, Tensor(a!) key, Tensor(b!)? value, "
        "str layout, Tensor? key_scale=None, Tensor? value_scale=None"
    ),
    "load_chunk": (
        "Tensor(a!)[] caches, Tensor block_ids, Tensor chunk, str layout, int start, str fmt, "
        "Tensor[]? key_scales=None, Tensor[]? value_scales=None"
    ),
    "sample_rows": (
        "Tensor logits, Tensor records, Tensor positions, Tensor(a!) out, Tensor(b!)? tops=None, "
        "Tensor(c!)? shares=None, Tensor(d!)? lists=None, Tensor(e!)? held=None"
    ),
}
"""Of operations that have every kind of parameter. Exported programs hold them."""


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_schemas(name):
    assert str(operators()[name]._schema) == f"kvpage::{name}({SCHEMAS[name]}) -> ()"


def test_a_parameter_of_an_unknown_kind_is_refused():
    def scaled(rows: torch.Tensor, factors: dict) -> None:
        """Needs no more than annotations."""

    with pytest.raises(KeyError, match="dict"):
        operation(scaled, ["rows"])
    assert not hasattr(torch.ops.kvpage, "scaled")


def test_what_is_written_must_be_a_parameter():
    def scaled(rows: torch.Tensor, factor: float) -> None:
        """Needs no more than annotations."""

    with pytest.raises(ValueError, match="writes must be among rows, factor, got row$"):
        operation(scaled, ["row"])
    assert not hasattr(torch.ops.kvpage, "scaled")


@pytest.mark.parametrize(
    "arguments, named, message",
    [
        ((1, 2), {}, "arguments of swap_blocks must be block_mapping, dst, layout, src, each once, got src, dst$"),
        ((1, 2, 3, 4, 5), {}, "arguments of swap_blocks must be"),
        ((1, 2, 3, 4), {"dst": 2}, "arguments of swap_blocks must be"),
        ((1, 2, 3), {"layuot": 4}, "got src, dst, block_mapping, layuot$"),
    ],
)
def test_traced_arguments_are_those_of_the_function(arguments, named, message):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(TypeError, match="swap_blocks"):
        ops.swap_blocks(*arguments, **named)
    with FakeTensorMode(), pytest.raises(TypeError, match=message):
        ops.swap_blocks(*arguments, **named)


def test_threads_are_not_chosen_where_torch_traces():
    from torch._subclasses.fake_tensor import FakeTensorMode

    caches, ids, chunk = calls(LAYOUTS[0])["store_chunk"][:3]
    with FakeTensorMode(), pytest.raises(TypeError, match="arguments of store_chunk must be .*num_threads$"):
        ops.store_chunk(caches, ids, chunk, LAYOUTS[0], num_threads=1)


@EVERY_LAYOUT
@pytest.mark.parametrize("name", NAMES)
def test_registration(layout, name):
    """Schema, fake, autograd keys and functionalisation, as torch checks them."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if layout.dtype == torch.float8_e4m3fn:  # the check of schemas multiplies, which torch does not do for these
        checks.remove("test_schema")
    torch.library.opcheck(operators()[name], calls(layout)[name], options(name), test_utils=checks)


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
        torch.ops.kvpage.paged_attention(query, *others[:4], torch.tensor(1.0), None, layout.spec)


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
