"""The attention kernels without a GPU: compiled ahead of time for sm_80 and sm_90, as a launch would compile them."""

import itertools
import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from support.attention_compiled import (  # noqa: E402
    CASES,
    attention_constants,
    compile_attention,
    compile_kernel,
    sizes_and_tile,
)
from support.sass import instructions, loops, printed, stack_of  # noqa: E402

from kvpage.benchmarks.compiling_driver import SHARED_MEMORY  # noqa: E402
from kvpage.kernels.attention_merge import MERGED, merge_shared_kernel, merge_splits_kernel  # noqa: E402
from kvpage.kernels.attention_plan import shared_bytes  # noqa: E402
from kvpage.kernels.prepared import HAS_DEPENDENT_LAUNCH  # noqa: E402

ARCHS = pytest.mark.parametrize("arch", [80, 90])


# Tiles are chosen by what the compiler of Triton 3.7 makes of them; others may keep a few registers in memory.
IS_TUNED_FOR = triton.__version__.startswith("3.7.")
MOST_STACK = 0 if IS_TUNED_FOR else 256
# Bytes of registers that are stored before the loops over keys and loaded after them: what the epilogue needs.
STACK_OUTSIDE = {
    ("speculative", 80): 8,
    ("speculative", 90): 8,
    ("decode mla", 90): 96,
    ("decode mla, all options", 80): 80,
    ("decode mla, all options", 90): 104,
    ("decode mla, 64 heads", 80): 56,
    ("decode mla, 64 heads", 90): 96,
    ("decode mla, blocks of 16", 80): 8,
    ("decode mla, blocks of 16", 90): 104,
    ("prefill paged", 80): 8,
    ("prefill paged", 90): 40,
    ("prefill 64", 80): 16,
    ("prefill 46", 80): 24,
    ("prefill fp32, 64", 90): 24,
    ("prefill, all options", 90): 24,
    ("prefill e4m3", 90): 8,
    ("prefill e4m3, all options", 90): 32,
    ("prefill e5m2", 90): 8,
    ("prefill int8", 90): 56,
    ("prefill int8, fp16", 90): 24,
    ("prefill 256", 90): 16,
    ("rows at positions", 90): 16,
    ("rows at positions e4m3", 90): 8,
}
NEVER_IN_LOOP = {("decode mla", 90), ("decode mla, 64 heads", 90)}  # whatever the compiler
MULTIPLIES = "HMMA|HGMMA|FFMA"


# Cases whose loop loads V, or latents, into registers when it needs them, and the type that it loads.
UNBUFFERED = {
    # Neighbours of a row of V lie apart: elements of 1 or 2 bytes, where an asynchronous copy takes 4 at least.
    "decode paged": {"bf16"},
    "prefill paged": {"bf16"},
    "decode paged int8": {"i8"},
    "decode paged e4m3": {"i8"},
    # Latents of 8 bits are K and V at once: where they are not loaded in pairs, they are widened for both in registers.
    "decode mla e4m3": {"i8"},
    "decode mla int8": {"i8"},
}


def check_shared_memory(name, arch, compiled):
    """The plan counts what the compiler takes: as much or a little more."""
    sizes, tile = sizes_and_tile(arch, **CASES[name])
    planned = shared_bytes(tile, sizes, arch)
    assert compiled.metadata.shared <= planned <= SHARED_MEMORY[arch]
    assert name in UNBUFFERED or planned <= 1.5 * compiled.metadata.shared + 4096, (planned, compiled.metadata.shared)


# Usual ones, and those whose tiles are smaller where shared memory is 99 KiB.
OTHERS = [
    "decode",
    "prefill",
    "shared keys",
    "prefill e4m3",
    "decode mla, 16 heads",
    "prefill 256",
    "decode 576",
    "decode fp32 mla",
]


@pytest.mark.parametrize("arch", [89, 100, 120])
@pytest.mark.parametrize("name", OTHERS)
def test_shared_memory_of_other_devices(name, arch):
    """sm_86 has that of sm_89."""
    check_shared_memory(name, arch, compile_attention(arch, **CASES[name]))


@ARCHS
@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name, arch):
    """But for STACK_OUTSIDE, and never where keys are multiplied; by other compilers, seldom there."""
    compiled = compile_attention(arch, **CASES[name])
    stack = stack_of(compiled)
    assert stack <= max(MOST_STACK, STACK_OUTSIDE.get((name, arch), 0))
    check_shared_memory(name, arch, compiled)
    if stack:
        bodies = loops(instructions(printed(compiled.asm["cubin"], "-sass")), MULTIPLIES)
        most = 0 if IS_TUNED_FOR or (name, arch) in NEVER_IN_LOOP else 0.05
        assert bodies and all(sum(each.name in ("LDL", "STL") for each in body) <= most * len(body) for body in bodies)


# Instructions of a warp for a tile of keys, at most: 64 keys of K and V, or the keys of a tile of latents.
MOST_INSTRUCTIONS = {
    ("decode", 90): 460,
    ("decode, all options", 90): 640,
    ("decode e4m3", 90): 480,
    ("decode e5m2", 90): 450,
    ("decode e4m3", 80): 870,
    ("decode int8", 80): 960,
    ("decode int8", 90): 960,
    ("decode mla e4m3, 16 heads", 90): 510,
    ("decode mla", 90): 860,
}


