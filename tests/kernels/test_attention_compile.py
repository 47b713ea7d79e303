"""The attention kernels without a GPU: compiled ahead of time for sm_80 and sm_90, as a launch would compile them."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from kvpage import CacheLayout  # noqa: E402
from kvpage.kernels.attention import paged_attention_kernel  # noqa: E402
from kvpage.kernels.attention_launch import Plan, Rows, constants_of, sizes_of  # noqa: E402
from kvpage.kernels.attention_merge import MERGED, merge_splits_kernel  # noqa: E402
from kvpage.kernels.attention_plan import (  # noqa: E402
    MAX_SPLITS,
    Sizes,
    choose_items,
    choose_pieces,
    choose_tile,
    min_keys_of_split,
    split_columns,
)
from kvpage.layout.attention import Attention  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8"}
ARCHS = pytest.mark.parametrize("arch", [80, 90])
INTERPRETED_FILES = (
    "test_triton_attention.py",
    "test_attention_items.py",
    *(f"test_attention_{n}.py" for n in ("numbers", "lengths", "positions")),
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def case(
    dtype=BF16, size=128, group=4, queries=1, query=None, value=None, backend="flash", block=16, at=False, **options
):
    return {
        "has_positions": at,
        "layout": CacheLayout(block, 1 if backend == "mla" else 8, size, dtype, backend),
        "query_dtype": query or (BF16 if dtype in (E4M3, E5M2, INT8) else dtype),
        "group": group,
        "queries": queries,
        "value_size": value or size,
        "options": Attention(1.0, options.get("window"), options.get("softcap"), torch.zeros(1) if options else None),
    }


ALL = {"window": 100, "softcap": 5.0}
CASES = {
    "decode": case(),
    "prefill": case(queries=512),
    "speculative": case(queries=4),
    "decode, all options": case(**ALL),
    "prefill, all options": case(queries=512, **ALL),
    "decode e4m3": case(E4M3),
    "prefill e4m3": case(E4M3, queries=512),
    "decode e4m3, all options": case(E4M3, **ALL),
    "prefill e4m3, all options": case(E4M3, queries=512, **ALL),
    "decode e4m3, fp32": case(E4M3, query=FP32, **ALL),
    "prefill e4m3, fp32": case(E4M3, query=FP32, queries=512, **ALL),
    "prefill int8, fp32": case(INT8, query=FP32, queries=512, **ALL),
    "prefill bf16, fp32": case(BF16, query=FP32, queries=512, **ALL),
    "decode int8, all options": case(INT8, **ALL),
    "decode paged int8": case(INT8, backend="paged", **ALL),
    "decode paged e4m3": case(E4M3, backend="paged", **ALL),
    "decode e5m2": case(E5M2),
    "prefill e5m2": case(E5M2, queries=512),
    "decode int8": case(INT8),
    "prefill int8": case(INT8, queries=512),
    "prefill int8, fp16": case(INT8, queries=512, query=FP16),
    "decode mla": case(size=576, group=128, value=512, backend="mla", block=64),
    "decode mla, 16 heads": case(size=576, group=16, value=512, backend="mla", block=64),
    "prefill mla, 16 heads": case(size=576, group=16, value=512, backend="mla", block=64, queries=512),
    "decode mla e4m3": case(E4M3, size=576, group=128, value=512, backend="mla", block=64),
    "decode mla e4m3, 16 heads": case(E4M3, size=576, group=16, value=512, backend="mla", block=64),
    "decode mla int8": case(INT8, size=576, group=128, value=512, backend="mla", block=64),
    "decode paged": case(backend="paged"),
    "prefill paged": case(backend="paged", queries=512),
    "decode 64": case(size=64, group=8),
    "prefill 64": case(size=64, group=8, queries=512, **ALL),
    "decode 256": case(size=256, group=2),
    "prefill 256": case(size=256, group=2, queries=512, **ALL),
    "decode 576": case(size=576, group=1),
    "prefill 576": case(size=576, group=1, queries=512),
    "prefill 192 and 128": case(size=192, group=1, value=128, queries=512),
    "prefill 80": case(size=80, group=1, queries=512),
    "prefill 46": case(size=46, group=1, queries=512),
    "rows at positions": case(queries=512, at=True, **ALL),
    "rows at positions e4m3": case(E4M3, queries=512, at=True),
    "decode fp32": case(FP32),
    "prefill fp32": case(FP32, queries=512),
    "prefill fp32, 64": case(FP32, size=64, group=1, queries=512),
    "prefill fp32, 256": case(FP32, size=256, queries=512),
    "decode fp32 mla": case(FP32, size=576, group=128, value=512, backend="mla", block=64),
}


def specialised(signature, attributes, index, name, value):
    """What a launch makes of an integer argument."""
    signature[name] = "constexpr" if value == 1 else "i32"
    if value % 16 == 0:
        attributes[(index,)] = [["tt.divisibility", 16]]
    return {name: 1} if value == 1 else {}


def attention_constants(arch, **case):
    """The constants of the kernel that compile_attention compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            globals(), "compile_kernel", lambda kernel, arch, pointers, strides, constants, **launch: constants
        )
        return compile_attention(arch, **case)["A"]


