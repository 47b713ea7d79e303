"""The Triton kernels without a GPU: run by the interpreter, and compiled ahead of time for sm_80 and sm_90.

The first shows that they compute what the reference computes, the second that they compile, move 16 bytes at a time,
and keep what they hold in registers.
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

from kvpage import CacheLayout  # noqa: E402
from kvpage.kernels.arguments import row_constants  # noqa: E402
from kvpage.kernels.chunk import ChunkConstants, chunk_kernel  # noqa: E402
from kvpage.kernels.gather import gather_cache_kernel  # noqa: E402
from kvpage.kernels.reshape import reshape_and_cache_kernel  # noqa: E402
from kvpage.kernels.rows import ROWS_FIRST  # noqa: E402

ARCHS = pytest.mark.parametrize("arch", [80, 90])


# What a kernel is compiled for besides rows: where lengths come from, where chunks go.
KERNELS = {
    "reshape": (reshape_and_cache_kernel, {}),
    "gather": (gather_cache_kernel, {"CHECK": False}),
    "gather packed": (gather_cache_kernel, {"CHECK": False, "end_ptr": "*i64"}),
    "gather by device lengths": (gather_cache_kernel, {"CHECK": True, "end_ptr": "*i64", "length_ptr": "*i32"}),
    "gather without starts": (gather_cache_kernel, {"CHECK": True, "start_ptr": None}),
    "store chunk": (chunk_kernel, {"TO_CHUNK": True, "TURNS": 1}),
    "load chunk": (chunk_kernel, {"TO_CHUNK": False, "TURNS": 1}),
    "store chunk to host": (chunk_kernel, {"TO_CHUNK": True, "TURNS": 8}),
    "load chunk from host": (chunk_kernel, {"TO_CHUNK": False, "TURNS": 8}),
    "store chunk in a graph": (chunk_kernel, {"TO_CHUNK": True, "TURNS": 1, "address_ptr": None}),
}
MAIN = ("reshape", "gather packed", "store chunk", "load chunk")
OTHERS = tuple(name for name in KERNELS if name not in MAIN)
EVERY_KERNEL = pytest.mark.parametrize("name", KERNELS)
MAIN_KERNELS = pytest.mark.parametrize("name", MAIN)
POINTERS = {
    "slot_ptr": "*i64",
    "table_ptr": "*i32",
    "length_ptr": "*i64",
    "start_ptr": "*i64",
    "end_ptr": None,
    "error_ptr": "*i32",
    "key_scale_ptr": "*fp32",
    "value_scale_ptr": "*fp32",
    "address_ptr": "*i64",
    "block_ptr": "*i64",
}
BF16, FP32, E4M3, E5M2, INT8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def compile_kernel(name, arch, layout, rows, sizes=(128, 128), aligned=True, scaled=True, address="i64"):
    """As a launch would compile it: pointers and strides that are multiples of 16 bytes and elements, or neither."""
    kernel, kind = KERNELS[name]
    views = layout.views(layout.allocate(1, 1, torch.device("cpu"))[0])
    constants = row_constants(sizes, rows, views)
    quantized = constants.CODE != "bits"
    values = {"ROWS": constants, "BIT": 1, "LENGTH_BIT": 4, **kind}
    if kernel is chunk_kernel:
        is_scaled = layout.has_token_scales or (quantized and scaled)
        as_bytes, to_chunk, turns = is_scaled and not quantized, kind["TO_CHUNK"], kind["TURNS"]
        values["CHUNK"] = ChunkConstants(is_scaled, as_bytes, 8 * layout.dtype.itemsize, aligned, to_chunk, turns)
    signature, attributes = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        kinds = {**POINTERS, **kind}
        if argument in values and argument.isupper():
            signature[argument] = "constexpr"
            continue
        if argument.endswith("_ptr"):
            item = (layout.dtype if "cache" in argument else rows).itemsize
            signature[argument] = kinds.get(argument, f"*i{8 * item}")
            if "scale" in argument and not (quantized and scaled) or "value" in argument and not sizes[1]:
                signature[argument] = None
        else:
            signature[argument] = address if argument.endswith("_address") else "i32"
        if signature[argument] is None:
            signature[argument], values[argument] = "constexpr", None
        elif aligned and (argument in DIVISIBLE or argument.endswith("_stride") and "scale" not in argument):
            attributes[(i,)] = [["tt.divisibility", 16]]
    used = {argument: values[argument] for argument, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=used, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=constants.options)


DIVISIBLE = ("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr", "chunk_ptr")


def make_layout(backend, dtype, size=128):
    return CacheLayout(16, 1 if backend == "mla" else 8, size, dtype, backend)


def check_no_spills(compiled, most_stack=0):
    assert stack_of(compiled) <= most_stack


PLAIN = [
    (E4M3, (128, 128)),
    (FP32, (128, 128)),
    (BF16, (64, 64)),
    (BF16, (80, 80)),
    (BF16, (192, 128)),
    (BF16, (576, 0)),
]


@pytest.mark.parametrize(
    "name, dtype, sizes", [*((name, *case) for name in MAIN for case in PLAIN), *((name, *PLAIN[4]) for name in OTHERS)]
)
@ARCHS
def test_rows_move_16_bytes_at_a_time(name, dtype, sizes, arch):
    layout = make_layout("flash" if sizes[1] else "mla", dtype, sizes[0])
    if "chunk" in name:
        sizes = (sizes[0], sizes[0] if sizes[1] else 0)
    compiled = compile_kernel(name, arch, layout, dtype, sizes)
    ptx, parts = compiled.asm["ptx"], 2 if sizes[1] else 1
    row = {1: "b8", 2: "b16", 4: "b32"}[dtype.itemsize]
    assert (
        len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= parts and len(re.findall(r"st\.global\.v4\.b32", ptx)) >= parts
    )
    assert not re.findall(rf"st\.global(\.v2)?\.{row}\b", ptx)
    sass = printed(compiled.asm["cubin"], "-sass")
    assert len(re.findall(r"LDG\.E\.128", sass)) >= parts and len(re.findall(r"STG\.E\.128", sass)) >= parts
    check_no_spills(compiled)


@MAIN_KERNELS
@pytest.mark.parametrize("dtype, rows", [(BF16, BF16), (E4M3, BF16), (INT8, BF16)])
def test_neighbouring_tokens_of_runs_are_moved_together(name, dtype, rows):
    """K in pieces of 16 bytes; V, of which an element lies beside the next token's, with a lane of a warp a token."""
    compiled = compile_kernel(name, 90, make_layout("paged", dtype), rows)
    into = name == "reshape" or name.startswith("load")
    sass = printed(compiled.asm["cubin"], "-sass")
    assert re.search(r"STG\.E\.128" if into else r"LDG\.E\.128", sass)
    layouts = dict(re.findall(r"(#blocked\d*) = #ttg\.blocked<\{(.*?)\}>", compiled.asm["ttgir"]))
    moved = re.findall(rf"tt\.{'store' if into else 'load'} .*x1x!tt\.ptr<i\d+>, (#blocked\d*)>", compiled.asm["ttgir"])
    assert moved
    for layout in moved:
        lanes, order = (
            [int(number) for number in re.search(rf"{what} = \[(.*?)\]", layouts[layout])[1].split(",")]
            for what in ("threadsPerWarp", "order")
        )
        tokens = 0 if ROWS_FIRST.value else 1
        assert lanes[tokens] * dtype.itemsize >= 32 and order.index(tokens) < order.index(1 - tokens)
    is_old = [int(number) for number in triton.__version__.split(".")[:2]] < [3, 7]
    check_no_spills(compiled, 240 if is_old else 0)  # the compiler of 3.6 keeps some registers in memory


