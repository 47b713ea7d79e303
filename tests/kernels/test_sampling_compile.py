"""The kernels that choose tokens, without a GPU: run by the interpreter, and compiled ahead of time.

Compiled, they read 16 bytes of logits at a time, keep what they hold in registers, and round each product by itself.
"""

import os
import re

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import torch  # noqa: E402
from support.sass import printed, stack_of  # noqa: E402

from kvpage.kernels.sampling import choose_kernel, survey_kernel  # noqa: E402
from kvpage.kernels.sampling_launch import CHOOSE_OPTIONS, SURVEY_OPTIONS, sampling_shape  # noqa: E402

VOCAB_SIZE = 151936
POINTERS = {"record_ptr": "*i64", "position_ptr": "*i64", "top_ptr": "*fp32", "share_ptr": "*i64"}


def compiled_of(kernel, arch, dtype):
    signature, attributes, constants = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name == "SHAPE":
            signature[name], constants[name] = "constexpr", sampling_shape(VOCAB_SIZE, dtype)
            continue
        kind = f"*i{8 * dtype.itemsize}" if name == "logits_ptr" else POINTERS.get(name, "*i32")
        signature[name] = kind if name.endswith("_ptr") else "i32"
        if name.endswith("_ptr") or name in ("logits_stride", "vocab_size"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = SURVEY_OPTIONS if kernel is survey_kernel else CHOOSE_OPTIONS
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize(
    "kernel, arch, dtype",
    [
        (survey_kernel, 80, torch.float32),
        (survey_kernel, 90, torch.bfloat16),
        (choose_kernel, 80, torch.float32),
        (choose_kernel, 90, torch.bfloat16),
    ],
    ids=["survey sm_80", "survey sm_90", "choose sm_80", "choose sm_90"],
)
def test_logits_are_read_16_bytes_at_a_time_and_nothing_spills(kernel, arch, dtype):
    compiled = compiled_of(kernel, arch, dtype)
    assert stack_of(compiled) == 0
    assert re.search(r"LDG\.E\.128", printed(compiled.asm["cubin"], "-sass"))
    ptx = compiled.asm["ptx"]
    assert "fma.rn.f32" not in ptx and not re.search(r"(add|sub|mul|div|max)\S*\.ftz", ptx)
