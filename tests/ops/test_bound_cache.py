"""A cache that is bound once: the same results as with tensors, and a refusal when its memory is another."""

import pytest
import torch

from kvpage import _C, CacheLayout, KVScales, ops
from kvpage.ops import reference

CPU = torch.device("cpu")
FP8 = CacheLayout(4, 2, 8, torch.float8_e4m3fn, "flashinfer", "HND", "packed")
LAYOUTS = [
    CacheLayout(4, 2, 8, torch.float32),
    CacheLayout(4, 2, 8, torch.bfloat16, "paged"),
    CacheLayout(4, 2, 8, torch.int8, "flash", "HND"),
    FP8,
]
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.spec)
TABLES, SEQ_LENS, QUERY_LENS = torch.tensor([[3, 0, 5], [1, 4, 9]], dtype=torch.int32), [9, 6], [3, 2]
SLOTS = torch.tensor([3, 0, 20, 16, 17])  # of the last tokens, but for the first two


def scales_of(layout):
    return KVScales.of(0.5, [0.25, 2.0]) if layout == FP8 else None


def pair(layout):
    """The same cache twice, in memory of its own: bound, and the tensor."""
    torch.manual_seed(3)
    rows = torch.randn(2, 24, 2, 8).to(torch.float32 if layout.is_quantized else layout.dtype)
    tensors = [layout.allocate(6, 2, CPU)[1] for _ in range(2)]
    for tensor in tensors:
        ops.reshape_and_cache(rows[0], rows[1], tensor, torch.arange(24), layout, scales_of(layout))
    return ops.BoundCache(tensors[0], layout, scales_of(layout)), tensors[1]


def rows_of(layout, heads=2, size=8):
    return torch.randn(1, heads, 5, size).to(torch.float32 if layout.is_quantized else layout.dtype)


def by_token(rows):
    return rows[0].transpose(0, 1)


def same_bits(bound, tensor):
    return torch.equal(bound.tensor.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))


@EVERY_LAYOUT
def test_a_bound_cache_does_what_a_tensor_does(layout):
    bound, tensor = pair(layout)
    given, scales = layout, scales_of(layout)
    key, value, query = by_token(rows_of(layout)), by_token(rows_of(layout)), by_token(rows_of(layout, 4))
    ops.reshape_and_cache(key, value, bound, SLOTS)
    ops.reshape_and_cache(key, value, tensor, SLOTS, given, scales)
    assert same_bits(bound, tensor)
    found = ops.gather_cache(bound, TABLES, SEQ_LENS)
    want = ops.gather_cache(tensor, TABLES, SEQ_LENS, given, scales=scales)
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
    options = {"softcap": 3.0, "sliding_window": 4, "value_size": 7}
    attended = ops.paged_attention(
        query, tensor, TABLES, SEQ_LENS, given, query_lens=QUERY_LENS, scales=scales, **options
    )
    sequences = ops.Sequences(bound, 5, TABLES, SEQ_LENS, QUERY_LENS)
    assert torch.equal(ops.attend(query, bound, sequences, ops.Attention(**options)), attended)
    assert torch.equal(
        ops.paged_attention(query, bound, TABLES, SEQ_LENS, attention=ops.Attention(**options), query_lens=QUERY_LENS),
        attended,
    )


def forms(layout):
    """Rows that write_and_attend takes at once, and rows that need a closer look."""
    wide = torch.randn(1, 5, 2, 16).to(rows_of(layout).dtype)
    yield "as they come", {}
    yield "by token", {"key": wide[..., :8].transpose(1, 2), "value": wide[..., 8:].transpose(1, 2)}
    yield "negated", {name: torch._neg_view(rows_of(layout, 4 if name == "query" else 2)) for name in ("query", "key")}
    yield "negated slots", {"slot_mapping": torch._neg_view(-SLOTS)}
    yield "strided slots", {"slot_mapping": SLOTS.repeat_interleave(2)[::2]}
    yield "small", {"key": rows_of(layout, size=5), "query": rows_of(layout, 4, 5), "value": rows_of(layout, size=3)}
    yield "parameters", {name: torch.nn.Parameter(rows_of(layout), requires_grad=False) for name in ("key", "value")}
    yield "options", {"attention": ops.Attention(0.3, 4, 5.0, torch.randn(4), 6, torch.tensor([6, 7, 8, 0, 5]))}
    for name, sinks in sinks_of_four_heads():
        yield name, {"attention": ops.Attention(0.3, sinks=sinks, value_size=8)}
    yield "open options", {"attention": ops.Attention()}


def sinks_of_four_heads():
    sinks = torch.randn(8)
    yield "sinks", sinks[:4]
    yield "sinks of a parameter", torch.nn.Parameter(sinks[:4], requires_grad=False)
    yield "sinks in bf16", sinks[:4].bfloat16()
    yield "strided sinks", sinks[::2]
    yield "negated sinks", torch._neg_view(sinks[:4])
    yield "sinks in fp64", sinks[:4].double()