QUANTISED = [
    ("flash", E4M3, BF16, (128, 128), True),
    ("flash", E4M3, FP32, (128, 128), False),
    ("flash", E5M2, torch.float16, (80, 80), True),
    ("flash", INT8, BF16, (128, 128), True),
    ("mla", E4M3, BF16, (576, 0), True),
    ("mla", INT8, BF16, (576, 0), True),
    ("paged", E4M3, BF16, (256, 256), True),
    ("paged", INT8, BF16, (46, 46), True),
]


@MAIN_KERNELS
@pytest.mark.parametrize("backend, dtype, rows, sizes, scaled", QUANTISED)
def test_quantised_rows_compile_for_every_gpu(name, backend, dtype, rows, sizes, scaled):
    """For sm_80 too, which has no 8-bit floats. Nothing is flushed to zero, nor divided inexactly."""
    compiled = compile_kernel(name, 80, make_layout(backend, dtype, sizes[0]), rows, sizes, True, scaled)
    ptx = compiled.asm["ptx"]
    assert ".ftz" not in ptx and "div.full" not in ptx and "div.approx" not in ptx and "rcp.approx" not in ptx
    into = name == "reshape" or name.startswith("load")
    assert ("div.rn.f32" in ptx) == (into and (scaled or dtype == INT8))
    # Tiles are chosen by what the compiler of Triton 3.7 makes of them; another may keep a few registers in memory.
    check_no_spills(compiled, 0 if triton.__version__.startswith("3.7.") else 64)


