"""The Triton kernels without a GPU: run by the interpreter, and compiled ahead of time for sm_80 and sm_90.

The first shows that they compute what the reference computes, the second that they compile, move 16 bytes at a time,
and keep what they hold in registers.
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

from kvpage.kernels.gather import gather_cache_kernel  # noqa: E402
from kvpage.kernels.reshape import reshape_and_cache_kernel  # noqa: E402
from kvpage.kernels.rows import tile_of  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KERNELS = pytest.mark.parametrize(
    "kernel", [reshape_and_cache_kernel, gather_cache_kernel], ids=["reshape_and_cache", "gather_cache"]
)
ARCHS = pytest.mark.parametrize("arch", [80, 90])


def test_in_the_interpreter(tmp_path):
    """Interpreted kernels cannot be compiled, so they get a process of their own (started elsewhere: `python -m pytest`
    puts its folder first on the path, and a checkout there would hide the installed package)."""
    tests = Path(__file__).with_name("test_reshape_gather.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreter", str(tests)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100


def compile_kernel(kernel, arch, element="i16", key_size=128, value_size=128, strides_divisible=True):
    """As a launch would compile it: 16-byte aligned pointers, and strides that are multiples of 16 elements or not."""
    constants = {"BLOCK_SIZE": 16, "BIT": 1, **tile_of(key_size, value_size)}
    signature, attributes = {}, {}
    pointers = {"slot_ptr": "*i64", "sequence_ptr": "*i64", "table_ptr": "*i32", "error_ptr": "*i32"}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, f"*{element}") if name.endswith("_ptr") else "i32"
        if name.endswith("_ptr") or (strides_divisible and name.endswith("_stride")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})


def tool_output(name, compiled, tmp_path, *options):
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return subprocess.run([TOOLS / name, *options, cubin], check=True, capture_output=True, text=True).stdout


@KERNELS
@ARCHS
@pytest.mark.parametrize(
    "element, key_size, value_size",
    [("i8", 128, 128), ("i32", 128, 128), ("i16", 64, 64), ("i16", 80, 80), ("i16", 192, 128), ("i16", 576, 512)],
)
def test_rows_move_16_bytes_at_a_time(kernel, arch, element, key_size, value_size, tmp_path):
    compiled = compile_kernel(kernel, arch, element, key_size, value_size)
    ptx = compiled.asm["ptx"]
    row = {"i8": "b8", "i16": "b16", "i32": "b32"}[element]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 2 and len(re.findall(r"st\.global\.v4\.b32", ptx)) >= 2
    assert not re.findall(rf"st\.global(\.v2)?\.{row}\b", ptx)
    sass = tool_output("cuobjdump", compiled, tmp_path, "-sass")
    assert len(re.findall(r"LDG\.E\.128", sass)) >= 2 and len(re.findall(r"STG\.E\.128", sass)) >= 2


@KERNELS
@ARCHS
@pytest.mark.parametrize("key_size, value_size", [(1, 1), (20, 7), (128, 128), (4096, 4096)])
@pytest.mark.parametrize("strides_divisible", [True, False])
def test_nothing_spills(kernel, arch, key_size, value_size, strides_divisible, tmp_path):
    compiled = compile_kernel(kernel, arch, "i16", key_size, value_size, strides_divisible)
    usage = tool_output("cuobjdump", compiled, tmp_path, "-res-usage")
    assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage


@KERNELS
def test_addresses_are_64_bits(kernel):
    """Products of ids and strides are taken in int64: no 32-bit product is widened afterwards."""
    ttir = compile_kernel(kernel, 80).asm["ttir"]
    products = re.findall(r"arith\.muli .* : (?:tensor<\d+x)?(i\d+)", ttir)
    assert products and set(products) == {"i64"}
