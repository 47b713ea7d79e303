"""torch.ops.kvpage: registered as torch asks for it, and the same inside torch.compile as outside."""

import itertools

import pytest
import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.ops import reference

CPU = torch.device("cpu")
LAYOUTS = [
    CacheLayout(4, 2, 8, torch.float32),
    CacheLayout(4, 2, 8, torch.bfloat16, "flash", "HND", "packed"),
    CacheLayout(4, 2, 8, torch.float8_e4m3fn, "flashinfer", "NHD", "packed"),
    CacheLayout(4, 2, 8, torch.int8, "flash"),
    CacheLayout(4, 2, 8, torch.float16, "paged"),
    CacheLayout(4, 1, 8, torch.float32, "mla"),
]
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.spec)
SLOTS = torch.tensor([9, 3, -1, 21, 22])
TABLES = torch.tensor([[2, 5, 1], [4, 0, 1 << 30]], dtype=torch.int32)
LENGTHS, STARTS, QUERIES = torch.tensor([9, 6]), torch.tensor([2, 1]), torch.tensor([3, 2])
PAIRS = torch.tensor([[1, 4], [2, 0]])


def make_caches(layout, num_layers=1, device=CPU, num_blocks=6):
    """Filled with what the layout reads back as plain numbers."""
    caches = layout.allocate(num_blocks, num_layers, device)
    slots = torch.arange(num_blocks * layout.block_size, device=device)
    for cache in caches:
        key = torch.randn(len(slots), layout.num_kv_heads, layout.head_size, device=device).to(row_dtype(layout))
        ops.reshape_and_cache(key, None if layout.backend == "mla" else key.flip(0), cache, slots, layout)
    return caches


def row_dtype(layout):
    return torch.float32 if layout.is_quantized else layout.dtype


def make_rows(layout, num_tokens, device=CPU):
    key, value = torch.randn(2, num_tokens, layout.num_kv_heads, layout.head_size, device=device).to(row_dtype(layout))
    return key, None if layout.backend == "mla" else value


def make_scales(layout):
    """(key, value) where the layout takes scales."""
    return (torch.tensor([0.5]), torch.tensor([0.25, 2.0])) if layout.dtype == torch.float8_e4m3fn else (None, None)


def bits(caches):
    return [cache.contiguous().view(torch.uint8).clone() for cache in caches]


def equal_bits(caches, others):
    return all(torch.equal(a, b) for a, b in zip(bits(caches), bits(others), strict=True))


def clones(caches):
    """Caches of their own memory with the same strides."""
    return [torch.empty_strided(c.shape, c.stride(), dtype=c.dtype).copy_(c) for c in caches]


def calls(layout):
    """Name and arguments of a call of each operation, in torch's form."""
    cache, other, third = (make_caches(layout)[0] for _ in range(3))
    key, value = make_rows(layout, 5)
    out_key, out_value = make_rows(layout, 15)
    scales = make_scales(layout)
    query = torch.randn(5, 4, 8).to(row_dtype(layout))
    each = (None, None) if scales[0] is None else ([scales[0]] * 2, [scales[1]] * 2)
    chunk = torch.zeros(2, 1 if value is None else 2, 7, layout.num_kv_heads, 8, dtype=row_dtype(layout))
    by_head, ids = chunk.transpose(2, 3).contiguous(), TABLES[0]
    spec = layout.spec
    return {
        "reshape_and_cache": (key, value, cache, SLOTS, spec, *scales),
        "gather_cache": (cache, TABLES, LENGTHS, STARTS, out_key, out_value, spec, *scales),
        "paged_attention": (
            query, cache, TABLES, LENGTHS, QUERIES, query.clone(), spec, *scales, 3, 10
        ),
        "swap_blocks": (cache, other, PAIRS, spec),
        "swap_blocks_layers": ([cache], [other], PAIRS, spec),
        "copy_blocks": ([cache, other], PAIRS, spec),
        "store_chunk": ([cache, third], ids, chunk, spec, 3, "vllm", *each),
        "load_chunk": ([cache, third], ids, by_head, spec, 2, "huggingface", *each),
    }  # fmt: skip


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


