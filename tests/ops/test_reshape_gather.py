"""reshape_and_cache and gather_cache against their reference, bit by bit, over every byte of the destination.

On the device "interpreter", which test_triton_compile.py asks for in a process of its own, the Triton kernels run on
the CPU.
"""

import itertools
import warnings

import pytest
import torch
from support.kernel_calls import INTERPRETED, device_of, gather, reshape

from kvpage import _C, CacheLayout, ops, register_backend
from kvpage.layout.backends import _backends
from kvpage.ops import reference
from kvpage.ops.cuda import rows as token_ops_cuda

BLOCK = 4
LAYOUTS = list(itertools.product(("flash", "flashinfer"), ("NHD", "HND"), ("separate", "packed")))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ALL_LAYOUTS = pytest.mark.parametrize("backend, kv_layout, layer_layout", LAYOUTS)
ON = pytest.mark.parametrize("where", ["interpreter"] if INTERPRETED else ["cpu", CUDA])
ON_KERNELS = pytest.mark.parametrize("where", ["interpreter"] if INTERPRETED else [CUDA])


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_layout(
    backend="flash", kv_layout="NHD", layer_layout="separate", heads=3, size=10, dtype=torch.float32, block=BLOCK
):
    return CacheLayout(block, heads, size, dtype, backend, kv_layout, layer_layout)


def poisoned(layout, num_blocks, device="cpu"):
    """The second of three layers' caches and all of their memory, every element a NaN of its own bit pattern."""
    caches = layout.allocate(num_blocks, 3, torch.device(device))
    memory = [bits(cache) for cache in caches]
    base = {2: 0x7F81, 4: 0x7FC00000, 8: 0x7FC00000}[layout.dtype.itemsize]
    for i, view in enumerate(memory):
        view.copy_((torch.arange(view.numel(), device=device).reshape(view.shape) + i) % 64 + base)
    return caches[1], memory


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def random_rows(num_tokens, layout, size):
    return torch.randn(num_tokens, layout.num_kv_heads, size).to(layout.dtype)


def random_slots(num_tokens, num_blocks, layout, padding=2):
    """A random choice of slots, each named once, with `padding` tokens more that go nowhere."""
    slots = torch.randperm(num_blocks * layout.block_size)[:num_tokens]
    return torch.cat([slots, torch.full((padding,), -1)])[torch.randperm(num_tokens + padding)]


def check_reshape(key, value, slots, layout, num_blocks, where="cpu"):
    """Runs the operation and its reference on equal caches; every byte of all layers must agree."""
    device = device_of(where)
    cache, memory = poisoned(layout, num_blocks, device)
    expected, expected_memory = poisoned(layout, num_blocks, device)
    key, value, slots = key.to(device), value.to(device), slots.to(device)
    assert not reshape(where, key, value, cache, slots, layout)
    reference.reshape_and_cache(key, value, expected, slots, layout)
    for got, want in zip(memory, expected_memory, strict=True):
        assert torch.equal(got, want)


@ON
@ALL_LAYOUTS
def test_reshape_writes_what_the_reference_writes(where, backend, kv_layout, layer_layout):
    torch.manual_seed(0)
    layout = make_layout(backend, kv_layout, layer_layout)
    for num_tokens in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 23):
        slots = random_slots(num_tokens, 7, layout)
        key, value = (random_rows(len(slots), layout, layout.head_size) for _ in range(2))
        check_reshape(key, value, slots, layout, 7, where)


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, size, block", [(1, 1, 1), (2, 8, 16), (5, 80, 3), (8, 128, 16)])
def test_reshape_of_any_sizes(where, dtype, heads, size, block):
    torch.manual_seed(1)
    layout = make_layout(heads=heads, size=size, dtype=dtype, block=block)
    slots = random_slots(9, 40, layout)
    key, value = (random_rows(len(slots), layout, size) for _ in range(2))
    check_reshape(key, value, slots, layout, 40, where)