def compile_attention(arch, layout, query_dtype, group, queries, value_size, options, split=True, has_positions=False):
    """The kernel for `queries` a sequence, with a device's tensors that begin at multiples of 16 bytes."""
    views = layout.views(torch.empty(layout.shape(2), dtype=layout.dtype, device="meta"))
    key, value = (None if view is None else Rows(view.rows, view.scales) for view in views)
    if layout.dtype in (E4M3, E5M2):
        scales = torch.empty(1, device="meta").expand(2, layout.block_size, layout.num_kv_heads)
        key, value = key._replace(scales=scales), value and value._replace(scales=scales)
    query = torch.empty(queries, layout.num_kv_heads * group, layout.head_size, dtype=query_dtype, device="meta")
    sizes = sizes_of(query, value_size, key, value is None)
    tile = choose_tile(sizes, group * queries, arch)
    tile_tokens = tile.num_tokens(group, queries)
    plan = Plan(sizes, tile, tile_tokens, num_tiles=1, head_tiles=1, num_pieces=2 if split else 0, num_items=3)
    constants = {"A": constants_of(plan, query, key, value, options, arch)}
    stored = "*u8" if layout.dtype in (E4M3, E5M2) else TYPES[layout.dtype]
    scale_pointer = None if key.scales is None else "*fp32"
    pointers = {
        "query_ptr": TYPES[query_dtype],
        "out_ptr": TYPES[query_dtype],
        "key_ptr": stored,
        "value_ptr": stored,
        "key_scale_ptr": scale_pointer,
        "value_scale_ptr": scale_pointer,
        "sink_ptr": None if options.sinks is None else "*fp32",
        "table_ptr": "*i32",
        "seq_len_ptr": "*i32",
        "query_len_ptr": None if queries == 1 else "*i32",
        "position_ptr": "*i64" if has_positions else None,
        "partial_ptr": "*fp32" if split else None,
        "sum_ptr": "*fp32" if split else None,
        "error_ptr": "*i32",
    }
    value = value or key
    strides = {"query_token": query.stride(0), "query_head": query.stride(1)}
    strides |= {"out_token": layout.num_kv_heads * group * value_size, "out_head": value_size}
    for name, rows in (("key", key), ("value", value)):
        parts = ("block", "offset", "head", "run")
        strides |= {f"{name}_{part}": stride for part, stride in zip(parts, rows.data.stride(), strict=False)}
        scales = (0, 0, 0) if rows.scales is None else rows.scales.stride()
        strides |= {f"{name}_scale_{part}": stride for part, stride in zip(parts, scales, strict=False)}
    return compile_kernel(
        paged_attention_kernel, arch, pointers, strides, constants, num_warps=tile.num_warps, num_stages=tile.num_stages
    )


def compile_kernel(kernel, arch, pointers, strides, constants, **launch):
    constants = dict(constants)
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = pointers[name] or "constexpr"
            if pointers[name] is None:
                constants[name] = None
            elif name not in ("sink_ptr", "table_ptr", "seq_len_ptr", "query_len_ptr", "position_ptr"):
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif name == "table_stride":
            signature[name] = "i32"
        elif name.endswith("_stride"):
            constants |= specialised(signature, attributes, i, name, strides[name.removesuffix("_stride")])
        else:
            signature[name] = "fp32" if name in ("factor", "softcap") else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)


