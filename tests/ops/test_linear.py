"""Products of rows with weights: right, and the same for a row whatever comes with it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvpage import _C, ops
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.cpu.linear import ACTIVATIONS

DTYPES = tuple(ROW_TYPES)
KERNELS = _C.linear_kernels()
PAIRS = "pairs_model"  # the loops of AVX512_BF16 in plain C++, on any machine
TILES = "amx_model"  # those of AMX over tiles in plain C++
LEFT_OUT = {PAIRS: {torch.float16}, TILES: {torch.float32, torch.float16}}  # what such a model does not change
CASES = [(kernel, dtype) for kernel in KERNELS for dtype in DTYPES if dtype not in LEFT_OUT.get(kernel, ())]
STEP = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of a rounding, with some of fp32's sums
SIZES = (0, 1, 3, 15, 16, 17, 64, 511, 512, 513, 1100)  # K: around a vector, and around a block of 512
COLUMNS = (0, 1, 3, 4, 5, 63, 64, 65, 130)  # N: around a tile of 4 and a panel of 64
ROWS = (0, 1, 2, 3, 4, 7, 96, 97, 191)  # M: around a tile of 3 or 6 and a block of 96; 191 are 31 tiles of 6 and 5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def weight_of(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_rows, size) / max(size, 1) ** 0.5).to(dtype)


def native(x, weight, bias=None, up=None, activation=0, kernel="", num_threads=1, poison=7.0):
    """The native call with the kernel of an instruction set, into poisoned memory that is wider than the result."""
    item, num_columns = x.element_size(), weight.shape[0]
    out = torch.full((len(x) + 1, num_columns + 3), poison, dtype=x.dtype)

    def place(rows):
        return (0, 0) if rows is None else (rows.data_ptr(), rows.stride(0) * item)

    sizes, address = (len(x), num_columns, x.shape[1]), 0 if bias is None else bias.data_ptr()
    types = ROW_TYPES[x.dtype], activation, num_threads
    _C.linear(place(x), place(weight), place(up), address, place(out), sizes, *types, kernel=kernel)
    assert (out[len(x) :] == poison).all() and (out[:, num_columns:] == poison).all()
    return out[: len(x), :num_columns]


def assert_close(found, expected, dtype):
    expected = expected.double()
    assert ((found.double() - expected).abs() <= STEP[dtype] * (1 + expected.abs())).all()


@pytest.mark.parametrize("kernel, dtype", CASES, ids=str)
def test_every_size_against_double(kernel, dtype):
    for size in SIZES:
        for num_rows, num_columns in ((5, 70), *((m, 6) for m in ROWS), *((2, n) for n in COLUMNS)):
            x, weight = torch.randn(num_rows, size).to(dtype), weight_of(num_columns, size, dtype)
            bias = torch.randn(num_columns).to(dtype)
            expected = x.double() @ weight.double().T
            assert_close(native(x, weight, kernel=kernel), expected, dtype)
            assert_close(native(x, weight, bias, kernel=kernel), expected + bias.double(), dtype)


@pytest.mark.parametrize("kernel, dtype", CASES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_against_double(activation, kernel, dtype):
    number, function = ACTIVATIONS[activation]
    for num_rows, num_columns, size in ((1, 1, 1), (2, 31, 17), (7, 33, 513), (3, 64, 1100), (97, 5, 64), (4, 3, 0)):
        x = torch.randn(num_rows, size).to(dtype)
        gate, up = 4 * weight_of(num_columns, size, dtype), weight_of(num_columns, size, dtype)
        expected = function(x.double() @ gate.double().T) * (x.double() @ up.double().T)
        assert_close(native(x, gate, up=up, activation=number, kernel=kernel), expected, dtype)


@pytest.mark.parametrize("kernel, dtype", CASES, ids=str)
def test_a_row_is_the_same_in_every_batch(kernel, dtype):
    """Every number of rows from 1 to 70, permuted, with 1 to 3 threads: bit by bit."""
    size, num_columns = 540, 67
    x, weight, up = torch.randn(70, size).to(dtype), *(weight_of(num_columns, size, dtype) for _ in range(2))
    alone = torch.cat([native(row[None], weight, kernel=kernel) for row in x])
    gated = torch.cat([native(row[None], weight, up=up, activation=1, kernel=kernel) for row in x])
    for num_rows in range(1, 71):
        order = torch.randperm(70)[:num_rows]
        rows, num_threads = x[order], 1 + num_rows % 3
        assert torch.equal(native(rows, weight, kernel=kernel, num_threads=num_threads), alone[order])
        found = native(rows, weight, up=up, activation=1, kernel=kernel, num_threads=num_threads)
        assert torch.equal(found, gated[order])


@pytest.mark.parametrize("kernel, dtype", CASES, ids=str)
def test_whole_numbers_are_exact(kernel, dtype):
    """Their sums need no rounding: so each product is added, and once."""
    for size in SIZES:
        for num_rows in (1, 2, 3, 7, 13, 50):
            x, weight = (torch.randint(-3, 4, (n, size)).to(dtype) for n in (num_rows, 9))
            assert torch.equal(native(x, weight, kernel=kernel), (x.double() @ weight.double().T).to(dtype))


def test_pairs_are_added_as_the_instruction_does():
    """The odd product first, each sum rounded; subnormal numbers are zeros."""
    x, weight = torch.zeros(1, 64).bfloat16(), torch.ones(1, 64).bfloat16()
    x[0, 0], x[0, 33], x[0, 32] = 2.0**24, 1.0, -(2.0**24)  # one sum's: 2**24 + 1 is rounded to 2**24
    assert native(x, weight, kernel=PAIRS).item() == 0
    tiny = torch.full((1, 1), 2.0**-130).bfloat16()
    large = torch.full((1, 1), 2.0**20).bfloat16()
    assert native(tiny, large, kernel=PAIRS).item() == 0 and native(tiny, large, kernel="base").item() == 2.0**-110


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype):
    x, weight = torch.randn(200, 256).to(dtype), weight_of(2000, 256, dtype)
    alone = native(x, weight)
    for num_threads in (2, 3, 9):
        assert torch.equal(native(x, weight, num_threads=num_threads), alone)
    assert torch.equal(native(x[150:151], weight, num_threads=3), alone[150:151])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nans_stay_in_their_rows(dtype):
    x, weight = torch.randn(9, 40).to(dtype), weight_of(9, 40, dtype)
    x[3, 39], x[5, 0], weight[2, 38] = float("inf"), float("nan"), float("inf")
    found, expected = native(x, weight), x.float() @ weight.float().T
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())


def test_strides_of_every_argument():
    x, weight = torch.randn(6, 50)[:, 3:43], torch.randn(20, 90)[::2, 7:47]
    bias, out = torch.randn(20)[::2], torch.full((6, 30), 7.0)
    expected = F.linear(x, weight, bias)
    assert ops.linear(x, weight, bias, out=out[:, 5:15]).data_ptr() == out[:, 5:15].data_ptr()
    torch.testing.assert_close(out[:, 5:15], expected)
    assert (out[:, :5] == 7).all() and (out[:, 15:] == 7).all()
    for given in (x.T.contiguous().T, x.expand(2, 6, 40), x.view(2, 3, 40), x[0]):
        torch.testing.assert_close(ops.linear(given, weight, bias), F.linear(given, weight, bias))
    torch.testing.assert_close(ops.linear(x, weight.T.contiguous().T, bias), expected)
    columns = torch.empty(10, 6).T
    assert ops.linear(x, weight, bias, out=columns) is columns
    torch.testing.assert_close(columns, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_doors_equal_the_reference(activation, dtype):
    x = torch.randn(2, 5, 48).to(dtype)
    gate, up = weight_of(24, 48, dtype), weight_of(24, 48, dtype)
    assert_close(ops.linear(x, gate), ops.reference.linear(x, gate), dtype)
    assert_close(ops.gated_linear(x, gate, up, activation), ops.reference.gated_linear(x, gate, up, activation), dtype)
    out = torch.empty(2, 5, 24, dtype=dtype)
    assert ops.gated_linear(x, gate, up, activation, out=out) is out
    assert torch.equal(out, ops.gated_linear(x, gate, up, activation))


def test_a_changed_weight_is_seen_at_once():
    x, weight = torch.randn(3, 16), torch.randn(4, 16)
    before = ops.linear(x, weight)
    weight.mul_(2)
    torch.testing.assert_close(ops.linear(x, weight), 2 * before)


def test_torch_computes_what_the_core_does_not():
    x, weight = torch.randn(3, 16), torch.randn(4, 16)
    double = ops.linear(x.double(), weight.double())
    assert torch.equal(double, F.linear(x.double(), weight.double()))
    learned = torch.nn.Parameter(weight)
    assert ops.linear(x, learned).grad_fn is not None
    with torch.no_grad():
        assert ops.linear(x, learned).grad_fn is None
    ops.gated_linear(x, learned, learned, "silu").sum().backward()
    assert learned.grad is not None and learned.grad.abs().sum() > 0
    gated = ops.gated_linear(x.double(), weight.double(), weight.double(), "silu")
    products = F.linear(x.double(), weight.double())
    assert torch.equal(gated, F.silu(products) * products)


def test_compiled_code_takes_torchs_product():
    x, weight = torch.randn(3, 16), torch.randn(4, 16)
    compiled = torch.compile(lambda a: ops.linear(a, weight) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), F.linear(x, weight) + 1)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, w: ops.linear(x, w, out=torch.empty(3, 5)), r"out must be \(3, 4\) of torch.float32"),
        (lambda x, w: ops.linear(x, w, out=torch.empty(3, 4).half()), "got .* of torch.float16"),
        (lambda x, w: ops.linear(x, w, out=torch.empty(3, 1).expand(3, 4)), "out must have memory for each"),
        (lambda x, w: ops.gated_linear(x, w, w, "relu"), "activation must be one of silu, gelu_tanh, got 'relu'"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 16), torch.randn(4, 16))


def test_shapes_that_do_not_fit_are_torchs_errors():
    with pytest.raises(RuntimeError):
        ops.linear(torch.randn(3, 16), torch.randn(4, 15))
    with pytest.raises(RuntimeError):
        ops.linear(torch.randn(3, 16), torch.randn(4, 16).double())


@pytest.mark.parametrize("place, number", [("type", 3), ("activation", 3), ("rows", -1)])
def test_the_native_call_refuses_numbers_out_of_range(place, number):
    numbers = {"type": 0, "activation": 0, "rows": 1, place: number}
    sizes = (numbers["rows"], 1, 1)
    with pytest.raises(ValueError, match="must be"):
        _C.linear((0, 0), (0, 0), (0, 0), 0, (0, 0), sizes, numbers["type"], numbers["activation"], 1)


def sums_by_tiles(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The operation of TDPBF16PS in Intel's manual, over tiles of 32 numbers: two sums, of even and of odd k."""
    total = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, x.shape[1], 32):
        sums = np.zeros((2, len(x), len(weight)), np.float32)
        for k in range(begin, min(begin + 32, x.shape[1])):
            sums[k % 2] += np.outer(x[:, k], weight[:, k])  # these products are exact in fp32
        total += sums[0] + sums[1]
    return total