# --- compiled --------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Attention that writes into a cache and attends over it, as a server's model has it."""

    def __init__(self, layout, scales=None):
        super().__init__()
        self.layout, self.scales = layout, scales
        self.project = torch.nn.ModuleList(
            torch.nn.Linear(16, heads * 8) for heads in (4, layout.num_kv_heads, layout.num_kv_heads)
        )

    def forward(self, x, cache, slots, tables, seq_lens, query_lens):
        query, key, value = (project(x).unflatten(1, (-1, 8)).to(row_dtype(self.layout)) for project in self.project)
        value = None if self.layout.backend == "mla" else value
        ops.reshape_and_cache(key, value, cache, slots, self.layout, self.scales)
        attended = ops.paged_attention(
            query, cache, tables, seq_lens, self.layout, query_lens=query_lens, scales=self.scales
        )
        return attended.relu() + 1


def step_of(num_tokens):
    """One sequence of `num_tokens` in the blocks 5, 2, ..., all of them queries."""
    ids = torch.tensor([5, 2, 0], dtype=torch.int32)
    positions = torch.arange(num_tokens)
    slots = ids[positions // 4].long() * 4 + positions % 4
    return torch.randn(num_tokens, 16), slots, ids[None], torch.tensor([num_tokens]), torch.tensor([num_tokens])


@EVERY_LAYOUT
@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_a_compiled_layer_is_the_eager_one(layout, dynamic):
    torch._dynamo.reset()
    scales = None if make_scales(layout)[0] is None else KVScales(*make_scales(layout))
    layer = Layer(layout, scales)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    cache, other = (make_caches(layout, 3)[1] for _ in range(2))
    other.copy_(cache)
    for num_tokens in (5, 9, 4) if dynamic else (5,):
        x, *rest = step_of(num_tokens)
        expected = layer(x, other, *rest)
        assert torch.equal(compiled(x, cache, *rest), expected)
        assert equal_bits([cache], [other])


EVERY_OPTION = {"value_size": 7, "scale": 0.3, "sliding_window": 5, "softcap": 20.0, "sinks": torch.ones(4)}


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("extra", [{}, EVERY_OPTION], ids=["positions", "every option"])
@torch.no_grad()
def test_options_of_attention_where_torch_traces(extra, by_name):
    """Queries at some positions were refused there."""
    torch._dynamo.reset()
    layout = LAYOUTS[0]
    cache, query = make_caches(layout)[0], torch.randn(5, 4, 8)
    positions = torch.tensor([4, 7, 8, 0, 5])
    given = {**extra, "query_positions": positions}
    attention = ops.Attention(**given)

    def attend(query, cache, lengths, positions):
        if by_name:
            named = {**given, "query_positions": positions}
            return ops.paged_attention(query, cache, TABLES, lengths, layout, query_lens=QUERIES, **named) + 1
        return ops.paged_attention(query, cache, TABLES, lengths, layout, attention, query_lens=QUERIES) + 1

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = compiled(query, cache, LENGTHS, positions)
    assert torch.equal(found, attend(query, cache, LENGTHS, positions))
    expected = reference.paged_attention(query, cache, TABLES, LENGTHS, layout, query_lens=QUERIES, **given) + 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_bound_cache_where_torch_traces():
    torch._dynamo.reset()
    layout = LAYOUTS[2]
    scales = KVScales(*make_scales(layout))
    tensors = [make_caches(layout)[0] for _ in range(2)]
    tensors[1].view(torch.uint8).copy_(tensors[0].view(torch.uint8))
    caches = [ops.BoundCache(tensor, layout, scales) for tensor in tensors]
    (key, value), query, attention = make_rows(layout, 5), torch.randn(5, 4, 8), ops.Attention(softcap=3.0)
    sequences = ops.Sequences(caches[0], 5, TABLES, LENGTHS, QUERIES)

    def layer(cache, query):
        ops.reshape_and_cache(key, value, cache, SLOTS)
        rows = ops.gather_cache(cache, TABLES, [9, 6])
        return ops.attend(query, cache, sequences, attention) + 1, rows

    expected, expected_rows = layer(caches[0], query)
    found, rows = torch.compile(layer, fullgraph=True, backend="aot_eager")(caches[1], query)
    assert torch.equal(found, expected) and equal_bits(rows, expected_rows) and equal_bits(tensors[:1], tensors[1:])


def test_an_unknown_option_is_refused_where_torch_traces():
    torch._dynamo.reset()
    layout, cache = LAYOUTS[0], make_caches(LAYOUTS[0])[0]

    def attend(query):
        return ops.paged_attention(query, cache, TABLES, LENGTHS, layout, windw=3)

    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        attend(torch.zeros(2, 4, 8))
    with pytest.raises(Exception, match="options must be among scale, .*got windw"):
        torch.compile(attend, fullgraph=True, backend="aot_eager")(torch.zeros(2, 4, 8))


@torch.no_grad()
def test_a_layer_compiled_to_machine_code():
    """Inductor, which leaves out copies that functionalisation made: the cache's own memory is written."""
    torch._dynamo.reset()
    layout = LAYOUTS[0]
    layer = Layer(layout)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    cache, other = (make_caches(layout)[0] for _ in range(2))
    other.copy_(cache)
    for num_tokens in (5, 9):
        x, *rest = step_of(num_tokens)
        torch.testing.assert_close(compiled(x, cache, *rest), layer(x, other, *rest))
        torch.testing.assert_close(cache, other)


@torch.no_grad()
def test_layers_of_one_slab_in_one_compiled_function():
    """Packed layers are views of the same memory: each is written, none is written back over another."""
    torch._dynamo.reset()
    layout = LAYOUTS[1]
    caches, others = (make_caches(layout, 3) for _ in range(2))
    for cache, other in zip(caches, others, strict=True):
        other.copy_(cache)
    key, value = make_rows(layout, 5)

    def write_all(caches):
        for index, cache in enumerate(caches):
            ops.reshape_and_cache(key + index, value - index, cache, SLOTS, layout)
        ops.copy_blocks(caches, PAIRS, layout)
        return ops.gather_cache(caches[2], TABLES, [9, 6], layout, [2, 1])

    expected = write_all(others)
    found = torch.compile(write_all, fullgraph=True, backend="aot_eager")(caches)
    assert equal_bits(caches, others)
    assert equal_bits(found, expected)


def test_every_operation_in_one_compiled_function():
    torch._dynamo.reset()
    layout = LAYOUTS[0]
    srcs, dsts = make_caches(layout, 2), make_caches(layout, 2)
    other_srcs, other_dsts = clones(srcs), clones(dsts)

    def everything(srcs, dsts, chunk, rows):
        ops.swap_blocks(srcs[0], dsts[1], PAIRS, layout)
        ops.swap_blocks_layers(srcs, dsts, PAIRS.flip(0), layout)
        ops.copy_blocks(dsts, torch.tensor([[3, 5]]), layout)
        ops.store_chunk(dsts, TABLES[0], chunk, layout, 3)
        ops.load_chunk(srcs, TABLES[0], (chunk + 1).transpose(2, 3), layout, 2, "huggingface")
        ops.gather_cache(srcs[1], TABLES, LENGTHS, layout, out=rows)

    made = [(torch.zeros(2, 2, 7, 2, 8), tuple(torch.zeros(2, 15, 2, 8))) for _ in range(2)]
    everything(other_srcs, other_dsts, *made[0])
    torch.compile(everything, fullgraph=True, backend="aot_eager")(srcs, dsts, *made[1])
    assert equal_bits(srcs, other_srcs)
    assert equal_bits(dsts, other_dsts)
    assert torch.equal(made[0][0], made[1][0])
    assert equal_bits(made[0][1], made[1][1])
    assert made[0][0].abs().sum() > 0 and made[0][1][0].abs().sum() > 0


def test_gathering_lengths_of_a_tensor_needs_room_when_compiled():
    torch._dynamo.reset()
    layout, cache = LAYOUTS[0], make_caches(LAYOUTS[0])[0]

    def gather(lengths):
        return ops.gather_cache(cache, TABLES, lengths, layout)

    with pytest.raises(Exception, match="out must be given in compiled code when seq_lens is a tensor"):
        torch.compile(gather, fullgraph=True, backend="aot_eager")(LENGTHS)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_graph_writes_where_its_inputs_say():
    layout, device = LAYOUTS[0], torch.device("cuda")
    cache, other = (make_caches(layout, 1, device)[0] for _ in range(2))
    other.copy_(cache)
    key, value = make_rows(layout, 5, device)
    slots = SLOTS.to(device)
    ops.reshape_and_cache(key, value, cache, slots, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.kvpage.reshape_and_cache(key, value, cache, slots, layout.spec)
    for seed in range(3):
        torch.manual_seed(seed)
        cache.copy_(other)
        key.normal_()
        value.normal_()
        slots.copy_(torch.randperm(24)[:5])
        slots[seed] = -1
        graph.replay()
        expected = other.clone()
        reference.reshape_and_cache(key, value, expected, slots, layout)
        assert torch.equal(cache, expected)
    ops.check_device(device)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]], ids=lambda layout: layout.spec)
