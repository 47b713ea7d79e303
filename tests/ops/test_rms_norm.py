"""Root mean square norms, as Llama's and Gemma's models compute them."""

import pytest
import torch

from kvpage import _C, ops
from kvpage.ops.args.tokens import ROW_TYPES

DTYPES = tuple(ROW_TYPES)
KINDS = {"llama": (0.0, True), "gemma": (1.0, False), "olmo": (0.0, False)}
SIZES = (0, 1, 7, 8, 15, 16, 17, 33, 128, 513)
STEP = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_close(found, expected, dtype):
    expected = expected.double()
    assert ((found.double() - expected).abs() <= STEP[dtype] * (1 + expected.abs())).all()


def native(x, weight, offset, rounds, kernel, residual=None, num_threads=1):
    """The norm and the sum, into poisoned memory that is wider than they are."""
    item, (num_rows, size) = x.element_size(), x.shape
    out, total = (torch.full((num_rows + 1, size + 3), 7.0, dtype=x.dtype) for _ in range(2))

    def place(rows):
        return (0, 0) if rows is None else (rows.data_ptr(), rows.stride(0) * item)

    places = place(x), place(residual), place(None if residual is None else total), place(out)
    order = 0 if rounds else 1
    args = (num_rows, size), ROW_TYPES[x.dtype], EPS, offset, order, num_threads
    _C.rms_norm(*places, weight.data_ptr(), *args, kernel=kernel)
    for written in (out, total):
        assert (written[num_rows:] == 7).all() and (written[:, size:] == 7).all()
    return out[:num_rows, :size], total[:num_rows, :size]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", _C.norm_kernels())
def test_every_size_equals_the_reference(kernel, dtype, kind):
    offset, rounds = KINDS[kind]
    for size in SIZES:
        x, residual = (torch.randn(3, size).to(dtype) for _ in range(2))
        weight = torch.randn(size).to(dtype)
        found, _ = native(x, weight, offset, rounds, kernel)
        assert_close(found, ops.reference.rms_norm(x, weight, EPS, offset, rounds), dtype)
        found, total = native(x, weight, offset, rounds, kernel, residual)
        assert torch.equal(total, x + residual)
        assert_close(found, ops.reference.rms_norm(x + residual, weight, EPS, offset, rounds), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_in_every_batch(dtype):
    x, weight = torch.randn(700, 300).to(dtype), torch.randn(300).to(dtype)
    alone = torch.cat([native(row[None], weight, 0.0, True, "")[0] for row in x])
    order = torch.randperm(700)
    for num_threads in (1, 2, 3):
        assert torch.equal(native(x[order], weight, 0.0, True, "", num_threads=num_threads)[0], alone[order])


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_it_is_the_norm_of_transformers(kind):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm
    norm = (llama if kind == "llama" else gemma)(96, eps=EPS).to(torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 9, 96).to(torch.bfloat16)
    with torch.no_grad():
        found, expected = ops.rms_norm(x, norm.weight, EPS, *KINDS[kind]), norm(x)
    assert (found != expected).sum() <= 2  # the order of the sum may turn a rounding
    assert_close(found, expected, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_doors_take_any_strides(dtype, kind):
    x, residual = (torch.randn(4, 6, 40).to(dtype)[:, ::2, 3:35] for _ in range(2))
    weight = torch.randn(64).to(dtype)[::2]
    step = torch.float32 if dtype == torch.float64 else dtype
    expected = ops.reference.rms_norm(x, weight, EPS, *KINDS[kind])
    assert_close(ops.rms_norm(x, weight, EPS, *KINDS[kind]), expected, step)
    found, total = ops.add_rms_norm(x, residual, weight, EPS, *KINDS[kind])
    assert torch.equal(total, x + residual)
    assert_close(found, ops.reference.rms_norm(total, weight, EPS, *KINDS[kind]), step)
    out = x.clone()
    assert ops.rms_norm(out, weight, EPS, *KINDS[kind], out=out) is out
    assert_close(out, expected, step)


def test_gradients_go_through_torch():
    weight = torch.nn.Parameter(torch.randn(16))
    ops.rms_norm(torch.randn(3, 16), weight, EPS).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


@pytest.mark.parametrize("wrong", [2, [1.0] * 16, "x"])
@pytest.mark.parametrize("place", ["x", "weight", "residual", "out"])
def test_what_is_no_tensor_is_a_type_error(place, wrong):
    args = {"x": torch.randn(3, 16), "weight": torch.randn(16)}
    with pytest.raises(TypeError, match=f"{place} must be a torch.Tensor"):
        if place == "residual":
            ops.add_rms_norm(**args, eps=EPS, residual=wrong)
        else:
            ops.rms_norm(**args | {place: wrong}, eps=EPS)


def test_what_is_refused():
    x, weight = torch.randn(3, 16), torch.randn(16)
    with pytest.raises(ValueError, match=r"weight must be \[size\]"):
        ops.rms_norm(x, weight[:15], EPS)
    with pytest.raises(ValueError, match="residual must be"):
        ops.add_rms_norm(x, x[:2], weight, EPS)
    with pytest.raises(ValueError, match="out must be"):
        ops.rms_norm(x, weight, EPS, out=torch.empty(3, 15))
    with pytest.raises(ValueError, match="order must be 0 or 1, got 2"):
        _C.rms_norm((0, 0), (0, 0), (0, 0), (0, 0), 0, (0, 0), 0, EPS, 0.0, 2, 1)


def test_tensors_without_memory_and_numbers_that_are_none_are_refused():
    """Torch would read them where there is nothing: that ends the process."""
    bare = torch.ones(2, 3)
    bare.untyped_storage().resize_(0)
    x, weight, out = torch.ones(2, 3), torch.ones(3), torch.full((2, 3), 9.0)
    with pytest.raises(ValueError, match=r"x must have memory for its elements, got shape \(2, 3\) and no memory"):
        ops.rms_norm(bare, weight, 1e-6, out=out)
    with pytest.raises(ValueError, match="residual must have memory"):
        ops.add_rms_norm(x, bare, weight, 1e-6)
    for eps, error in ((10**400, ValueError), ("1", TypeError), (None, TypeError), (x, TypeError)):
        for rows in (x, x.double()):
            with pytest.raises(error, match="^eps must"):
                ops.rms_norm(rows, weight.to(rows.dtype), eps)
    assert (out == 9).all()