@ON
@ALL_LAYOUTS
def test_reshape_leaves_the_rest_of_a_row_where_sizes_are_smaller(where, backend, kv_layout, layer_layout):
    torch.manual_seed(2)
    layout = make_layout(backend, kv_layout, layer_layout)
    slots = random_slots(11, 5, layout)
    key, value = random_rows(len(slots), layout, 6), random_rows(len(slots), layout, 1)
    check_reshape(key, value, slots, layout, 5, where)


@ON
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_reshape_of_strided_rows(where, kv_layout):
    torch.manual_seed(3)
    layout = make_layout(kv_layout=kv_layout)
    slots = random_slots(8, 5, layout)
    fused = torch.randn(len(slots), 3, layout.num_kv_heads, layout.head_size + 2, device=device_of(where))
    heads_first = torch.randn(layout.num_kv_heads, len(slots), layout.head_size, device=device_of(where))
    check_reshape(fused[:, 1, :, 1:-1], heads_first.transpose(0, 1), slots, layout, 5, where)
    strided_slots = torch.stack([slots, torch.full_like(slots, 1 << 40)], 1)[:, 0]
    check_reshape(fused[:, 1, :, 1:-1], fused[:, 2, :, :-2], strided_slots, layout, 5, where)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_reshape_over_threads(kv_layout):
    """Enough bytes that more than one thread works: 2 MiB."""
    torch.manual_seed(4)
    layout = make_layout(kv_layout=kv_layout, heads=8, size=64)
    slots = random_slots(512, 300, layout, padding=7)
    key, value = (random_rows(len(slots), layout, 64) for _ in range(2))
    check_reshape(key, value, slots, layout, 300)


def negated(tensor):
    """The same numbers in a view that torch negates when it reads: in memory they have the other sign."""
    view = torch._neg_view(tensor.neg())
    assert view.is_neg() and torch.equal(view, tensor)
    return view


def test_reshape_of_views_that_torch_negates():
    torch.manual_seed(15)
    layout = make_layout()
    slots = random_slots(9, 5, layout)
    key, value = (random_rows(len(slots), layout, layout.head_size) for _ in range(2))
    check_reshape(negated(key), negated(value), negated(slots), layout, 5)
    imaginary = torch.imag(torch.complex(key, value).conj())
    assert imaginary.is_neg() and imaginary.stride(-1) == 2
    check_reshape(key, imaginary, slots, layout, 5)
    complex_rows = torch.complex(key, value).conj()
    check_reshape(complex_rows, complex_rows, slots, make_layout(dtype=torch.complex64), 5)


@ON
def test_reshape_of_padding_alone_writes_nothing(where):
    layout = make_layout()
    check_reshape(*(random_rows(3, layout, 10) for _ in range(2)), torch.full((3,), -1), layout, 2, where)


def bad_reshapes():
    layout = make_layout()
    key, slots = torch.zeros(3, 3, 10), torch.tensor([1, 5, 7])
    yield "dtype", (key.half(), key, slots, layout)
    yield "dtype", (key, key.double(), slots, layout)
    yield "dtype", (key, key, slots.int(), layout)
    yield "shape", (key[0], key, slots, layout)
    yield "shape", (key, key[:2], slots, layout)
    yield "shape", (key[:, :2], key, slots, layout)
    yield "shape", (key, key, slots[:2], layout)
    yield "shape", (key, key, slots[None], layout)
    yield "head size", (torch.zeros(3, 3, 11), key, slots, layout)
    yield "head size", (key, key[..., :0], slots, layout)
    yield "contiguous", (torch.zeros(3, 3, 20)[..., ::2], key, slots, layout)
    yield "device", (key.to("meta"), key, slots, layout)
    yield "device", (key, key, slots.to("meta"), layout)
    yield "cache.shape", (key, key, slots, make_layout(size=12))
    yield "cache.dtype", (key, key, slots, make_layout(dtype=torch.float16))
    for bad in (8, -2, 1 << 62, -(1 << 63)):
        yield f"got {bad}", (key, key, torch.tensor([1, 5, bad]), layout)
    yield "twice", (key, key, torch.tensor([1, 5, 1]), layout)