@torch.no_grad()
def test_a_captured_layer_takes_lengths_as_they_are_at_each_replay(layout):
    """A compiled function that writes, attends and gathers, in a graph that never reads a length on the host."""
    torch._dynamo.reset()
    device = torch.device("cuda")
    cache = make_caches(layout, 1, device)[0]
    start = bits([cache])[0]
    key, value = make_rows(layout, 2, device)
    query, tables = torch.randn(2, 4, 8, device=device), TABLES.to(device)
    slots, lengths = torch.tensor([9, 19], device=device), torch.tensor([10, 4], device=device)
    rows = tuple(torch.zeros(24, layout.num_kv_heads, 8, device=device) for _ in range(2))

    @torch.compile(fullgraph=True)
    def layer():
        ops.reshape_and_cache(key, value, cache, slots, layout)
        ops.gather_cache(cache, tables, lengths, layout, out=rows)
        return ops.paged_attention(query, cache, tables, lengths, layout, max_seq_len=12) + 1

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended = layer()
    for first, second in ((10, 4), (12, 1), (5, 8)):
        cache.view(torch.uint8).copy_(start.view(cache.view(torch.uint8).shape))
        key.normal_()
        value.normal_()
        lengths.copy_(torch.tensor([first, second]))
        graph.replay()
        expected = cache.clone()
        reference.reshape_and_cache(key, value, expected, slots, layout)
        assert equal_bits([cache], [expected])
        host = torch.tensor([first, second])
        gathered = reference.gather_cache(cache, tables, host, layout)
        assert all(torch.equal(a[: first + second], b) for a, b in zip(rows, gathered, strict=True))
        want = reference.paged_attention(query, cache, tables, host, layout) + 1
        torch.testing.assert_close(attended, want, atol=1e-2, rtol=1e-2)
    ops.check_device(device)


