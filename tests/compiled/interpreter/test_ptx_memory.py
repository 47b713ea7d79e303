"""Loads, stores, atomics and asynchronous copies of each width, in the interpreter of PTX: every byte is compared."""

import re

import numpy as np
import pytest
from support.ptx.snippet import run_snippet

U32, U64 = np.uint32, np.uint64
THREADS, MOST = 32, 16  # bytes of a thread's access
BYTES = np.random.default_rng(3).integers(0, 256, THREADS * MOST, dtype=np.uint8)
ROOM = ".shared .align 16 .b8 room[512];\n.reg .b64 %x<4>, %y; .reg .b16 %h<4>; .reg .b32 %w32;\n"
LOADS = re.findall(
    r"\S+",
    """
ld.global.b8 ld.global.b16 ld.global.b32 ld.global.b64 ld.global.s32 ld.global.v2.b32 ld.global.v4.b32 ld.global.v2.b64
ld.shared.b8 ld.shared.b16 ld.shared.b32 ld.shared.b64 ld.shared.s32 ld.shared.v2.b8 ld.shared.v2.b16 ld.shared.v2.b32
ld.shared.v4.b32 ld.shared.v2.b64 ld.shared.v4.b8 ld.shared.v4.b16 ld.global.u8 ld.global.s8 ld.shared.s8
ld.global.u16 ld.global.u32 ld.global.u64 ld.global.v2.u64
""",
)
STORES = re.findall(
    r"\S+",
    """
st.global.b8 st.global.b16 st.global.b32 st.global.b64 st.global.v2.b32 st.global.v4.b32 st.global.v2.b64
st.global.u8 st.global.u16 st.global.u32 st.global.u64 st.global.v2.u64
st.shared.b8 st.shared.b16 st.shared.b32 st.shared.b64 st.shared.v2.b8 st.shared.v2.b16 st.shared.v2.b32
st.shared.v4.b8 st.shared.v4.b16 st.shared.v4.b32 st.shared.v2.b64
""",
)
FILL = "shl.b32 %u, %t, 4; mov.u32 %v, room; add.u32 %v, %u, %v;"  # each thread's 16 bytes


def shape_of(form):
    """Numbers of items, bytes of one, whether it has a sign."""
    vector, kind = re.search(r"\.v(\d)\.", form), form.split(".")[-1]
    return int(vector[1]) if vector else 1, int(kind[1:]) // 8, kind[0] == "s"


def vector_of(names):
    return "{" + ", ".join(names) + "}" if len(names) > 1 else names[0]


@pytest.mark.parametrize("form", LOADS)
def test_loads(form):
    count, size, is_signed = shape_of(form)
    names = [f"%x{i}" for i in range(count)]
    words = BYTES.view(U32).reshape(THREADS, 4)
    fill = "".join(f"ld.global.b32 %w32, [%y+{4 * i}]; st.shared.b32 [%v+{4 * i}], %w32;" for i in range(4))
    where = "[%v]" if "shared" in form else "[%y]"
    text = f"{FILL} ld.param.u64 %y, [p_a]; cvt.u64.u32 %w, %u; add.s64 %y, %y, %w; {fill} bar.sync 0;"
    text += f"{form} {vector_of(names)}, {where}; " + "".join(f"mov.b64 %o{i}, %x{i};" for i in range(count))
    got = run_with_memory(text, words.reshape(-1), [U64] * count)
    items = BYTES.reshape(THREADS, MOST)[:, : count * size].copy().view(f"{'i' if is_signed else 'u'}{size}")
    for i in range(count):
        assert got[i].tolist() == items[:, i].astype(np.int64 if is_signed else U64).view(U64).tolist()


@pytest.mark.parametrize("form", STORES)
def test_stores(form):
    """What is beside a thread's bytes stays as it was."""
    count, size, _ = shape_of(form)
    shared = "shared" in form
    text = f"{FILL} ld.param.u64 %y, [p_a]; cvt.u64.u32 %w, %u; add.s64 %y, %y, %w;"
    text += "".join(f"st.shared.b32 [%v+{4 * i}], 0xEEEEEEEE;" for i in range(4))
    text += "".join(f"mad.lo.s64 %x{i}, %w, 16843009, {i * 77 + 5};" for i in range(count))
    register = "h" if size < 4 else "x"
    text += "".join(f"cvt.u16.u64 %h{i}, %x{i};" for i in range(count) if size < 4)
    place = "[%v]" if shared else "[%y]"
    text += f"{form} {place}, {vector_of([f'%{register}{i}' for i in range(count)])}; bar.sync 0;"
    if shared:
        text += "".join(f"ld.shared.b32 %w32, [%v+{4 * i}]; st.global.b32 [%y+{4 * i}], %w32;" for i in range(4))
    memory = np.full(THREADS * 4, 0xEEEEEEEE, U32)
    run_with_memory(text, memory, [], finds_races=False)
    want = np.full((THREADS, MOST), 0xEE, np.uint8)
    for i in range(count):
        values = np.arange(THREADS, dtype=U64) * U64(16 * 16843009) + U64(i * 77 + 5)
        want[:, i * size : (i + 1) * size] = values.view(np.uint8).reshape(THREADS, 8)[:, :size]
    assert memory.view(np.uint8).tolist() == want.reshape(-1).tolist()


