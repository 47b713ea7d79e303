"""The kernels that choose tokens, without a GPU: run by the interpreter, and compiled ahead of time.

Compiled, they read 16 bytes of logits at a time, keep what they hold in registers, and round each product by itself.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import torch  # noqa: E402

from kvpage.kernels.sampling import choose_kernel, survey_kernel  # noqa: E402
from kvpage.kernels.sampling_launch import CHOOSE_OPTIONS, SURVEY_OPTIONS, sampling_shape  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
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


def tool_output(compiled, tmp_path, option):
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return subprocess.run([TOOLS / "cuobjdump", option, cubin], check=True, capture_output=True, text=True).stdout


def test_in_the_interpreter(tmp_path):
    """Interpreted kernels cannot be compiled, so they get a process of their own (see test_triton_compile.py)."""
    tests = str(Path(__file__).with_name("test_sampling_kernels.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreter", tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 17


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
def test_logits_are_read_16_bytes_at_a_time_and_nothing_spills(kernel, arch, dtype, tmp_path):
    compiled = compiled_of(kernel, arch, dtype)
    usage = tool_output(compiled, tmp_path, "-res-usage")
    assert max(map(int, re.findall(r"STACK:(\d+)", usage))) == 0 and re.search(r"LOCAL:0\b", usage), usage
    assert re.search(r"LDG\.E\.128", tool_output(compiled, tmp_path, "-sass"))
    ptx = compiled.asm["ptx"]
    assert "fma.rn.f32" not in ptx and not re.search(r"(add|sub|mul|div|max)\S*\.ftz", ptx)
