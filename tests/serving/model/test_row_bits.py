"""RowBits: each operator's result for a row has the same bits alone, among others, and at any place of them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kvpage.checks.errors import OptionError
from kvpage.serving.model.native.bits.functional_forward import Functional
from kvpage.serving.model.native.bits.row_bits import RowBits
from kvpage.serving.model.native.torch_threads import TorchThreads

SIZES = 1, 2, 3, 7, 16, 31, 64, 65
NUMS = 1, 2, 5, 15, 16, 17, 33, 64, 67
DTYPES = torch.float32, torch.bfloat16, torch.float16
MOST = max(NUMS)

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "cos": torch.cos,
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "pow": lambda x: (x * x + 1).pow(1.7),
    "square": lambda x: x.pow(2),
    "of every other": lambda x: F.silu(x[:, ::2]),
    "of columns": lambda x: F.silu(x.t()).t(),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean of columns": lambda x: x.t().contiguous().t().mean(-1, keepdim=True),
    "sum of parts": lambda x: torch.stack([x, x * 1.1, x * 0.3], 1).sum(1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "addcmul": lambda x: torch.addcmul(x, x.flip(-1), x * 0.3),
}


def mode() -> RowBits:
    return RowBits("Model", TorchThreads())


def rows(num: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (2 * torch.randn(num, size, generator=torch.Generator().manual_seed(size))).to(dtype)


def check(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Assert that all batches give the bits of each row alone, and what torch gives by itself up to rounding."""
    bits = mode()
    with torch.no_grad(), bits.threads.limited(), bits:
        alone = torch.cat([function(x[row : row + 1].clone()) for row in range(len(x))])
        batches = {num: (function(x[:num].clone()), function(x[-num:].clone())) for num in NUMS}
    for num, (first, last) in batches.items():
        assert torch.equal(first, alone[:num]) and torch.equal(last, alone[-num:]), num
    torch.testing.assert_close(alone.float(), function(x).float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_is_that_of_itself_alone(name: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        check(FUNCTIONS[name], rows(MOST, size, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True])
def test_products(dtype: torch.dtype, turned: bool) -> None:
    for size in (1, 16, 33):
        matrix = rows(size, 19, dtype) if not turned else rows(19, size, dtype).t()
        bias = rows(1, 19, dtype)[0]
        x = rows(MOST, size, dtype)
        check(lambda x, matrix=matrix: x @ matrix, x)
        check(lambda x, matrix=matrix, bias=bias: torch.addmm(bias, x, matrix), x)
        check(lambda x, matrix=matrix: torch.bmm(x.unsqueeze(0), matrix.unsqueeze(0))[0], x)
        check(lambda x, matrix=matrix, bias=bias: F.linear(x.unsqueeze(0), matrix.t(), bias)[0], x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True])
def test_grouped_products(dtype: torch.dtype, turned: bool) -> None:
    matrices = torch.stack([rows(16, 24, dtype) * scale for scale in (1.0, -0.5, 2.0)])
    matrices = matrices if turned else matrices.transpose(1, 2).contiguous().transpose(1, 2)
    x = rows(9, 16, dtype)
    ends = torch.tensor([[4, 4, 9], [1, 1, 1], [0, 0, 1]], dtype=torch.int32)
    bits = mode()
    with torch.no_grad(), bits:
        found = torch._grouped_mm(x, matrices, offs=ends[0])
        apart = [torch._grouped_mm(x[[row]], matrices, offs=ends[1 if row < 4 else 2]) for row in range(9)]
    assert torch.equal(found, torch.cat(apart))
    expected = torch.cat([x[:4] @ matrices[0], x[4:] @ matrices[2]])
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert bits.replaced == {"_grouped_mm"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: F.conv2d(x[None, None], x[None, None]), "aten::convolution of another form"),
        (lambda x: F.conv1d(x[None], x[None], stride=2), "aten::convolution of another form"),
        (lambda x: x.cumsum(0), "aten::cumsum of floats"),
        (lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3), "aten::_scaled_dot_product"),
        (lambda x: x.softmax(0), "along axis 0"),
        (lambda x: torch.add(x, x, alpha=0.3), "with alpha=0.3"),
        (lambda x: x.index_add(0, torch.arange(4), x, alpha=0.3), "with alpha=0.3"),
        (lambda x: x // x, "aten::floor_divide of floats"),
        (lambda x: torch.div(x, 3, rounding_mode="floor"), "aten::div of floats"),
        (lambda x: x.double() @ x.double(), "of torch.float64"),
        (lambda x: torch.addmm(x, x, x, alpha=2), "with alpha"),
        (lambda x: x.pow(x), "of several tensors"),
        (lambda x: torch.fft.fft(x), "aten::_fft_r2c"),
    ],
)
def test_other_operators_are_refused_by_name(call: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    with pytest.raises(OptionError, match=f"^same_bits must be False for Model: it calls .*{words}"), mode():
        call(torch.eye(4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_groups", [1, 2, 12])
def test_a_token_of_a_convolution_is_that_of_its_window_alone(num_groups: int, dtype: torch.dtype) -> None:
    columns, weight = (rows(*size, dtype) for size in ((12, 30), (12, 12 // num_groups * 4)))
    weight, bias = weight.view(12, -1, 4), rows(1, 12, dtype)[0]
    expected = F.conv1d(columns[None], weight, bias, padding=3, groups=num_groups)[0]
    with torch.no_grad(), mode():
        found = F.conv1d(columns[None], weight, bias, padding=3, groups=num_groups)[0]
        alone = [F.conv1d(columns[None, :, at : at + 4], weight, bias, groups=num_groups)[0] for at in range(27)]
    assert torch.equal(found[:, 3:30], torch.cat(alone, 1))
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_quotients_of_integers_and_of_floats_are_as_torch_has_them() -> None:
    with mode():
        floored, quotients = torch.arange(7) // 3, torch.ones(5) / 4
    assert floored.tolist() == [0, 0, 0, 1, 1, 1, 2] and quotients.tolist() == [0.25] * 5


def test_it_is_left_out_where_torch_may_compute_as_it_comes() -> None:
    bits, x = mode(), torch.ones(3, 64)
    bits.checked_version = 1
    with bits:
        F.silu(x), x.pow(2).mean(-1), x.cos()
    assert not bits.is_needed(1) and bits.is_needed(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert bits.is_needed(1)
    with bits:
        F.silu(x[:, :5])
    assert bits.is_needed(1)


# --- parts of mixers --------------------------------------------------------------------------------------------------


def test_a_mixer_is_looked_at_in_the_parts_that_need_it() -> None:
    bits = mode()

    def mixer() -> list[bool]:
        """Return whether each of three parts is looked at; the second replaces an operator."""
        active = []
        with bits.of_mixer():
            for part in range(3):
                active.append(torch._C._len_torch_dispatch_stack() > 0)
                F.silu(torch.ones(7 if part == 1 else 64))
                if part < 2:
                    bits.next_part()
        return active

    with torch.no_grad():
        with bits:
            assert mixer() == [True, True, True]
        assert (bits.replaced, {part for part, names in bits.replaced_in_mixers.items() if names}) == (set(), {1})
        assert mixer() == [False, True, False]
        with bits:
            F.silu(torch.ones(7))
        assert bits.replaced == {"silu"}


def test_a_mixer_that_raises_leaves_no_mode() -> None:
    bits = mode()
    bits.replaced_in_mixers[1].add("silu")
    with pytest.raises(ZeroDivisionError), bits.of_mixer():
        bits.next_part()
        assert torch._C._len_torch_dispatch_stack() == 1
        raise ZeroDivisionError
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_functions_by_name_need_no_mode(name: str, dtype: torch.dtype) -> None:
    function = getattr(Functional(TorchThreads()), name)
    x = rows(MOST, 7, dtype)
    with torch.no_grad():
        alone = torch.cat([function(row[None]) for row in x])
        for num in NUMS:
            assert torch.equal(function(x[:num]), alone[:num])
        torch.testing.assert_close(alone, getattr(F, name)(x), rtol=2e-2, atol=2e-2)
        assert torch.equal(Functional(TorchThreads()).relu(x), x.relu())
