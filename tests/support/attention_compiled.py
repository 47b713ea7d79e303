"""Attention's kernels compiled ahead of time for a GPU, as a launch there would compile them.

Kernels of the interpreter cannot be compiled.
"""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpage import CacheLayout
from kvpage.benchmarks.compiling_driver import SHARED_MEMORY
from kvpage.kernels.attention import paged_attention_kernel
from kvpage.kernels.attention_fixed import fixed_attention_kernel, merge_fixed_kernel
from kvpage.kernels.attention_launch import FIXED_MERGE_OPTIONS, Plan, Rows, as_loaded, constants_of, sizes_of
from kvpage.kernels.attention_plan import choose_fixed_tile, choose_tile
from kvpage.layout.attention import Attention

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8"}
TYPES |= {torch.uint8: "*u8", torch.int16: "*i16"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def case(
    dtype=BF16,
    size=128,
    group=4,
    queries=1,
    query=None,
    value=None,
    backend="flash",
    block=16,
    at=False,
    keys="all",
    **options,
):
    """keys: of attention's constants; of shared ones, queries are members of a group."""
    sinks = torch.zeros(1) if options and keys != "shared" else None
    return {
        "keys": keys,
        "has_positions": at,
        "layout": CacheLayout(block, 1 if backend == "mla" else 8, size, dtype, backend),
        "query_dtype": query or (BF16 if dtype in (E4M3, E5M2, INT8) else dtype),
        "group": group,
        "queries": queries,
        "value_size": value or size,
        "options": Attention(1.0, options.get("window"), options.get("softcap"), sinks),
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
    "decode mla, all options": case(size=576, group=128, value=512, backend="mla", block=64, **ALL),
    "decode mla, 64 heads": case(size=576, group=64, value=512, backend="mla", block=64),
    "decode mla, blocks of 16": case(size=576, group=64, value=512, backend="mla"),
    "decode mla, 32 heads": case(size=576, group=32, value=512, backend="mla", block=64),
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
    "own keys": case(keys="own"),
    "own keys, all options": case(keys="own", **ALL),
    "shared keys": case(queries=64, keys="shared"),
    "shared keys, 8 members": case(queries=8, keys="shared"),
    "shared keys, 2 members": case(queries=2, keys="shared"),
    "shared keys, all options": case(queries=64, keys="shared", **ALL),
    "shared keys e4m3": case(E4M3, queries=64, keys="shared"),
    "shared keys int8": case(INT8, queries=64, keys="shared"),
    "shared keys fp32": case(FP32, queries=64, keys="shared"),
    "shared keys 64": case(size=64, group=8, queries=64, keys="shared"),
    "shared keys 256": case(size=256, group=2, queries=64, keys="shared"),
    "shared keys mla, 16 heads": case(
        size=576, group=16, value=512, backend="mla", block=64, queries=64, keys="shared"
    ),
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


def rows_of(layout, query_dtype, group, queries, value_size):
    """The query, K, V or None, and their sizes, of a case. They have no memory."""
    views = layout.views(torch.empty(layout.shape(2), dtype=layout.dtype, device="meta"))
    key, value = (None if view is None else Rows(view.rows, view.scales) for view in views)
    if layout.dtype in (E4M3, E5M2):
        scales = torch.empty(1, device="meta").expand(2, layout.block_size, layout.num_kv_heads)
        key, value = key._replace(scales=scales), value and value._replace(scales=scales)
    query = torch.empty(queries, layout.num_kv_heads * group, layout.head_size, dtype=query_dtype, device="meta")
    return query, key, value, sizes_of(query, value_size, key, value)


def sizes_and_tile(arch, layout, query_dtype, group, queries, value_size, **_):
    """The sizes of a case, and the tile that a device of this capability takes."""
    *_, sizes = rows_of(layout, query_dtype, group, queries, value_size)
    return sizes, choose_tile(sizes, group * queries, arch, SHARED_MEMORY[arch])


def compile_attention(
    arch, layout, query_dtype, group, queries, value_size, options, split=True, has_positions=False, keys="all"
):
    """The kernel for `queries` a sequence, with a device's tensors that begin at multiples of 16 bytes."""
    query, key, value, sizes = rows_of(layout, query_dtype, group, queries, value_size)
    if keys == "fixed":
        tile = choose_fixed_tile(sizes, arch, SHARED_MEMORY[arch])
        tile_tokens = max(tile.rows // group, 1)
    else:
        tile = choose_tile(sizes, group * queries, arch, SHARED_MEMORY[arch])
        tile_tokens = tile.num_tokens(group, queries)
    plan = Plan(sizes, tile, tile_tokens, num_tiles=1, head_tiles=1, num_pieces=2 if split else 0, num_items=3)
    constants = {"A": constants_of(plan, query, key, value, options, arch, keys)}
    loaded = [as_loaded(key, constants["A"].KEY_PAIRS), as_loaded(value or key, constants["A"].VALUE_PAIRS)]
    scale_pointer = None if key.scales is None else "*fp32"
    pointers = {
        "query_ptr": TYPES[query_dtype],
        "out_ptr": TYPES[query_dtype],
        "key_ptr": TYPES[loaded[0].dtype],
        "value_ptr": TYPES[loaded[1].dtype],
        "key_scale_ptr": scale_pointer,
        "value_scale_ptr": scale_pointer,
        "sink_ptr": None if options.sinks is None else "*fp32",
        "table_ptr": "*i32",
        "seq_len_ptr": "*i32",
        "query_len_ptr": None if queries == 1 or keys == "shared" else "*i32",
        "position_ptr": "*i64" if has_positions else None,
        "partial_ptr": "*fp32" if split else None,
        "sum_ptr": "*fp32" if split else None,
        "error_ptr": "*i32",
        "plan_ptr": "*i64" if keys in ("own", "shared") else None,
    }
    value = value or key
    strides = {"query_token": query.stride(0), "query_head": query.stride(1)}
    strides |= {"out_token": layout.num_kv_heads * group * value_size, "out_head": value_size}
    for name, rows, data in zip(("key", "value"), (key, value), loaded, strict=True):
        parts = ("block", "offset", "head", "run")
        strides |= {f"{name}_{part}": stride for part, stride in zip(parts, data.stride(), strict=False)}
        scales = (0, 0, 0) if rows.scales is None else rows.scales.stride()
        strides |= {f"{name}_scale_{part}": stride for part, stride in zip(parts, scales, strict=False)}
    kernel = fixed_attention_kernel if keys == "fixed" else paged_attention_kernel
    launch = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": keys != "fixed"}
    return compile_kernel(kernel, arch, pointers, strides, constants, **launch)


def compile_fixed(arch, **of_case):
    """Attention in fixed splits, and what adds them up."""
    constants = attention_constants(arch, **of_case)
    pointers = {"out_ptr": TYPES[of_case["query_dtype"]], "partial_ptr": "*fp32", "sum_ptr": "*fp32"}
    pointers |= {"seq_len_ptr": "*i32", "query_len_ptr": "*i32"}
    strides = {"out_token": 32 * of_case["value_size"], "out_head": of_case["value_size"]}
    merge = compile_kernel(merge_fixed_kernel, arch, pointers, strides, {"A": constants}, **FIXED_MERGE_OPTIONS)
    return compile_attention(arch, **of_case), merge


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
            elif name not in ("sink_ptr", "table_ptr", "seq_len_ptr", "query_len_ptr", "position_ptr", "plan_ptr"):
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif name in ("table_stride", "plan_stride"):
            signature[name] = "i32"
        elif name.endswith("_stride"):
            constants |= specialised(signature, attributes, i, name, strides[name.removesuffix("_stride")])
        else:
            signature[name] = "fp32" if name in ("factor", "softcap") else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