@pytest.mark.parametrize("match, args", list(bad_reshapes()))
def test_a_refused_reshape_writes_nothing(match, args):
    match = "must be on" if match == "device" else match
    cache, memory = poisoned(make_layout(), 2)
    before = [view.clone() for view in memory]
    key, value, slots, layout = args
    with pytest.raises(ValueError, match=match):
        ops.reshape_and_cache(key, value, cache, slots, layout)
    assert all(torch.equal(got, want) for got, want in zip(memory, before, strict=True))


def overlapping(layout, num_blocks):
    """Caches of the layout's shape in which two elements share memory, one dimension after the other."""
    shape, memory = layout.shape(num_blocks), torch.zeros(1000)
    contiguous = [stride for stride in torch.empty(shape).stride()]
    for dim in range(len(shape)):
        strides = [*contiguous[:dim], 0, *contiguous[dim + 1 :]]
        yield memory.as_strided(shape, strides)
    yield memory.as_strided(shape, [*contiguous[:-2], shape[-1] - 1, 1])  # heads that overlap by one element
    yield torch.zeros(layout.shape(1)).expand(shape)


def test_caches_without_memory_for_each_element_are_not_written():
    layout = make_layout()
    key, slots = torch.ones(3, 3, 10), torch.tensor([1, 5, 7])
    for cache in overlapping(layout, 2):
        with pytest.raises(ValueError, match="cache must (have memory for each of its elements|be contiguous)"):
            ops.reshape_and_cache(key, key, cache, slots, layout)
        assert not cache.any()


def test_caches_that_torch_negates_are_refused():
    layout = make_layout()
    cache = torch._neg_view(torch.zeros(layout.shape(2)))
    key, tables = torch.ones(3, 3, 10), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="cache must not be a view that torch negates or conjugates"):
        ops.reshape_and_cache(key, key, cache, torch.tensor([1, 5, 7]), layout)
    with pytest.raises(ValueError, match="cache must not be a view that torch negates or conjugates"):
        ops.gather_cache(cache, tables, [1], layout)
    assert not cache.any()


def test_what_is_no_tensor_is_named():
    layout, key, slots = make_layout(), torch.zeros(3, 3, 10), torch.tensor([1, 5, 7])
    cache, memory = poisoned(layout, 2)
    before = [view.clone() for view in memory]
    good = {"key": key, "value": key, "cache": cache, "slot_mapping": slots}
    for name in good:
        for other in (() if name == "value" else (None,)) + ([1.0], good[name].numpy()):
            with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got {type(other).__name__}"):
                ops.reshape_and_cache(**good | {name: other}, layout=layout)
    with pytest.raises(TypeError, match="layout must be a CacheLayout, got str"):
        ops.reshape_and_cache(**good, layout="flash")
    assert all(torch.equal(view, old) for view, old in zip(memory, before, strict=True))


def test_reshape_finds_the_one_double_slot_among_many():
    layout = make_layout(heads=1, size=1)
    cache, _ = poisoned(layout, 1000)
    slots = torch.randperm(4000)
    key = torch.zeros(4000, 1, 1)
    ops.reshape_and_cache(key, key, cache, slots, layout)
    slots[1234] = slots[3999]
    with pytest.raises(ValueError, match=f"got {slots[3999]} twice"):
        ops.reshape_and_cache(key, key, cache, slots, layout)


# --- gather_cache -----------------------------------------------------------------------------------------------------


