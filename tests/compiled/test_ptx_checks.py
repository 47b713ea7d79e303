"""The interpreter of PTX refuses what a device would not do as written: bounds, alignment, races, lost barriers."""

import numpy as np
import pytest
from support.ptx.kernel import Kernel, random_picks
from support.ptx.scalars import PtxError
from support.ptx.snippet import run_snippet

U32 = np.uint32
THREADS = np.arange(64, dtype=U32)
SHARED = ".shared .align 16 .b8 room[256];\n"
PLACE = "shl.b32 %u, %t, 2; mov.u32 %v, room; add.u32 %u, %v, %u;"  # each thread's own word
OTHER = "xor.b32 %w32, %t, 33; shl.b32 %w32, %w32, 2; add.u32 %w32, %v, %w32;"  # one of the other warp
NEAR = "xor.b32 %w32, %t, 1; shl.b32 %w32, %w32, 2; add.u32 %w32, %v, %w32;"  # one of the same warp
DECLARED = SHARED + ".reg .b32 %w32;\n"
STORE, LOAD = "st.shared.b32 [%u], %a;", "ld.shared.b32 %o0, [%w32];"


def run(text, inputs=(THREADS,), outputs=(U32,), **options):
    return run_snippet(text, inputs, outputs, DECLARED, **options)


@pytest.mark.parametrize(
    "text, match",
    [
        ("st.global.b32 [%at_o0+252], %a;", "out of bounds"),
        ("st.global.b32 [%at_o0+-4], %a;", "out of bounds"),
        ("ld.global.v2.b32 {%u, %v}, [%at_a];", "out of bounds|misaligned"),
        ("ld.global.b32 %u, [%at_a+2];", "out of bounds|misaligned"),
        ("mov.u64 %w, 0; ld.global.b32 %u, [%w];", "out of bounds"),
        (f"{PLACE} ld.shared.b32 %o0, [%u+4];", "out of bounds"),
        (f"{PLACE} ld.shared.b16 %o0, [%u+1];", "misaligned"),
        ("cp.async.ca.shared.global [room], [%at_a+256], 4;", "out of bounds"),
        ("ld.param.u64 %w, [p_o0+8];", "parameters"),
    ],
)
def test_memory_is_left_alone_where_it_is_not_ones_own(text, match):
    with pytest.raises(PtxError, match=match):
        run(text)


def test_a_failed_launch_writes_nothing():
    memory = np.zeros(64, U32)
    with pytest.raises(PtxError, match="out of bounds"):
        run("st.global.b32 [%at_a], 7; st.global.b32 [%at_o0+252], 7;", [memory])
    assert not memory.any()


@pytest.mark.parametrize("text", ["frob.b32 %o0, %a;", "mov.u32 %o0, %nothing;", "mad.hi.s32 %o0, %a, %a, %a;"])
def test_what_is_not_known_is_refused_before_anything_runs(text):
    with pytest.raises(PtxError):
        run(f"@%p {text}")


@pytest.mark.parametrize(
    "text",
    [
        f"{PLACE} {OTHER} {STORE} {LOAD}",  # read after write
        f"{PLACE} {OTHER} ld.shared.b32 %o0, [%u]; st.shared.b32 [%w32], %a;",  # write after read
        f"{PLACE} {OTHER} {STORE} st.shared.b32 [%w32], %a;",  # write after write
        f"{PLACE} {NEAR} {STORE} {LOAD}",  # inside a warp
        f"{PLACE} {OTHER} {STORE} bar.warp.sync 0xffffffff; {LOAD}",  # only warps are ordered
        "st.shared.b32 [room], %a;",  # in one instruction
        f"{PLACE} {OTHER} cp.async.ca.shared.global [%u], [%at_a], 4; cp.async.wait_all; {LOAD}",
        f"{PLACE} {OTHER} ld.shared.b32 %o0, [%w32]; cp.async.ca.shared.global [%u], [%at_a], 4;",
        "ld.param.u64 %w, [p_o0]; st.global.b32 [%w], %a;",
        "ld.param.u64 %w, [p_a]; ld.global.b32 %u, [%w+4]; st.global.b32 [%at_a], %u;",
    ],
)
def test_races_are_found(text):
    with pytest.raises(PtxError, match="race"):
        run(text)
    run(text, finds_races=False) if "[room], %a" not in text and "[%w], %a" not in text else None


