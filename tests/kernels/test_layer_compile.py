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

from kvpage import CacheLayout  # noqa: E402
from kvpage.kernels.gate import gate_constants, gate_kernel  # noqa: E402
from kvpage.kernels.heads import head_constants, heads_kernel  # noqa: E402
from kvpage.kernels.norm import (  # noqa: E402
    add_norm_kernel,
    norm_constants,
    rms_norm_kernel,
    sum_constants,
)
from kvpage.kernels.rope import rope_constants, rope_kernel  # noqa: E402

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def heads_of(dtype, size=128, rounds=True, cache_dtype=None, backend="flash"):
    """Constants of 16 heads of queries and 8 of keys."""
    layout = CacheLayout(16, 8, size, cache_dtype or dtype, backend=backend)
    return head_constants(16, size, size, dtype, rounds, layout.views(layout.allocate(2, 1, torch.device("cpu"))[0]))


KERNELS = {
    "norm": (rms_norm_kernel, lambda dtype: norm_constants(4096, dtype, True)),
    "norm of heads": (rms_norm_kernel, lambda dtype: norm_constants(128, dtype, True)),
    "gate": (gate_kernel, lambda dtype: gate_constants(3072, dtype, "silu")),
    "gate, gelu": (gate_kernel, lambda dtype: gate_constants(6912, dtype, "gelu_tanh")),
    "norm, sum, norm": (add_norm_kernel, lambda dtype: sum_constants(4096, dtype, False, False)),
    "sum, norm": (add_norm_kernel, lambda dtype: sum_constants(4096, dtype, None, True)),
    "heads": (heads_kernel, heads_of),
    "heads, no norms": (heads_kernel, lambda dtype: heads_of(dtype, rounds=None)),
    "heads of 256": (heads_kernel, lambda dtype: heads_of(dtype, 256, False)),
    "heads e4m3": (heads_kernel, lambda dtype: heads_of(dtype, cache_dtype=E4M3)),
    "rope": (rope_kernel, lambda dtype: rope_constants(16, 8, 128, dtype)),
}
FLOATS = ("eps", "weight_offset")  # ends of names
NONE = {  # of arguments that there are not, by kernel
    "sum, norm": ["x_weight_ptr"],
    "heads, no norms": ["query_weight_ptr", "key_weight_ptr"],
}
WIDTHS = {"slot_ptr": 8, "error_ptr": 4}  # bytes of elements that are no rows'


def compile_layer(name, dtype, arch):
    """As a launch would compile it: pointers and strides that are multiples of 16 bytes and elements."""
    kernel, make = KERNELS[name]
    constants = make(dtype)
    signature, attributes, used = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument == "BIT":
            signature[argument], used[argument] = "constexpr", 1
        elif argument.isupper():
            signature[argument], used[argument] = "constexpr", constants
        elif argument in NONE.get(name, ()) or argument.endswith("scale_ptr"):
            signature[argument], used[argument] = "constexpr", None
        elif argument.endswith(FLOATS):
            signature[argument] = "fp32"
        else:
            signature[argument] = pointer(argument, dtype, name) if argument.endswith("_ptr") else "i32"
        if argument.endswith(("_ptr", "_stride")) and argument not in used and argument not in WIDTHS:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=used, attrs=attributes)
    num_warps = getattr(constants, "num_warps", 4)
    if kernel is heads_kernel:
        num_warps = constants.ROWS.options["num_warps"]
    if kernel is add_norm_kernel:
        num_warps = constants.NORM.num_warps
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def pointer(argument, dtype, name):
    width = 1 if "cache_ptr" in argument and "e4m3" in name else WIDTHS.get(argument, dtype.itemsize)
    return f"*i{8 * width}"


@pytest.mark.parametrize("dtype, arch", [(BF16, 80), (BF16, 89), (BF16, 90), (FP32, 100), (BF16, 120)], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_rows_move_16_bytes_at_a_time_and_nothing_spills(name, dtype, arch):
    compiled = compile_layer(name, dtype, arch)
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v4\.b32", ptx)
    assert "st.local" not in ptx and ".ftz" not in ptx
    assert compiled.n_spills == 0 if hasattr(compiled, "n_spills") and compiled.n_spills is not None else True
    products = re.findall(r"arith\.muli .* : (?:tensor<([\dx]+)x)?(i\d+)", compiled.asm["ttir"])
    assert not [shape for shape, kind in products if kind == "i32" and shape]