def random_tables(lengths, num_blocks, layout, starts=None, width=None):
    """A block table for each sequence over distinct blocks, huge ids wherever no wanted token lies."""
    starts = starts or [0] * len(lengths)
    width = width or max((-(-(s + n) // layout.block_size) for s, n in zip(starts, lengths, strict=True)), default=0)
    tables = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(num_blocks).tolist()
    for table, start, length in zip(tables, starts, lengths, strict=True):
        for i in range(start // layout.block_size, -(-(start + length) // layout.block_size) if length else 0):
            table[i] = free.pop()
    return tables


def filled(layout, num_blocks, where="cpu"):
    cache, _ = poisoned(layout, num_blocks, device_of(where))
    cache.copy_(torch.randn(cache.shape).to(layout.dtype))
    return cache


LENGTHS = [[], [0], [1], [BLOCK - 1], [BLOCK], [BLOCK + 1], [0, 5, 0, 13, 1, 8, 0]]


@ON
@ALL_LAYOUTS
@pytest.mark.parametrize("lengths", LENGTHS)
def test_gather_reads_what_the_reference_reads(where, backend, kv_layout, layer_layout, lengths):
    torch.manual_seed(5)
    layout = make_layout(backend, kv_layout, layer_layout)
    cache, tables = filled(layout, 12, where), random_tables(lengths, 12, layout, width=6).to(device_of(where))
    got = gather(where, cache, tables, lengths, layout)
    want = reference.gather_cache(cache, tables, torch.tensor(lengths, dtype=torch.int64), layout)
    assert where != "interpreter" or got[2] == 0
    for rows, expected in zip(got[:2], want, strict=True):
        assert rows.is_contiguous() and torch.equal(rows, expected)


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, size, block", [(1, 1, 1), (2, 8, 16), (5, 80, 3), (8, 128, 16)])
def test_gather_of_any_sizes(where, dtype, heads, size, block):
    torch.manual_seed(6)
    layout = make_layout(heads=heads, size=size, dtype=dtype, block=block)
    lengths = [2, 17, 1]
    cache, tables = filled(layout, 30, where), random_tables(lengths, 30, layout).to(device_of(where))
    got = gather(where, cache, tables, torch.tensor(lengths, dtype=torch.int32), layout)[:2]
    want = reference.gather_cache(cache, tables, torch.tensor(lengths), layout)
    assert all(torch.equal(rows, expected) for rows, expected in zip(got, want, strict=True))


@ON
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_gather_from_the_middle_of_sequences(where, kv_layout):
    """Blocks before the start may be gone: their table entries are not read."""
    torch.manual_seed(7)
    layout = make_layout(kv_layout=kv_layout)
    starts, lengths = [0, 1, 4, 7, 9, 2], [3, 9, 4, 2, 0, 1]
    cache, tables = filled(layout, 12, where), random_tables(lengths, 12, layout, starts).to(device_of(where))
    got = gather(where, cache, tables, lengths, layout, starts)[:2]
    safe = tables.clamp(max=11)
    ends = torch.tensor(starts) + torch.tensor(lengths)
    whole = [rows.split(ends.tolist()) for rows in reference.gather_cache(cache, safe, ends, layout)]
    for rows, parts in zip(got, whole, strict=True):
        assert torch.equal(rows, torch.cat([part[start:] for part, start in zip(parts, starts, strict=True)]))


@ON
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_gather_into_given_tensors(where, kv_layout, padded, heads_first):
    """Smaller heads, padding between rows and sequences, heads outside of tokens: what is not a row stays as it is."""
    torch.manual_seed(8)
    layout = make_layout(kv_layout=kv_layout)
    lengths = [5, 0, 8, 1]
    cache, tables = filled(layout, 12, where), random_tables(lengths, 12, layout).to(device_of(where))
    want = reference.gather_cache(cache, tables, torch.tensor(lengths), layout)
    memory, out, expected = [], [], []
    for rows, size in zip(want, (10, 7), strict=True):
        shape = ([4] if padded else []) + ([3, 9 if padded else 14] if heads_first else [9 if padded else 14, 3])
        whole = torch.full([*shape, size + 3], float("nan"), device=device_of(where))
        final = whole.clone()
        views = [(t.transpose(-2, -3) if heads_first else t)[..., 1 : 1 + size] for t in (whole, final)]
        if padded:
            for i, part in enumerate(rows.split(lengths)):
                views[1][i, : len(part)] = part[..., :size]
        else:
            views[1].copy_(rows[..., :size])
        memory.append(whole), out.append(views[0]), expected.append(final)
    got = gather(where, cache, tables, lengths, layout, out=tuple(out))
    assert got[0] is out[0] and got[1] is out[1]
    for whole, final in zip(memory, expected, strict=True):
        assert torch.equal(bits(whole), bits(final))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_gather_over_threads(kv_layout):
    """Enough bytes that two threads share the tokens in the middle of a sequence: 2 MiB."""
    torch.manual_seed(9)
    layout = make_layout(kv_layout=kv_layout, heads=8, size=64)
    lengths = [3, 400, 0, 111]
    cache, tables = filled(layout, 140), random_tables(lengths, 140, layout)
    got = ops.gather_cache(cache, tables, lengths, layout)
    want = reference.gather_cache(cache, tables, torch.tensor(lengths), layout)
    assert all(torch.equal(rows, expected) for rows, expected in zip(got, want, strict=True))


def test_what_was_written_is_what_is_gathered():
    torch.manual_seed(10)
    layout = make_layout("flashinfer", "HND", "packed", dtype=torch.bfloat16)
    cache, _ = poisoned(layout, 9)
    tables = random_tables([11], 9, layout)
    slots = tables[0].long().repeat_interleave(BLOCK) * BLOCK + torch.arange(BLOCK).repeat(3)
    key, value = (random_rows(11, layout, 10) for _ in range(2))
    ops.reshape_and_cache(key, value, cache, slots[:11], layout)
    got_key, got_value = ops.gather_cache(cache, tables, [11], layout)
    assert torch.equal(key, got_key) and torch.equal(value, got_value)


def bad_gathers():
    tables = torch.tensor([[0, 3], [2, 9]], dtype=torch.int32)
    key, value = torch.zeros(13, 3, 10), torch.zeros(13, 3, 10)
    yield "must be in .0, 4., got 9", {"seq_lens": [7, 5]}
    yield "got -1", {"block_tables": torch.tensor([[0, 3], [-1, 9]], dtype=torch.int32)}
    yield "seq_lens must be in", {"seq_lens": [-1, 13]}
    yield "seq_lens must be in", {"seq_lens": [9, 3]}
    yield "seq_starts must be in", {"seq_starts": [0, -4]}
    yield "must be at most 8, got 9", {"seq_starts": [1, 0]}
    yield "one entry for each", {"seq_lens": [12]}
    yield "one entry for each", {"seq_starts": [0, 0, 0]}
    yield "int32 or int64", {"seq_lens": torch.tensor([8.0, 4.0])}
    yield "one row of", {"seq_lens": torch.tensor([[8, 4]])}
    yield "block_tables.dtype", {"block_tables": tables.long()}
    yield "num_seqs, max_blocks", {"block_tables": tables[0]}
    yield "contiguous", {"block_tables": tables.t()}
    yield "must be on", {"block_tables": tables.to("meta")}
    yield "key.shape", {"out": (key, value[:12])}
    yield "value.dtype", {"out": (key[:12], value[:12].half())}
    yield "value's head size", {"out": (key[:12], torch.zeros(12, 3, 11))}
    yield "contiguous", {"out": (torch.zeros(12, 3, 20)[..., ::2], value[:12])}
    yield "3 or 4 dimensions", {"out": (key[:12], torch.zeros(12, 30))}
    yield "memory for each", {"out": (torch.zeros(1, 3, 10).expand(12, 3, 10), value[:12])}
    yield "as many dimensions", {"out": (key[:12], torch.zeros(2, 8, 3, 10))}
    yield "room for 8", {"out": (torch.zeros(2, 7, 3, 10), value[:12])}
    yield "cache.shape", {"layout": make_layout(size=12)}
    shared = torch.zeros(12, 3, 10)
    yield "key and value must not be in the same memory", {"out": (shared, shared)}
    yield "key and value must not be in the same memory", {"out": (shared, shared[..., :7])}
    yield "memory for each", {"out": (key[:12], torch.zeros(200).as_strided((12, 3, 10), (15, 10, 1)))}
    yield "key must not be a view", {"out": (torch._neg_view(torch.zeros(12, 3, 10)), value[:12])}
    yield "seq_starts must be in", {"seq_starts": [2**70, 0]}


def odd_gathers():
    rows = torch.zeros(12, 3, 10)
    yield "cache must be a torch.Tensor, got list", {"cache": [1]}
    yield "block_tables must be a torch.Tensor, got list", {"block_tables": [[0, 3], [2, 9]]}
    yield "layout must be a CacheLayout, got NoneType", {"layout": None}
    yield "seq_lens must be integers, got 12", {"seq_lens": 12}
    yield "seq_lens must be integers, got None", {"seq_lens": None}
    yield r"seq_lens must be integers, got \[8.0, 4\]", {"seq_lens": [8.0, 4]}
    yield "seq_starts must be integers, got '00'", {"seq_starts": "00"}
    yield "out must be a pair of tensors, got Tensor", {"out": torch.zeros(2, 12, 3, 10)}
    yield "out must be a pair of tensors, got tuple", {"out": (rows,)}
    yield "value must be a torch.Tensor, got list", {"out": (rows, [])}


@pytest.mark.parametrize("match, change", list(odd_gathers()))
def test_gather_names_what_is_of_another_type(match, change):
    out = (torch.zeros(12, 3, 10), torch.zeros(12, 3, 10))
    with pytest.raises(TypeError, match=match):
        ops.gather_cache(**{"cache": filled(make_layout(), 4), **GOOD_GATHER, "out": out, **change})
    assert not out[0].any() and not out[1].any()


def test_empty_outputs_may_be_the_same():
    nothing = torch.zeros(0, 3, 10)
    cache = filled(make_layout(), 4)
    assert ops.gather_cache(cache, GOOD_GATHER["block_tables"], [0, 0], make_layout(), out=(nothing, nothing))


def test_key_and_value_may_lie_side_by_side():
    cache, both = filled(make_layout(), 4), torch.zeros(12, 2, 3, 10)
    ops.gather_cache(cache, **GOOD_GATHER, out=(both[:, 0], both[:, 1]))
    for rows, want in zip(both.unbind(1), ops.gather_cache(cache, **GOOD_GATHER), strict=True):
        assert torch.equal(rows, want)


def test_gather_of_tables_that_torch_negates():
    cache = filled(make_layout(), 4)
    got = ops.gather_cache(cache, **GOOD_GATHER | {"block_tables": negated(GOOD_GATHER["block_tables"])})
    for rows, want in zip(got, ops.gather_cache(cache, **GOOD_GATHER), strict=True):
        assert torch.equal(rows, want)


def test_an_expanded_cache_may_be_read():
    layout = make_layout()
    block = torch.randn(layout.shape(1))
    got = ops.gather_cache(block.expand(layout.shape(10)), **GOOD_GATHER)
    want = ops.gather_cache(block.repeat(1, 10, 1, 1, 1), **GOOD_GATHER)
    assert all(torch.equal(rows, expected) for rows, expected in zip(got, want, strict=True))


GOOD_GATHER = {
    "block_tables": torch.tensor([[0, 3], [2, 9]], dtype=torch.int32),
    "seq_lens": [8, 4],
    "layout": make_layout(),
}


@pytest.mark.parametrize("match, change", list(bad_gathers()))
def test_a_refused_gather_writes_nothing(match, change):
    cache = filled(make_layout(), 4)
    out = change.get("out", (torch.zeros(12, 3, 10), torch.zeros(12, 3, 10)))
    before = [rows.clone() for rows in out]
    with pytest.raises(ValueError, match=match):
        ops.gather_cache(cache, **{**GOOD_GATHER, "out": out, **change})
    assert all(torch.equal(rows, old) for rows, old in zip(out, before, strict=True))


def test_the_call_that_the_refused_gathers_vary_is_good():
    cache = filled(make_layout(), 4)
    out = (torch.zeros(12, 3, 10), torch.zeros(12, 3, 10))
    assert ops.gather_cache(cache, **GOOD_GATHER, out=out)[0].abs().sum() > 0


def test_a_backend_without_split_kv_is_refused():
    class Opaque:
        block_dim = 0

        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
            return (num_blocks, block_size, head_size)

    if "opaque" not in _backends:
        register_backend("opaque", Opaque)
    layout = CacheLayout(BLOCK, 1, 8, torch.float32, backend="opaque")
    cache = torch.zeros(layout.shape(2))
    with pytest.raises(ValueError, match="split_kv"):
        ops.gather_cache(cache, torch.zeros(1, 1, dtype=torch.int32), [1], layout)
    with pytest.raises(ValueError, match="split_kv"):
        ops.reshape_and_cache(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), cache, torch.tensor([0]), layout)


# --- ids that live on the device ------------------------------------------------------------------------------------


@ON_KERNELS
def test_a_bad_slot_on_the_device_is_skipped_and_reported(where):
    torch.manual_seed(11)
    layout, device = make_layout(), device_of(where)
    cache, memory = poisoned(layout, 5, device)
    expected, expected_memory = poisoned(layout, 5, device)
    slots = torch.tensor([3, 20, 7, -2, 1 << 62, -1, 19], device=device)
    good = torch.tensor([3, -1, 7, -1, -1, -1, 19], device=device)
    key, value = (random_rows(7, layout, 10).to(device) for _ in range(2))
    error = reshape(where, key, value, cache, slots, layout)
    reference.reshape_and_cache(key, value, expected, good, layout)
    assert all(torch.equal(got, want) for got, want in zip(memory, expected_memory, strict=True))
    check_reported(where, error, 1, "slot")


@ON_KERNELS
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_bad_block_on_the_device_is_skipped_and_reported(where, bad):
    torch.manual_seed(12)
    layout, device = make_layout(), device_of(where)
    cache = filled(layout, 5, where)
    tables = torch.tensor([[4, bad, 2], [1, 0, bad]], dtype=torch.int32, device=device)
    out = tuple(torch.full((17, 3, 10), float("nan"), device=device) for _ in range(2))
    error = gather(where, cache, tables, [10, 7], layout, out=out)[-1]
    safe = torch.tensor([[4, 0, 2], [1, 0, 0]], dtype=torch.int32, device=device)
    for rows, want in zip(out, reference.gather_cache(cache, safe, torch.tensor([10, 7]), layout), strict=True):
        want[4:8] = float("nan")
        assert torch.equal(bits(rows), bits(want))
    check_reported(where, error, 2, "block id")


def check_reported(where, error, bit, match):
    if where == "interpreter":
        assert error == bit
        return
    with pytest.raises(ValueError, match=match):
        ops.check_device()
    ops.check_device()  # it is reported once


# --- torch operations, where Triton is not installed -----------------------------------------------------------------


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(token_ops_cuda, "_has_triton", lambda: False)


def test_reshape_by_torch(without_triton):
    torch.manual_seed(13)
    layout = make_layout()
    cache, memory = poisoned(layout, 5)
    slots = random_slots(9, 5, layout)
    key, value = (random_rows(len(slots), layout, size) for size in (10, 6))
    before, bound = [view.clone() for view in memory], ops.BoundCache(cache, layout)
    for bad in (-2, 20):
        with pytest.raises(ValueError, match=f"got {bad}"):
            token_ops_cuda.reshape_and_cache(key, value, bound, slots.index_fill(0, torch.tensor(3), bad))
    assert all(torch.equal(view, old) for view, old in zip(memory, before, strict=True))
    token_ops_cuda.reshape_and_cache(key, value, bound, slots)
    got = [view.clone() for view in memory]
    for view, old in zip(memory, before, strict=True):
        view.copy_(old)
    ops.reshape_and_cache(key, value, cache, slots, layout)
    assert all(torch.equal(view, want) for view, want in zip(got, memory, strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_gather_by_torch(without_triton, padded):
    torch.manual_seed(14)
    layout, lengths, starts = make_layout(), [5, 0, 8], [3, 2, 0]
    cache, tables = filled(layout, 12), random_tables(lengths, 12, layout, starts)
    shape = [3, 9, 3] if padded else [13, 3]
    outs = [[torch.full([*shape, size], float("nan")) for size in (10, 6)] for _ in range(2)]
    token_ops_cuda.gather_cache(ops.BoundCache(cache, layout), tables, lengths, starts, outs[0])
    ops.gather_cache(cache, tables, lengths, layout, starts, outs[1])
    assert all(torch.equal(bits(rows), bits(want)) for rows, want in zip(*outs, strict=True))
    tables[2, 1] = 12
    with pytest.raises(ValueError, match="got 12"):
        token_ops_cuda.gather_cache(ops.BoundCache(cache, layout), tables, lengths, starts, outs[0])
    assert all(torch.equal(bits(rows), bits(want)) for rows, want in zip(*outs, strict=True))


def test_the_lack_of_triton_is_told_once(monkeypatch):
    monkeypatch.setattr(token_ops_cuda.importlib.util, "find_spec", lambda name: None)
    token_ops_cuda._has_triton.cache_clear()
    with pytest.warns(UserWarning, match="triton is not installed"):
        assert not token_ops_cuda._has_triton()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not token_ops_cuda._has_triton()
    token_ops_cuda._has_triton.cache_clear()


def test_a_cache_that_is_nowhere_is_refused():
    layout = make_layout()
    cache, rows = torch.empty(layout.shape(2), device="meta"), torch.empty(1, 3, 10, device="meta")
    with pytest.raises(ValueError, match="CPU or a CUDA"):
        ops.reshape_and_cache(rows, rows, cache, torch.empty(1, dtype=torch.int64, device="meta"), layout)
    with pytest.raises(ValueError, match="CPU or a CUDA"):
        ops.gather_cache(cache, torch.empty(1, 1, dtype=torch.int32, device="meta"), [1], layout)


def test_check_device_takes_a_cuda_device():
    with pytest.raises(ValueError, match="must be a CUDA device, got cpu"):
        ops.check_device("cpu")


@pytest.mark.parametrize(
    "index, wrong", [(2, -1), (2, -(2**63)), (3, 0), (3, -1), (4, -1), (4, 2**31), (5, 0), (5, -1)]
)
def test_native_counts_are_checked(index, wrong):
    rows = torch.zeros(1, 1, 4)
    slots = torch.tensor([0])
    part = (rows.data_ptr(), 16, 16, 16, 16, 4, 4, 0, 0, 0, 0, rows.data_ptr(), 16, 16, 3, 0, 4, 0, 0)
    args = [[part], slots.data_ptr(), 1, 1, 1, 1, 1]
    _C.reshape_and_cache(*args)
    args[index] = wrong
    with pytest.raises(ValueError, match="num_|block_size"):
        _C.reshape_and_cache(*args)


@pytest.mark.parametrize(
    "place, wrong", [(5, 0), (5, -1), (6, 0), (6, 3), (14, 4), (14, -1), (15, 1), (15, 9), (16, 0)]
)
def test_native_parts_are_checked(place, wrong):
    """A run of no elements never ended; an unknown kind read past a table."""
    rows, slots = torch.zeros(1, 1, 4), torch.tensor([0])
    part = [rows.data_ptr(), 16, 16, 16, 16, 4, 4, 0, 0, 0, 0, rows.data_ptr(), 16, 16, 3, 0, 4, 0, 0]
    part[place] = wrong
    with pytest.raises(ValueError, match="must be"):
        _C.reshape_and_cache([tuple(part)], slots.data_ptr(), 1, 1, 1, 1, 1)