def run_with_memory(text, memory, outputs, **options):
    """Run in one warp, whose first input is of any size."""
    from support.ptx.kernel import Kernel
    from support.ptx.snippet import snippet

    results = [np.zeros(THREADS, dtype) for dtype in outputs]
    kernel = Kernel(snippet(text, [memory.dtype], [np.dtype(each) for each in outputs], ROOM))
    arrays = [memory, *results]
    regions = [(each.ctypes.data, each.nbytes) for each in arrays]
    kernel.launch((1, 1, 1), THREADS, kernel.pack([each.ctypes.data for each in arrays]), regions, **options)
    return results


@pytest.mark.parametrize("form", ["ld.param.b32", "ld.param.b64", "ld.param.s32", "ld.param.u64"])
def test_parameters(form):
    """Each kind, after others that are aligned to their sizes."""
    from support.ptx.kernel import Kernel

    ptx = f""".visible .entry given(.param .u64 out, .param .u32 small, .param .u64 large) {{
    .reg .b64 %p, %x; ld.param.u64 %p, [out]; {form} %x, [{"large" if "64" in form else "small"}];
    st.global.b64 [%p], %x; ret; }}"""
    memory, kernel = np.zeros(1, U64), Kernel(ptx)
    given = kernel.pack([memory.ctypes.data, 0x90000001, 0x8000000000000002])
    kernel.launch((1, 1, 1), 32, given, [(memory.ctypes.data, 8)], finds_races=False)
    want = {"b32": 0x90000001, "s32": 0xFFFFFFFF90000001}.get(form[-3:], 0x8000000000000002)
    assert memory.tolist() == [want]


def test_two_parameters_at_once():
    from support.ptx.kernel import Kernel

    ptx = """.visible .entry given(.param .u64 out, .param .align 8 .b8 both[8]) { .reg .b64 %p; .reg .b32 %x, %y;
    ld.param.u64 %p, [out]; ld.param.v2.u32 {%x, %y}, [both]; st.global.v2.b32 [%p], {%y, %x}; ret; }"""
    memory, kernel = np.zeros(2, U32), Kernel(ptx)
    given = kernel.pack([memory.ctypes.data, (7).to_bytes(4, "little") + (9).to_bytes(4, "little")])
    kernel.launch((1, 1, 1), 32, given, [(memory.ctypes.data, 8)], finds_races=False)
    assert memory.tolist() == [9, 7]


ATOMICS = {
    "atom.global.gpu.acq_rel.or.b32": np.bitwise_or, "atom.global.add.u32": np.add,
    "atom.global.and.b32": np.bitwise_and, "atom.global.xor.b32": np.bitwise_xor,
    "atom.global.min.s32": np.minimum, "atom.global.max.s32": np.maximum,
    "atom.global.max.u32": np.maximum,
}  # fmt: skip


@pytest.mark.parametrize("form", ATOMICS)
def test_atomics(form):
    """One after the other, each returns what the one before it has left."""
    dtype, function = np.int32 if "s32" in form else U32, ATOMICS[form]
    given = np.random.default_rng(1).integers(0, 2**32, 64, dtype=U32)
    memory = np.full(64, 0x0F0F0F0F, U32)
    (old,) = run_snippet(f"ld.param.u64 %w, [p_b]; {form} %o0, [%w], %a;", [given, memory], [U32])
    left = [memory[:1].view(dtype)[0], *given.view(dtype)]
    want = np.array([function.reduce(np.array(left[: i + 1], dtype), dtype=dtype) for i in range(65)], dtype)
    assert old.tolist() == want[:-1].view(U32).tolist()


@pytest.mark.parametrize("form, size", [
    ("cp.async.ca.shared.global", 4), ("cp.async.ca.shared.global", 8), ("cp.async.ca.shared.global", 16),
    ("cp.async.cg.shared.global", 16),
])  # fmt: skip
def test_asynchronous_copies(form, size):
    """cp.async.commit_group ends a group, cp.async.wait_group waits for all but some."""
    text = f"""{FILL} ld.param.u64 %y, [p_a]; cvt.u64.u32 %w, %u; add.s64 %y, %y, %w;
    st.shared.b64 [%v], 0; st.shared.b64 [%v+8], 0; {form} [%v], [%y], {size};
    cp.async.commit_group; cp.async.wait_group 0; ld.shared.b64 %o0, [%v]; ld.shared.b64 %o1, [%v+8];"""
    got = run_with_memory(text, BYTES.view(U32).copy(), [U64, U64])
    want = BYTES.reshape(THREADS, MOST).copy()
    want[:, size:] = 0
    assert np.stack(got, 1).tolist() == want.view(U64).tolist()
