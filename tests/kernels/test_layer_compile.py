"""Kernels of a model's layers compiled ahead of time: 16 bytes at a time, nothing spilled, addresses of 64 bits."""

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvpage.kernels.gate import gate_constants, gate_kernel  # noqa: E402
from kvpage.kernels.norm import norm_constants, rms_norm_kernel  # noqa: E402
from kvpage.kernels.rope import rope_constants, rope_kernel  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
KERNELS = {
    "norm": (rms_norm_kernel, lambda dtype: norm_constants(4096, dtype, True)),
    "norm of heads": (rms_norm_kernel, lambda dtype: norm_constants(128, dtype, True)),
    "gate": (gate_kernel, lambda dtype: gate_constants(3072, dtype, "silu")),
    "gate, gelu": (gate_kernel, lambda dtype: gate_constants(6912, dtype, "gelu_tanh")),
    "rope": (rope_kernel, lambda dtype: rope_constants(16, 8, 128, dtype)),
}
FLOATS = {"eps", "weight_offset"}


def compile_layer(name, dtype, arch):
    """As a launch would compile it: pointers and strides that are multiples of 16 bytes and elements."""
    kernel, make = KERNELS[name]
    constants = make(dtype)
    signature, attributes, used = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument.isupper():
            signature[argument], used[argument] = "constexpr", constants
        elif argument in FLOATS:
            signature[argument] = "fp32"
        else:
            signature[argument] = f"*i{8 * dtype.itemsize}" if argument.endswith("_ptr") else "i32"
        if argument.endswith(("_ptr", "_stride")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=used, attrs=attributes)
    options = {"num_warps": getattr(constants, "num_warps", 4), "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize("dtype, arch", [(BF16, 80), (BF16, 90), (FP32, 100), (BF16, 120)], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_rows_move_16_bytes_at_a_time_and_nothing_spills(name, dtype, arch):
    compiled = compile_layer(name, dtype, arch)
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v4\.b32", ptx)
    assert "st.local" not in ptx and ".ftz" not in ptx
    assert compiled.n_spills == 0 if hasattr(compiled, "n_spills") and compiled.n_spills is not None else True
    products = re.findall(r"arith\.muli .* : (?:tensor<([\dx]+)x)?(i\d+)", compiled.asm["ttir"])
    assert not [shape for shape, kind in products if kind == "i32" and shape]
