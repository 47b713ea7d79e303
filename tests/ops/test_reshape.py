"""reshape_and_cache against its reference, bit by bit, over every byte of the destination."""

import pytest
import torch
from support.kernel_calls import ON_ALL, device_of, reshape
from support.row_caches import (
    ALL_LAYOUTS,
    BLOCK,
    make_layout,
    negated,
    poisoned,
    random_rows,
    random_slots,
    two_threads,  # noqa: F401, a fixture for all that is here
)

from kvpage import _C, ops
from kvpage.ops import reference


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


@ON_ALL
@ALL_LAYOUTS
def test_reshape_writes_what_the_reference_writes(where, backend, kv_layout, layer_layout):
    torch.manual_seed(0)
    layout = make_layout(backend, kv_layout, layer_layout)
    for num_tokens in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 23):
        slots = random_slots(num_tokens, 7, layout)
        key, value = (random_rows(len(slots), layout, layout.head_size) for _ in range(2))
        check_reshape(key, value, slots, layout, 7, where)


@ON_ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, size, block", [(1, 1, 1), (2, 8, 16), (5, 80, 3), (8, 128, 16)])
def test_reshape_of_any_sizes(where, dtype, heads, size, block):
    torch.manual_seed(1)
    layout = make_layout(heads=heads, size=size, dtype=dtype, block=block)
    slots = random_slots(9, 40, layout)
    key, value = (random_rows(len(slots), layout, size) for _ in range(2))
    check_reshape(key, value, slots, layout, 40, where)


@ON_ALL
@ALL_LAYOUTS
def test_reshape_leaves_the_rest_of_a_row_where_sizes_are_smaller(where, backend, kv_layout, layer_layout):
    torch.manual_seed(2)
    layout = make_layout(backend, kv_layout, layer_layout)
    slots = random_slots(11, 5, layout)
    key, value = random_rows(len(slots), layout, 6), random_rows(len(slots), layout, 1)
    check_reshape(key, value, slots, layout, 5, where)


@ON_ALL
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


@ON_ALL
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


@pytest.mark.parametrize(
    "index, wrong", [(2, -1), (2, -(2**63)), (3, 0), (3, -1), (4, -1), (4, 2**31), (5, 0), (5, -1)]
)
def test_native_counts_are_checked(index, wrong):
    rows = torch.zeros(1, 1, 4)
    slots = torch.tensor([0])
    part = (_C.KVPart(rows.data_ptr(), (4, 4, 4, 4, 1), 4, 4), rows.data_ptr(), 16, 16, 3, 0, 4, 0, 0)
    args = [[part], slots.data_ptr(), 1, 1, 1, 1, 1]
    _C.reshape_and_cache(*args)
    args[index] = wrong
    with pytest.raises(ValueError, match="num_|block_size"):
        _C.reshape_and_cache(*args)


WRONG_BLOCKS = [("run_size", 0), ("run_size", -1), ("element_bytes", 0), ("element_bytes", 3)]


@pytest.mark.parametrize("place, wrong", [*WRONG_BLOCKS, (3, 4), (3, -1), (4, 1), (4, 9), (5, 0)])
def test_native_parts_are_checked(place, wrong):
    """A run of no elements never ended; an unknown kind read past a table."""
    rows, slots = torch.zeros(1, 1, 4), torch.tensor([0])
    blocks = {"data": rows.data_ptr(), "strides": (4, 4, 4, 4, 1), "run_size": 4, "element_bytes": 4}
    numbers = [rows.data_ptr(), 16, 16, 3, 0, 4, 0, 0]
    if isinstance(place, str):
        blocks[place] = wrong
    else:
        numbers[place] = wrong
    with pytest.raises(ValueError, match="must (both )?be"):
        _C.reshape_and_cache([(_C.KVPart(**blocks), *numbers)], slots.data_ptr(), 1, 1, 1, 1, 1)