def tool_output(name, compiled, tmp_path, *options):
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return subprocess.run([TOOLS / name, *options, cubin], check=True, capture_output=True, text=True).stdout


def test_in_the_interpreter(tmp_path):
    """Interpreted kernels cannot be compiled, so they get a process of their own (see test_triton_compile.py)."""
    tests = [str(Path(__file__).with_name(name)) for name in INTERPRETED_FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreter", *tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 200


# Tiles are chosen by what the compiler of Triton 3.7 makes of them; others may keep a few registers in memory.
MOST_STACK = 0 if triton.__version__.startswith("3.7.") else 256
# Lines of the source in the machine code decide whether these products without tensor cores find room in registers.
SMALL_STACK = {"prefill fp32, 256": 32}
# Five stages keep more tiles under way, and a word or two of addresses in memory.
SMALL_STACK |= {"prefill": 16, "prefill, all options": 16, "decode, all options": 16}


@ARCHS
@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name, arch, tmp_path):
    compiled = compile_attention(arch, **CASES[name])
    usage = tool_output("cuobjdump", compiled, tmp_path, "-res-usage")
    stack = max(map(int, re.findall(r"STACK:(\d+)", usage)))
    assert stack <= max(MOST_STACK, SMALL_STACK.get(name, 0)) and re.search(r"LOCAL:0\b", usage), usage
    assert compiled.metadata.shared <= {80: 163, 90: 227}[arch] * 1024


@ARCHS
@pytest.mark.parametrize("name", ["decode", "prefill", "decode 64", "decode 256", "prefill, all options"])
def test_keys_and_values_are_read_16_bytes_at_a_time(name, arch, tmp_path):
    """What is not: lengths, sinks and entries of the table."""
    compiled = compile_attention(arch, **CASES[name])
    sass = tool_output("cuobjdump", compiled, tmp_path, "-sass")
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", sass)) >= 16
    assert not re.findall(r"LDG\.E\.U|LDGSTS\.E\.64", sass)


@ARCHS
@pytest.mark.parametrize("name", ["prefill", "prefill mla, 16 heads", "prefill e4m3"])
def test_products_run_on_tensor_cores(name, arch, tmp_path):
    sass = tool_output("cuobjdump", compile_attention(arch, **CASES[name]), tmp_path, "-sass")
    assert len(re.findall(r"HGMMA" if arch == 90 and name != "prefill mla, 16 heads" else r"HMMA", sass)) >= 16


@pytest.mark.parametrize("name", ["decode", "prefill", "decode int8", "decode paged"])
def test_addresses_are_64_bits(name):
    """No 32-bit product is widened afterwards: products of ids and strides are taken in int64."""
    ttir = compile_attention(80, **CASES[name]).asm["ttir"]
    narrow = set(re.findall(r"(%\S+) = arith\.muli .* : (?:tensor<[\dx]+x)?i32", ttir))
    widened = set(re.findall(r"arith\.extsi (%\S+) : ", ttir))
    assert widened and re.findall(r"arith\.muli .* : (?:tensor<[\dx]+x)?i64", ttir)
    assert not narrow & widened


@ARCHS
def test_the_merging_kernel(arch, tmp_path):
    constants = {"MERGED": MERGED, "A": attention_constants(arch, **CASES["decode mla"])}
    pointers = {"out_ptr": "*bf16", "partial_ptr": "*fp32", "sum_ptr": "*fp32"}
    pointers |= {"seq_len_ptr": "*i64", "query_len_ptr": "*i64"}
    strides = {"out_token": 4096, "out_head": 512}
    compiled = compile_kernel(merge_splits_kernel, arch, pointers, strides, constants, num_warps=4)
    usage = tool_output("cuobjdump", compiled, tmp_path, "-res-usage")
    assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage


def test_tiles_hold_their_columns():
    for size in (*range(1, 300), 512, 576, 1000, 1024):
        tile, tail = split_columns(size)
        assert size <= tile + tail <= max(2 * size, 16)
        assert all(n & (n - 1) == 0 and n >= 16 for n in (tile, tail) if n)
    assert split_columns(576) == (512, 64) and split_columns(80) == (64, 16) and split_columns(112) == (128, 0)


LLAMA = Sizes(4, 128, 128, 2, 2, False, False)


