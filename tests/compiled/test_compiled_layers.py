"""Kernels of a model's layers as compiled for a GPU, against the reference and the model's own functions."""

import torch
import transformers as tf
from support.ptx.archs import BOTH, every_case

from kvpage import CacheLayout
from kvpage.kernels.row_grid import RowGrid
from kvpage.layout.row_norm import RowNorm
from kvpage.ops import reference

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
NORMS = {"heads": (BOTH, BF16, 64), "wide": ([90], FP16, 1536), "odd": ([80], FP32, 45)}
GATES = {"silu": (BOTH, BF16, "silu", 96), "gelu": ([90], FP16, "gelu_tanh", 1100), "odd": ([80], FP32, "silu", 33)}
ROPES = {"whole": (BOTH, BF16, 64), "fp32": ([90], FP32, 96), "odd": ([80], FP16, 10)}
SUMS = {"two norms": (BOTH, BF16, 96), "fp16": ([90], FP16, 1536), "odd": ([80], FP32, 45)}
HEADS = {
    "bf16": (BOTH, BF16, 64, BF16, "flash"),
    "fp32": ([90], FP32, 96, FP32, "flashinfer"),
    "odd": ([80], FP16, 10, FP16, "flash"),
    "e4m3": ([90], BF16, 32, E4M3, "flash"),
    "paged": ([80], BF16, 32, BF16, "paged"),
}
ROUNDING = {FP32: 1e-6, BF16: 8e-3, FP16: 1e-3}  # of a number that rounds the other way


def close(got, want):
    rounding = ROUNDING[want.dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=rounding, atol=rounding)


@every_case("dtype, size", NORMS)
def test_norms(device, dtype, size):
    from kvpage.kernels.norm import rms_norm

    rows, weight = torch.randn(5, 6, size).to(dtype)[:, :4], torch.randn(size).to(dtype)
    out = torch.full(rows.shape, 7.0).to(dtype)
    for offset, rounds in ((0.0, True), (1.0, False)):
        rms_norm(rows, RowGrid.of(rows), weight, out, 1e-6, offset, rounds)
        close(out, reference.rms_norm(rows, weight, 1e-6, offset, rounds))


@every_case("dtype, activation, size", GATES)
def test_activations(device, dtype, activation, size):
    from kvpage.kernels.gate import gate

    gates, ups = torch.randn(3, 2 * size).to(dtype).chunk(2, -1)
    out = torch.full(gates.shape, 7.0).to(dtype)
    gate(gates, RowGrid.of(gates), ups, RowGrid.of(ups), out, activation)
    function = torch.nn.functional.silu if activation == "silu" else torch.nn.functional.gelu
    close(out, function(gates, **({} if activation == "silu" else {"approximate": "tanh"})) * ups)


@every_case("dtype, size", ROPES)
def test_rotations_are_the_models_bit_by_bit(device, dtype, size):
    from kvpage.kernels.rope import rope

    query, key = torch.randn(5, 6, size).to(dtype).split([4, 2], 1)
    cos, sin = torch.randn(2, 5, size).to(dtype)
    outs = [torch.full(part.shape, 7.0).to(dtype) for part in (query, key)]
    rope(query, key, cos, sin, *outs)
    rotate = tf.models.llama.modeling_llama.apply_rotary_pos_emb
    want = rotate(*(part.transpose(0, 1)[None] for part in (query, key)), cos[None], sin[None])
    for got, rows in zip(outs, want, strict=True):
        assert torch.equal(got.view(torch.uint8), rows[0].transpose(0, 1).contiguous().view(torch.uint8))


@every_case("dtype, size", SUMS)
def test_sums_and_norms(device, dtype, size):
    from kvpage.kernels.norm import add_norm

    x, residual = torch.randn(5, 2 * size).to(dtype).chunk(2, -1)
    weights = torch.randn(2, size).to(dtype)
    first, second = RowNorm(weights[0], 1e-6, 1.0, False), RowNorm(weights[1], 1e-6, 0.0, True)
    grids = RowGrid.of(x), RowGrid.of(residual)
    for norms in ((None, second), (first, second), (first, None)):
        total, out = torch.full((2, 5, size), 7.0).to(dtype)
        out = None if norms[1] is None else out
        add_norm(x, grids[0], residual, grids[1], *norms, total, out)
        want = reference.add_norm(x, residual, *norms)
        close(total, want[0])
        if norms[0] is None:
            assert torch.equal(total, want[0])
        if out is not None:
            close(out, reference.rms_norm(total, *second))


@every_case("dtype, size, cache_dtype, backend", HEADS)
def test_heads(device, dtype, size, cache_dtype, backend):
    """Without norms bit by bit."""
    from kvpage.kernels.heads import write_heads

    layout = CacheLayout(4, 2, size, cache_dtype, backend=backend)
    caches = [layout.allocate(3, 1, torch.device("cpu"))[0].fill_(0) for _ in range(2)]
    query, key, value = torch.randn(5, 8, size).to(dtype).split([4, 2, 2], 1)
    cos, sin = torch.randn(2, 5, size).to(dtype)
    weights = torch.randn(2, size).to(dtype)
    norms = RowNorm(weights[0], 1e-6, 1.0, False), RowNorm(weights[1], 1e-5, 1.0, False)
    slots, error = torch.tensor([3, 11, -1, 0, 7]), torch.zeros(1, dtype=torch.int32)
    for used in (None, norms):
        out = torch.full(query.shape, 7.0).to(dtype)
        write_heads(query, key, value, used, cos, sin, out, layout.views(caches[0]), slots, None, error)
        want = reference.write_heads(query, key, value, used, cos, sin, caches[1], slots, layout)
        torch.testing.assert_close(out.float(), want.float(), rtol=ROUNDING[dtype], atol=8 * ROUNDING[dtype])
        if used is None:
            assert torch.equal(out, want) and torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
        assert int(error) == 0
