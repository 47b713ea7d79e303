"""Blending's Triton kernels without a GPU: run by the interpreter, and compiled ahead of time for sm_80 and sm_90.

Compiled, they move 16 bytes at a time, keep what they hold in registers, and round each product by itself.
"""

import os
import re
from dataclasses import replace

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import torch  # noqa: E402
from support.sass import printed, stack_of  # noqa: E402

from kvpage.kernels.blend import deviation_constants, row_deviation_kernel  # noqa: E402
from kvpage.kernels.rotary import mix_constants, mix_rows_kernel  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# heads, size, first, number of pairs: of Llama, Phi-3's 96, the first quarter, MLA's last part, V of all heads
SHAPES = {
    "llama": (8, 128, 0, 64),
    "size 96": (32, 96, 0, 48),
    "partial": (32, 80, 0, 16),
    "mla": (1, 576, 512, 32),
    "copied": (1, 1024, 0, 0),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)
PLACES = {
    "rows": {},
    "from slots": {"slot_ptr": "*i64", "BLOCK_SIZE": 16},
    "to slots": {"out_slot_ptr": "*i64", "OUT_BLOCK_SIZE": 16},
    "fresh": {"fresh_ptr": "*i16", "fresh_row_ptr": "*i64"},
    "all": {
        "slot_ptr": "*i64",
        "BLOCK_SIZE": 16,
        "out_slot_ptr": "*i64",
        "OUT_BLOCK_SIZE": 16,
        "fresh_ptr": "*i16",
        "fresh_row_ptr": "*i64",
    },
}


def compiled_of(kernel, arch, constants, dtype, given, aligned=True):
    """As a launch would compile it: pointers and strides that are multiples of 16 bytes and elements, or neither."""
    options = {"num_warps": getattr(constants, "num_warps", 4), "enable_fp_fusion": False}
    kinds = {"error_ptr": "*i32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "valid_ptr": "*i8", "out_ptr": None}
    kinds |= {"slot_ptr": None, "out_slot_ptr": None, "fresh_row_ptr": None, "fresh_ptr": None}
    element = f"*i{8 * dtype.itemsize}"
    kinds["out_ptr"] = "*fp32" if kernel is row_deviation_kernel else element
    kinds |= {name: kind for name, kind in given.items() if name.endswith("_ptr")}
    if kinds["fresh_ptr"] or kernel is row_deviation_kernel:
        kinds["fresh_ptr"] = element
    if not getattr(constants, "NUM_PAIRS", 1):
        kinds["cos_ptr"] = kinds["sin_ptr"] = None
    signature, attributes, used = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name], used[name] = "constexpr", constants
        elif name.endswith("_ptr"):
            signature[name] = kinds.get(name, element)
            if signature[name] is None:
                signature[name], used[name] = "constexpr", None
        else:
            signature[name] = "i32"
        is_divisible = name in ("row_ptr", "out_ptr", "fresh_ptr", "retrieved_ptr", "cos_ptr", "sin_ptr")
        if aligned and signature[name] != "constexpr" and (is_divisible or name.endswith("_stride")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=used, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compile_mix(shape, arch, dtype, place="rows", is_interleaved=False, aligned=True):
    constants = mix_constants(*SHAPES[shape], is_interleaved, dtype)
    sizes = {name: size for name, size in PLACES[place].items() if name.endswith("BLOCK_SIZE")}
    return compiled_of(mix_rows_kernel, arch, replace(constants, **sizes), dtype, PLACES[place], aligned)


@EVERY_SHAPE
@pytest.mark.parametrize("dtype, arch", [(BF16, 80), (BF16, 90), (FP32, 90)], ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rows_move_16_bytes_at_a_time(shape, dtype, arch, is_interleaved):
    compiled = compile_mix(shape, arch, dtype, "all", is_interleaved)
    sass = printed(compiled.asm["cubin"], "-sass")
    assert re.search(r"LDG\.E\.128", sass) and re.search(r"STG\.E\.128", sass)
    narrow = {2: r"(LDG|STG)\.E\.U?16\b", 4: r"STG\.E\b(?!\.)"}[dtype.itemsize]
    assert not re.findall(narrow, sass), "some elements move one by one"
    ptx = compiled.asm["ptx"]
    assert "fma.rn.f32" not in ptx and ".ftz" not in ptx
    assert stack_of(compiled) == 0


@pytest.mark.parametrize("is_interleaved", [False, True])
@EVERY_SHAPE
def test_nothing_spills_where_nothing_is_aligned(shape, is_interleaved):
    """By the compiler that the kernels are tuned with; by others, little."""
    most_stack = 0 if triton.__version__.startswith("3.7.") else 64
    assert stack_of(compile_mix(shape, 80, FP16, "all", is_interleaved, aligned=False)) <= most_stack


@pytest.mark.parametrize("place", PLACES)
def test_addresses_are_64_bits(place):
    """Products of ids and strides are taken in int64: the 32-bit ones are of the launch's own numbers."""
    ttir = compile_mix("llama", 80, BF16, place).asm["ttir"]
    products = re.findall(r"arith\.muli .* : (?:tensor<([\dx]+)x)?(i\d+)", ttir)
    assert ("", "i64") in {(shape and "", kind) for shape, kind in products}
    assert not [shape for shape, kind in products if kind == "i32" and shape]


@pytest.mark.parametrize("dtype, arch", [(BF16, 80), (FP16, 90), (FP32, 90)], ids=str)
@pytest.mark.parametrize("heads, size", [(1, 1024), (8, 128), (1, 576), (2, 80)])
def test_deviations(heads, size, dtype, arch):
    compiled = compiled_of(row_deviation_kernel, arch, deviation_constants(heads, size, dtype), dtype, {})
    assert re.search(r"LDG\.E\.128", printed(compiled.asm["cubin"], "-sass"))
    assert stack_of(compiled) == 0
    ttir = compiled.asm["ttir"]
    products = re.findall(r"arith\.muli .* : (?:tensor<([\dx]+)x)?(i\d+)", ttir)
    assert not [shape for shape, kind in products if kind == "i32" and shape]