@pytest.mark.skipif(not IS_TUNED_FOR, reason="counted with Triton 3.7")
@pytest.mark.parametrize("name, arch", MOST_INSTRUCTIONS)
def test_a_tile_of_keys_takes_few_instructions(name, arch):
    sass = printed(compile_attention(arch, **CASES[name]).asm["cubin"], "-sass")
    (body,) = loops(instructions(sass), "HMMA|HGMMA")
    assert len(body) <= MOST_INSTRUCTIONS[name, arch]


@ARCHS
@pytest.mark.parametrize("name", ["decode", "prefill", "decode 64", "decode 256", "prefill, all options"])
def test_keys_and_values_are_read_16_bytes_at_a_time(name, arch):
    """What is not: lengths, sinks and entries of the table."""
    compiled = compile_attention(arch, **CASES[name])
    sass = printed(compiled.asm["cubin"], "-sass")
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", sass)) >= 16
    assert not re.findall(r"LDG\.E\.U|LDGSTS\.E\.64", sass)


@ARCHS
@pytest.mark.parametrize("name", ["prefill", "prefill mla, 16 heads", "prefill e4m3", "decode mla"])
def test_products_run_on_tensor_cores(name, arch):
    sass = printed(compile_attention(arch, **CASES[name]).asm["cubin"], "-sass")
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
def test_the_merging_kernel(arch):
    constants = {"MERGED": MERGED, "A": attention_constants(arch, **CASES["decode mla"])}
    pointers = {"out_ptr": "*bf16", "partial_ptr": "*fp32", "sum_ptr": "*fp32"}
    pointers |= {"seq_len_ptr": "*i64", "query_len_ptr": "*i64"}
    strides = {"out_token": 4096, "out_head": 512}
    compiled = compile_kernel(merge_splits_kernel, arch, pointers, strides, constants, num_warps=4)
    assert stack_of(compiled) == 0
    before, _, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert bool(after) == (arch == 90 and HAS_DEPENDENT_LAUNCH)
    if after:  # lengths, 64 bits each, are read while attention runs; its results are not
        assert set(re.findall(r"ld\.global\S*\.b(\d+)", before)) == {"64"} and "st.global" not in before
        assert re.findall(r"ld\.global\S*\.b32", after) and not re.findall(r"\bret;", before)


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_the_kernel_that_merges_shared_keys(arch):
    of_groups, own = (attention_constants(arch, **CASES[name]) for name in ("shared keys", "own keys"))
    constants = {"MERGED": MERGED, "GROUPS": of_groups, "A": own}
    pointers = {"out_ptr": "*bf16", "seq_len_ptr": "*i64", "plan_ptr": "*i64"}
    pointers |= dict.fromkeys(("partial_ptr", "sum_ptr", "group_partial_ptr", "group_sum_ptr"), "*fp32")
    strides = {"out_token": 4096, "out_head": 128}
    compiled = compile_kernel(merge_shared_kernel, arch, pointers, strides, constants, num_warps=4)
    assert stack_of(compiled) == 0
    assert not of_groups.DEPENDENT and (arch >= 90 and HAS_DEPENDENT_LAUNCH) == own.DEPENDENT
    before, _, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert bool(after) == own.DEPENDENT
    if after:  # no partial result is read before
        assert set(re.findall(r"ld\.global\S*\.b(\d+)", before)) == {"64"} and "st.global" not in before


@pytest.mark.skipif(not HAS_DEPENDENT_LAUNCH, reason="from Triton 3.4 on")
@ARCHS
def test_merging_may_begin_when_the_keys_are_read(arch):
    """Where all keys of a sequence are one split, there is nothing to be merged."""
    split, whole = (compile_attention(arch, **CASES["decode"], split=split).asm["ptx"] for split in (True, False))
    assert split.count("griddepcontrol.launch_dependents") == (arch == 90) and "griddepcontrol" not in whole
    assert arch == 80 or split.index("griddepcontrol") > split.rindex("mma.sync")


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
@pytest.mark.parametrize("name", CASES)
def test_loads_of_keys_and_values_are_under_way_while_others_are_multiplied(name, arch):
    """Two tiles of each, or more. Of other loads, only those of block ids wait in the loop: for the tile after."""
    ttgir = compile_attention(arch, **CASES[name]).asm["ttgir"]
    buffers = [int(n) for n in re.findall(r"ttg\.local_alloc\s*:.*memdesc<(\d+)x\d+x\d+x", ttgir)]
    assert buffers and min(buffers) >= 2, buffers
    for body in key_loops(ttgir):
        waits = [int(re.search(r"num = (\d+)", line)[1]) for line in body if "ttg.async_wait" in line]
        assert waits and min(waits) > 0, waits
        loaded = [re.search(r"!tt\.ptr<(\w+)>|ptr<(\w+)>", line) for line in body if "tt.load " in line]
        assert {found[1] or found[2] for found in loaded} <= {"i32"} | UNBUFFERED.get(name, set())