@EVERY_LAYOUT
@pytest.mark.parametrize("form", [name for name, _ in forms(LAYOUTS[0])])
def test_a_layer_is_its_two_operations(layout, form):
    bound, tensor = pair(layout)
    other = ops.BoundCache(tensor, layout, scales_of(layout))
    given = {
        "query": rows_of(layout, 4),
        "key": rows_of(layout),
        "value": rows_of(layout),
        "slot_mapping": SLOTS,
        "attention": ops.Attention(0.3, value_size=8),
        **dict(forms(layout))[form],
    }
    sequences = ops.Sequences(bound, 5, TABLES, SEQ_LENS, QUERY_LENS)
    found = ops.write_and_attend(cache=bound, sequences=sequences, **given)
    ops.reshape_and_cache(by_token(given["key"]), by_token(given["value"]), other, given["slot_mapping"])
    want = ops.attend(by_token(given["query"]), other, sequences, given["attention"])
    assert same_bits(bound, tensor)
    assert found.shape == (1, *want.shape) and torch.equal(found[0], want)
    expected = reference.paged_attention(
        by_token(given["query"]).resolve_neg(),
        tensor,
        TABLES.clamp(max=5),
        torch.tensor(SEQ_LENS),
        layout,
        given["attention"],
        query_lens=torch.tensor(QUERY_LENS),
        scales=scales_of(layout),
    )
    tolerance = 1e-5 if want.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found[0], expected, rtol=tolerance, atol=tolerance)


def bad_layers():
    layout = LAYOUTS[0]
    yield "key must be .1, heads, num_tokens, size.", {"key": torch.zeros(2, 5, 8)}
    yield "key must be .1, heads, num_tokens, size.", {"key": torch.zeros(2, 2, 5, 8)}
    yield "key.shape must be", {"key": rows_of(layout, 3), "value": rows_of(layout, 3)}
    yield "value.shape must be", {"value": rows_of(layout, 1)}
    yield "value.shape must be", {"value": rows_of(layout)[:, :, :4]}
    yield "query's heads must be a multiple of 2", {"query": rows_of(layout, 3)}
    yield "query must have 5 rows", {"query": rows_of(layout, 4)[:, :, :4]}
    yield "key.dtype", {"key": rows_of(layout).double()}
    yield "query.dtype", {"query": rows_of(layout, 4).half()}
    yield "head size", {"key": rows_of(layout, size=9)}
    yield "contiguous", {"value": rows_of(layout, size=16)[..., ::2]}
    yield "slot_mapping.dtype", {"slot_mapping": SLOTS.int()}
    yield "slot_mapping.shape", {"slot_mapping": SLOTS[:4]}
    yield "slot_mapping.4. must be -1 or in", {"slot_mapping": torch.tensor([3, 0, 20, 16, 24])}
    yield "value_size must be in", {"attention": ops.Attention(0.3, value_size=9)}
    for sinks in (torch.zeros(3), torch.zeros(2, 2), torch.zeros(4, device="meta"), torch.zeros(4).to_sparse()):
        yield "sinks", {"attention": ops.Attention(0.3, sinks=sinks, value_size=8)}
    yield "must be on", {"key": rows_of(layout).to("meta")}
    yield "with strides", {"key": rows_of(layout).to_sparse()}
    gone = SLOTS.clone()
    gone.untyped_storage().resize_(0)
    yield "slot_mapping must have memory for its elements", {"slot_mapping": gone}
    yield "slot_mapping must be a tensor with strides", {"slot_mapping": SLOTS.to_sparse()}
    yield "value must be a tensor with strides", {"value": torch.nested.nested_tensor([rows_of(layout)[0]] * 2)}


@pytest.mark.parametrize("match, change", list(bad_layers()))
def test_a_layer_of_another_form_is_refused(match, change):
    layout = LAYOUTS[0]
    bound, tensor = pair(layout)
    given = {"query": rows_of(layout, 4), "key": rows_of(layout), "value": rows_of(layout), "slot_mapping": SLOTS}
    given["attention"] = ops.Attention(0.3, value_size=8)
    with pytest.raises(ValueError, match=match):
        ops.write_and_attend(
            cache=bound, sequences=ops.Sequences(bound, 5, TABLES, SEQ_LENS, QUERY_LENS), **{**given, **change}
        )
    if not {"query", "attention"} & change.keys():  # those are looked at when the rows are written
        assert same_bits(bound, tensor)


@pytest.mark.parametrize("name", ["query", "key", "value", "slot_mapping"])
def test_a_layer_of_no_tensors_is_refused(name):
    layout = LAYOUTS[0]
    bound, tensor = pair(layout)
    sequences = ops.Sequences(bound, 5, TABLES, SEQ_LENS, QUERY_LENS)
    given = {"query": rows_of(layout, 4), "key": rows_of(layout), "value": rows_of(layout), "slot_mapping": SLOTS}
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
        ops.write_and_attend(
            cache=bound, sequences=sequences, attention=ops.Attention(0.3, value_size=8), **{**given, name: [1]}
        )
    assert same_bits(bound, tensor)


