"""Products and norms where torch does more with a call than compute it, and results that lie among the arguments."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from kvpage.ops import gated_linear, linear, rms_norm

X, W = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)).unbind(0)
W = torch.cat([W] * 8)


def test_transforms_of_torch() -> None:
    assert torch.allclose(torch.func.vmap(lambda row: linear(row, W))(X), F.linear(X, W), atol=1e-4)
    found = torch.func.jvp(lambda x: linear(x, W), (X,), (X,))
    assert torch.allclose(found[1], F.linear(X, W), atol=1e-4)
    assert torch.func.vmap(lambda row: rms_norm(row, W[0], 1e-6))(X).shape == X.shape


def test_forward_gradients_are_not_lost() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        results = linear(dual, W), gated_linear(dual, W, W, "silu"), rms_norm(dual, W[0], 1e-6)
        assert all(forward_ad.unpack_dual(result).tangent is not None for result in results)


def test_autocast_casts() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(X, W).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore")
def test_a_trace_has_the_product() -> None:
    traced = torch.jit.trace(lambda x: linear(x, W), X)
    assert torch.allclose(traced(2 * X), F.linear(2 * X, W), atol=1e-4)


def test_results_among_the_arguments() -> None:
    """Rows enough that later ones are read after earlier results are written, were there no copy."""
    x = torch.randn(70_000, 64, generator=torch.Generator().manual_seed(2))
    w, weight = x[:64].clone(), x[0].clone()
    room = x.new_zeros(70_001, 64)
    for compute in (lambda x, out=None: linear(x, w, out=out), lambda x, out=None: rms_norm(x, weight, 1e-6, out=out)):
        expected = compute(x)
        for first, to in ((0, 1), (1, 0), (0, 0)):
            room[first : first + 70_000] = x
            out = room[to : to + 70_000]
            assert compute(room[first : first + 70_000], out=out) is out
            assert torch.equal(out, expected)
    square = w.clone()
    assert torch.equal(linear(square, square, out=square), linear(w, w))
    square = w.clone()
    assert torch.equal(gated_linear(square, w, w, "silu", out=square), gated_linear(w, w, w, "silu"))


def test_a_result_takes_no_gradient() -> None:
    out = torch.zeros(8, 64, requires_grad=True)
    for call in (lambda: linear(X, W, out=out), lambda: rms_norm(X, W[0], 1e-6, out=out)):
        with pytest.raises(ValueError, match="out must not require a gradient"):
            call()
    assert not out.detach().any()


CALLS_WITH_OUT = {
    "linear": lambda out: linear(X, W, out=out),
    "gated_linear": lambda out: gated_linear(X, W, W, "silu", out=out),
    "rms_norm": lambda out: rms_norm(X, W[0], 1e-6, out=out),
}


@pytest.mark.parametrize("name", CALLS_WITH_OUT)
def test_a_backward_pass_notices_that_a_saved_result_was_overwritten(name: str) -> None:
    out, scale = torch.zeros_like(X), torch.ones(64, requires_grad=True)
    total = (out * scale).sum()  # needs `out` for the gradient of `scale`
    before = out._version
    CALLS_WITH_OUT[name](out)
    assert out._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("name", CALLS_WITH_OUT)
def test_results_of_inference_mode_are_written_to(name: str) -> None:
    with torch.inference_mode():
        out = torch.zeros_like(X)
        assert CALLS_WITH_OUT[name](out) is out
    assert torch.equal(CALLS_WITH_OUT[name](out), CALLS_WITH_OUT[name](torch.zeros_like(X)))