def splits_of(lengths, head_tiles, tile, multiprocessors, tiles=None):
    """The splits of each sequence, as kvpage.kernels.attention_tiles adds them up on the device."""
    tiles = tiles or [1] * len(lengths)
    num_pieces = choose_pieces(sum(tiles), head_tiles, max(lengths), tile, multiprocessors)
    if num_pieces == 0:
        return [1] * len(lengths)
    spans = [-(-length // tile.keys) for length in lengths]
    total = sum(count * span for count, span in zip(tiles, spans, strict=True))
    piece = max(-(-total // num_pieces), min_keys_of_split(tile) // tile.keys)
    splits = [min(max(-(-span // piece), 1), MAX_SPLITS) for span in spans]
    num_items = sum(count * split for count, split in zip(tiles, splits, strict=True))
    assert num_items <= choose_items(sum(tiles), num_pieces, max(lengths), tile) <= sum(tiles) + num_pieces
    return splits


def test_splits_fill_the_device_and_no_more():
    tile = choose_tile(LLAMA, 4, 90)
    assert tile.rows == 16
    assert splits_of([131072], 8, tile, 132) == [128]
    assert set(splits_of([8192] * 64, 8, tile, 132)) <= {2, 3, 4}
    assert set(splits_of([8192] * 512, 8, tile, 132)) == {1}
    assert splits_of([100], 8, tile, 132) == [1]  # too few keys for a second thread block
    wide = choose_tile(LLAMA, 4 * 512, 90)
    assert wide.rows == 128 and splits_of([65536], 8, wide, 132, [64]) == [1]
    assert 1 < splits_of([65536], 8, wide, 132, [8])[0] <= 8


def test_one_long_sequence_among_short_ones_is_split_alone():
    """Thread blocks with work fill the device, and partial results have few rows."""
    tile = choose_tile(LLAMA, 4, 90)
    *short, long = splits_of([200] * 63 + [100_000], 8, tile, 132)
    assert short == [1] * 63 and long >= 100 and 8 * (63 + long) > 8 * 132
    rows = choose_items(64, choose_pieces(64, 8, 100_000, tile, 132), 100_000, tile)
    assert rows * 32 * 128 * 4 < 4 * 2**20


@pytest.mark.parametrize("seed", range(20))
def test_no_split_is_much_longer_than_the_others(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = (2.0 ** (17 * torch.rand(1 + 13 * seed, generator=generator))).int().add(1).tolist()
    tile = choose_tile(LLAMA, 4, 90)
    splits = splits_of(lengths, 8, tile, 132)
    longest = max(-(-length // split) for length, split in zip(lengths, splits, strict=True))
    fair = max(sum(lengths) / 132, min_keys_of_split(tile), max(lengths) / MAX_SPLITS)
    assert longest <= fair + 2 * tile.keys


def test_a_kernel_is_compiled_for_few_sizes_of_tiles():
    for capability in (80, 90):
        assert len({choose_tile(LLAMA, rows, capability) for rows in range(1, 3000)}) <= 3


def key_loops(ttgir):
    """The bodies of the loops that multiply."""
    lines, found = ttgir.splitlines(), []
    for at, line in enumerate(lines):
        if " scf.for " in line:
            indent = re.match(" *", line)[0] + "}"
            body = list(itertools.takewhile(lambda other, end=indent: not other.startswith(end), lines[at + 1 :]))
            if any("tt.dot" in other or "warp_group_dot " in other for other in body):
                found.append(body)
    return found


@ARCHS
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_loads_of_keys_and_values_are_under_way_while_others_are_multiplied(name, arch):
    ttgir = compile_attention(arch, **CASES[name]).asm["ttgir"]
    buffers = [int(n) for n in re.findall(r"ttg\.local_alloc\s*:.*memdesc<(\d+)x64x128x", ttgir)]
    assert len(buffers) == (2 if name == "decode" else 4) and min(buffers) >= 2
    if arch == 90 and name == "prefill":
        assert max(buffers) == 3
    loops = key_loops(ttgir)
    assert len(loops) == len(buffers) // 2
    for body in loops:
        waits = [int(re.search(r"num = (\d+)", line)[1]) for line in body if "ttg.async_wait" in line]
        assert waits and min(waits) > 0, waits
        assert not any("tt.load " in line for line in body)