@pytest.mark.parametrize("size", (1, 2, 33, 64, 700))
def test_tiles_add_up_in_the_order_of_the_manual(size):
    """Numbers of widely different sizes that cancel each other: any other order has another result."""
    torch.manual_seed(size)
    x, weight = (torch.randn(35, size) * 2.0 ** torch.randint(-12, 12, (35, size)) for _ in range(2))
    x, weight = x.bfloat16(), weight[:33].bfloat16()
    half = size // 2
    weight[:, half : 2 * half] = -weight[:, :half]
    x[:, half : 2 * half] = x[:, :half]
    sums = torch.from_numpy(sums_by_tiles(x.float().numpy(), weight.float().numpy()))
    assert torch.equal(native(x, weight, kernel=TILES), sums.bfloat16())


@pytest.mark.parametrize("weight, expected", [(2.0**-130, 0.0), (2.0**-126, 2.0**-26), (2.0**-127, 0.0)])
def test_subnormal_numbers_are_zeros_to_tiles(weight, expected):
    x, weight = torch.full((2, 1), 2.0**100).bfloat16(), torch.full((3, 1), weight).bfloat16()
    assert (native(x, weight, kernel=TILES) == expected).all()


def test_tiles_are_taken_or_there_is_a_reason():
    name, refusal = _C.product_tiles()
    assert ("amx" in KERNELS) == name.startswith("amx") == (refusal == "")


def test_which_types_are_fast():
    assert not ops.has_fast_linear(torch.float64) and not ops.has_fast_linear(torch.int8)
    assert ops.has_fast_linear(torch.float32) == ("avx2" in KERNELS)


def test_tensors_without_memory_are_refused():
    """Torch would read them where there is nothing: that ends the process."""

    def without_memory(shape):
        made = torch.ones(shape)
        made.untyped_storage().resize_(0)
        return made

    x, weight, out = torch.ones(2, 3), torch.ones(4, 3), torch.full((2, 4), 9.0)
    with pytest.raises(ValueError, match=r"x must have memory for its elements, got shape \(2, 3\) and no memory"):
        ops.linear(without_memory((2, 3)), weight, out=out)
    with pytest.raises(ValueError, match="weight must have memory"):
        ops.linear(x, torch.nn.Parameter(without_memory((4, 3)), requires_grad=False), out=out)
    with pytest.raises(ValueError, match="bias must have memory"):
        ops.linear(x, weight, without_memory((4,)), out)
    with pytest.raises(ValueError, match="up must have memory"):
        ops.gated_linear(x, weight, without_memory((4, 3)), "silu", out)
    assert (out == 9).all()