@pytest.mark.gpu
def test_a_swap_is_not_captured():
    """Its mapping is read from host memory at once; a replay would repeat it with old pairs."""
    layout, device = LAYOUTS[0], torch.device("cuda")
    src, dst = make_caches(layout, 1, device)[0], layout.allocate(6, 1, CPU, pin_memory=True)[0]
    before = dst.clone()
    with (
        pytest.raises(ValueError, match="stream must not be capturing a graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ops.swap_blocks(src, dst, PAIRS, layout)
    torch.cuda.synchronize()
    assert torch.equal(dst, before)


def test_one_scale_without_the_other_is_refused():
    """It was taken for none, and blocks were written with scales of 1."""
    layout = CacheLayout(4, 1, 8, torch.float8_e4m3fn)
    cache = layout.allocate(2, 1, torch.device("cpu"))[0]
    rows, before = torch.ones(1, 1, 8), cache.view(torch.uint8).clone()
    for scales in ((torch.ones(1), None), (None, torch.ones(1)), (torch.ones(1).double(), torch.ones(1))):
        with pytest.raises(ValueError, match="must both be given|must be one row of fp32"):
            torch.ops.kvpage.reshape_and_cache(rows, rows, cache, torch.tensor([0]), layout.spec, *scales)
    assert torch.equal(cache.view(torch.uint8), before)
