"""Kernels of `same_bits` compiled ahead of time: no spills in loops, bf16 by tensor cores."""

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import torch  # noqa: E402
from support.attention_compiled import case, compile_fixed  # noqa: E402
from support.sass import instructions, loops, printed, stack_of  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvpage.kernels.linear import linear_constants, linear_kernel  # noqa: E402
from kvpage.kernels.log_softmax import BLOCK, OPTIONS, SoftmaxConstants, log_softmax_kernel  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
TYPES = {BF16: "*bf16", FP32: "*fp32"}
ARCHS = pytest.mark.parametrize("arch", [80, 90, 120])
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=str)
MOST_STACK = 40  # bytes of registers that are stored before the loop over keys and loaded after it
MULTIPLIES = {80: "mma.sync", 90: "wgmma", 120: "mma.sync"}


def compiled(kernel, arch, pointers, constants, unaligned, options):
    """As a launch would compile it."""
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    aligned = [name for name in kernel.arg_names if name not in constants and name not in unaligned]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@ARCHS
@DTYPES
def test_products(dtype, arch):
    constants = linear_constants(4096, dtype)
    pointers = {f"{name}_ptr": TYPES[dtype] for name in ("x", "weight", "bias", "out")}
    used = {"LINEAR": constants, "size_stride": 1}
    unaligned = ("num_rows", "num_columns", "inner")
    kernel = compiled(linear_kernel, arch, pointers, used, unaligned, constants.options)
    ptx = kernel.asm["ptx"]
    assert stack_of(kernel) == 0
    assert re.search(MULTIPLIES[arch] if dtype == BF16 else r"fma\.rn\.f32", ptx)
    assert "tf32" not in ptx and not re.search(r"\.ftz", ptx)


@ARCHS
def test_logarithms_of_softmax(arch):
    pointers = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
    used = {"SOFTMAX": SoftmaxConstants(BLOCK)}
    kernel = compiled(log_softmax_kernel, arch, pointers, used, ("x_ptr", "out_ptr", "num_columns"), OPTIONS)
    assert stack_of(kernel) == 0


@ARCHS
@DTYPES
@pytest.mark.parametrize("size", [128, 256])
def test_attention_in_fixed_splits(dtype, size, arch):
    """Decodes and prompts have one code: queries of each sequence are given, or one each."""
    kernel, merge = compile_fixed(arch, **case(dtype, size=size, queries=512, keys="fixed"))
    assert stack_of(merge) == 0 and stack_of(kernel) <= MOST_STACK
    bodies = loops(instructions(printed(kernel.asm["cubin"], "-sass")), "HMMA|HGMMA|FFMA")
    assert bodies and not any(each.name in ("LDL", "STL") for body in bodies for each in body)
    assert dtype != BF16 or re.search(MULTIPLIES[arch], kernel.asm["ptx"])
