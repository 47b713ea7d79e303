"""The operations in code that torch compiles or captures: the same inside as outside."""

import pytest
import torch
from support.torch_calls import (
    CPU,
    EVERY_LAYOUT,
    LAYOUTS,
    LENGTHS,
    PAIRS,
    QUERIES,
    SLOTS,
    TABLES,
    bits,
    clones,
    equal_bits,
    make_caches,
    make_rows,
    make_scales,
    row_dtype,
)

from kvpage import KVScales, ops
from kvpage.ops import reference


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