@pytest.mark.parametrize(
    "text, partner",
    [
        (f"{PLACE} {OTHER} {STORE} bar.sync 0; {LOAD}", 33),
        (f"{PLACE} {NEAR} {STORE} bar.warp.sync 0xffffffff; {LOAD}", 1),
        (f"{PLACE} {OTHER} {STORE} bar.sync 0; {LOAD} bar.sync 0; {STORE}", 33),
        (f"{PLACE} {OTHER} cp.async.ca.shared.global [%u], [%at_a], 4; cp.async.wait_all; bar.sync 0; {LOAD}", 33),
    ],
)
def test_a_barrier_orders_what_is_in_front_of_it(text, partner):
    given = THREADS * 3 + 1
    assert run(text, [given])[0].tolist() == given[THREADS ^ partner].tolist()


def test_threads_may_read_one_place_together():
    text = "setp.eq.u32 %p, %t, 5; @%p st.shared.b32 [room], %a; bar.sync 0; ld.shared.b32 %o0, [room];"
    assert run(text)[0].tolist() == [5] * 64


def test_asynchronous_copies_land_where_they_are_waited_for():
    """The first of two groups has landed after a wait that leaves one; bytes that are not wanted become zero."""
    copy = f"{PLACE} st.shared.b32 [%u], 9; cp.async.ca.shared.global [%u], [%at_a], 4, %b;"
    groups = f"{copy} cp.async.commit_group; ld.shared.b32 %o0, [%u]; cp.async.commit_group; cp.async.wait_group 1;"
    given, wanted = THREADS + 0x01010101, np.where(THREADS % 2 == 0, 4, 2).astype(U32)
    before, after = run(f"{groups} ld.shared.b32 %o1, [%u];", [given, wanted], [U32, U32])
    assert before.tolist() == [9] * 64
    assert after.tolist() == np.where(wanted == 4, given, given & 0xFFFF).tolist()


def test_shared_memory_and_registers_begin_as_garbage():
    words = run(f"{PLACE} ld.shared.b32 %o0, [%u]; mov.u32 %o1, %w32;", outputs=[U32, U32])
    assert all(len(set(each.tolist())) > 32 for each in words)


def test_only_barriers_of_all_threads_are_known():
    with pytest.raises(PtxError, match="a barrier of some threads"):
        run("bar.sync 1, 32;")


def test_threads_that_never_end_are_an_error(monkeypatch):
    monkeypatch.setattr("support.ptx.machine.execution.MAX_RUNS", 100)
    with pytest.raises(PtxError, match="do not end"):
        run("AGAIN: bra AGAIN;")


@pytest.mark.parametrize("text", ["bar.sync 0;", "shfl.sync.idx.b32 %o0, %a, 0, 31, -1;", "bar.warp.sync -1;"])
def test_a_part_of_a_warp_cannot_meet_the_rest(text):
    with pytest.raises(PtxError, match="not together"):
        run(f"setp.lt.u32 %p, %t, 16; @%p {text}")


def test_branches_meet_again():
    """Threads that take turns of different lengths come together behind the loop, where a shuffle needs all."""
    text = """mov.u32 %u, 0; mov.u32 %v, %t;
    AGAIN: setp.eq.u32 %p, %v, 0; @%p bra DONE; add.u32 %u, %u, %v; sub.u32 %v, %v, 1; bra AGAIN;
    DONE: shfl.sync.down.b32 %v, %u, 1, 31, -1; mov.u32 %o0, %u; mov.u32 %o1, %v;"""
    sums, shifted = run(text, outputs=[U32, U32])
    want = THREADS * (THREADS + 1) // 2
    assert sums.tolist() == want.tolist()
    assert shifted[:31].tolist() == want[1:32].tolist() and shifted[31] == want[31]


def test_threads_that_have_left_are_not_waited_for():
    text = "setp.ge.u32 %p, %t, 32; @%p ret; bar.sync 0; mov.u32 %o0, 1;"
    assert run(text)[0].tolist() == [1] * 32 + [0] * 32


def test_warps_may_run_in_any_order():
    ptx = """.visible .entry counted(.param .u64 out) { .reg .b64 %p; .reg .b32 %x, %y;
    ld.param.u64 %p, [out]; mov.u32 %x, %ctaid.x; atom.global.add.u32 %y, [%p], 1; bar.sync 0;
    red.global.max.u32 [%p+4], %x; ret; }"""
    for pick in (None, random_picks(1)):
        memory = np.zeros(2, U32)
        Kernel(ptx).launch(
            (3, 2, 1), 64, memory.ctypes.data.to_bytes(8, "little"), [(memory.ctypes.data, 8)], pick=pick
        )
        assert memory.tolist() == [384, 2]


@pytest.mark.parametrize("block_size", [0, 33, 1056])
def test_blocks_have_whole_warps_and_at_most_1024_threads(block_size):
    with pytest.raises(PtxError, match="block_size must be"):
        Kernel(".visible .entry nothing() { ret; }").launch((1, 1, 1), block_size, b"", [])