def test_a_number_of_tokens_that_is_none_is_refused():
    bound, _ = pair(LAYOUTS[0])
    with pytest.raises(TypeError, match="num_tokens must be an integer"):
        ops.Sequences(bound, torch.tensor([5, 5]), TABLES, SEQ_LENS, QUERY_LENS)


def test_memory_that_is_another_is_refused():
    layout = LAYOUTS[0]
    for change in (
        lambda tensor: tensor.set_(torch.zeros(tensor.shape)),
        lambda tensor: tensor.resize_(2, 5, 4, 2, 8),
        lambda tensor: tensor.t_() if tensor.dim() == 2 else tensor.transpose_(2, 3),
    ):
        bound, _ = pair(layout)
        bound = ops.BoundCache(bound.tensor.clone(), layout)
        sequences = ops.Sequences(bound, 5, TABLES, SEQ_LENS, QUERY_LENS)
        change(bound.tensor)
        rows, query = by_token(rows_of(layout)), by_token(rows_of(layout, 4))
        for call in (
            lambda bound=bound, rows=rows: ops.reshape_and_cache(rows, rows, bound, SLOTS),
            lambda bound=bound: ops.gather_cache(bound, TABLES, SEQ_LENS),
            lambda bound=bound, query=query: ops.paged_attention(query, bound, TABLES, SEQ_LENS, query_lens=QUERY_LENS),
            lambda bound=bound, query=query, given=sequences: ops.attend(query, bound, given, ops.Attention()),
        ):
            with pytest.raises(ValueError, match="cache must keep the memory, shape and strides"):
                call()


def test_what_a_bound_cache_has_is_not_given_again():
    layout = LAYOUTS[0]
    bound, _ = pair(layout)
    rows = by_token(rows_of(layout))
    for extra in ({"layout": layout}, {"scales": KVScales.of(1, 1)}):
        with pytest.raises(ValueError, match="layout and scales must be None for a BoundCache"):
            ops.reshape_and_cache(rows, rows, bound, SLOTS, **extra)
    with pytest.raises(TypeError, match="layout must be a CacheLayout, got NoneType"):
        ops.gather_cache(bound.tensor, TABLES, SEQ_LENS)
    with pytest.raises(ValueError, match="got both: softcap"):
        ops.paged_attention(
            by_token(rows_of(layout, 4)), bound, TABLES, SEQ_LENS, attention=ops.Attention(), query_lens=QUERY_LENS,
            softcap=2.0,
        )  # fmt: skip


def test_sequences_of_other_caches_are_refused():
    layout = LAYOUTS[0]
    bound, _ = pair(layout)
    sequences = ops.Sequences(bound, 5, TABLES, SEQ_LENS, QUERY_LENS)
    query = by_token(rows_of(layout, 4))
    for other in (
        ops.BoundCache(layout.allocate(5, 1, CPU)[0], layout),
        ops.BoundCache(torch.zeros(2, 6, 8, 2, 8), CacheLayout(8, 2, 8, torch.float32)),
    ):
        with pytest.raises(ValueError, match="cache must be on the device, and have the blocks"):
            ops.attend(query, other, sequences, ops.Attention())
    tables = sequences.block_tables
    tables.set_(TABLES.clone())
    with pytest.raises(ValueError, match="block_tables must keep the memory"):
        ops.attend(query, bound, sequences, ops.Attention())


def test_elements_that_share_memory_are_read_but_not_written():
    layout = LAYOUTS[0]
    shared = ops.BoundCache(torch.zeros(2, 1, 4, 2, 8).expand(2, 6, 4, 2, 8), layout)
    assert ops.gather_cache(shared, TABLES, SEQ_LENS)[0].shape == (15, 2, 8)
    rows = by_token(rows_of(layout))
    with pytest.raises(ValueError, match="cache must have memory for each of its elements"):
        ops.reshape_and_cache(rows, rows, shared, SLOTS)


def test_options_are_checked_when_they_are_given():
    for name, value in (("scale", float("nan")), ("sliding_window", 0), ("softcap", 0.0)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            ops.Attention(**{name: value})
    for name in ("scale", "sliding_window", "softcap", "value_size"):
        with pytest.raises(TypeError, match=f"{name} must be a"):
            ops.Attention(**{name: "2"})


def test_each_call_asks_the_extension_once_an_operation(monkeypatch):
    """The native descriptor is made once; a layer makes two native calls."""
    layout, made = LAYOUTS[0], []
    bound, _ = pair(layout)
    sequences, native = ops.Sequences(bound, 5, TABLES, SEQ_LENS, QUERY_LENS), bound.native
    for name in ("reshape_and_cache", "paged_attention"):
        own = getattr(_C, name)
        monkeypatch.setattr(_C, name, lambda *args, name=name, own=own: (made.append(name), own(*args)))
    for _ in range(2):
        rows = rows_of(layout, 4), rows_of(layout), rows_of(layout)
        ops.write_and_attend(*rows, bound, SLOTS, sequences, ops.Attention(0.3, value_size=8))
    assert made == ["reshape_and_cache", "paged_attention"] * 2 and bound.native is native