UNEVEN = [((1, 1), True), ((20, 20), False), ((128, 128), False), ((4096, 4096), True), ((4096, 4096), False)]


@pytest.mark.parametrize(
    "name, sizes, aligned",
    [*((name, *case) for name in MAIN for case in UNEVEN), *((name, (128, 128), False) for name in OTHERS)],
)
@ARCHS
def test_nothing_spills(name, sizes, aligned, arch):
    check_no_spills(compile_kernel(name, arch, make_layout("flash", BF16, sizes[0]), BF16, sizes, aligned))


@EVERY_KERNEL
@pytest.mark.parametrize("backend", ["flash", "paged"])
def test_addresses_are_64_bits(name, backend):
    """Products of ids and strides are taken in int64: no 32-bit product is widened afterwards. The other products are
    those of an element's run, and of the launch's own numbers."""
    ttir = compile_kernel(name, 80, make_layout(backend, BF16), BF16).asm["ttir"]
    products = re.findall(r"arith\.muli .* : (?:tensor<([\dx]+)x)?(i\d+)", ttir)
    assert ("", "i64") in {(shape and "", kind) for shape, kind in products}
    narrow = [shape for shape, kind in products if kind == "i32"]
    assert all(shape == "" or shape.endswith("x1x1") for shape in narrow)
    assert len([shape for shape in narrow if shape == ""]) <= (3 if "chunk" in name else 0)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("name", ["reshape", "load chunk"])
def test_a_sign_of_fp16_is_taken_from_its_bits(name, dtype):
    """A GPU that widens a negative NaN drops its sign: only magnitudes are widened, then the sign is set again."""
    ttir = compile_kernel(name, 80, make_layout("flash", dtype), torch.float16).asm["ttir"]
    constants = dict(re.findall(r"(%\S+) = arith\.constant dense<(-?\d+)>", ttir))
    masked = {result: constants.get(mask) for result, mask in re.findall(r"(%\S+) = arith\.andi %\S+, (%\S+) :", ttir)}
    widened = re.findall(r"arith\.extf (%\S+) : \S+xf16>", ttir)
    bits = [re.search(rf"{re.escape(number)} = tt\.bitcast (%\S+) :", ttir)[1] for number in widened]
    assert bits and [masked.get(source) for source in bits] == [str(0x7FFF)] * len(bits)
    assert list(masked.values()).count(str(-(2**31))) == len(bits)


LONG_ROWS = [*((name, BF16) for name in MAIN), ("reshape", E4M3), ("gather packed", INT8)]


@pytest.mark.parametrize("name, dtype", LONG_ROWS)
def test_long_rows_have_no_more_warps_than_a_thread_block(name, dtype):
    compiled = compile_kernel(name, 80, make_layout("flash", dtype, 2**15), BF16, (2**15, 2**15))
    assert compiled.metadata.num_warps == 32  # with 64 registers a thread: Triton 3.8 keeps 192 bytes in memory
    check_no_spills(compiled, 0 if triton.__version__.startswith("3.7.") else 256)


WARPS = [(1, 4), (128, 4), (2048, 4), (2049, 8), (4096, 8), (8192, 16), (2**16, 32)]


@pytest.mark.parametrize("size, num_warps", WARPS)
def test_warps_of_a_row(size, num_warps):
    layout = make_layout("flash", BF16, size)
    views = layout.views(layout.allocate(1, 1, torch.device("cpu"))[0])
    assert row_constants((size, size), BF16, views).options["num_warps"] == num_warps


def test_rows_that_no_launch_can_hold_are_refused():
    layout = CacheLayout(1, 1, 2**16 + 1, BF16)
    views = layout.views(layout.allocate(1, 1, torch.device("cpu"))[0])
    with pytest.raises(ValueError, match="rows must have at most 65536 elements, got 65537"):
        row_constants((2**16 + 1, 2**16 + 1), BF16, views)


def test_an_address_may_be_small():
    """Triton passes an integer that fits as int32, also where it is an address."""
    for rows, layout in ((BF16, make_layout("flash", BF16)), (FP32, make_layout("flash", INT8))):
        assert compile_kernel("store chunk in a graph", 80, layout, rows, address="i32").asm["ptx"]
