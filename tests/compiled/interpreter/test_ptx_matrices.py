"""Matrices over the registers of warps, in the interpreter of PTX, against plain products: mma, ldmatrix, wgmma."""

import numpy as np
import pytest
from support.ptx.kernel import Kernel
from support.ptx.rounding import FP8
from support.ptx.snippet import run_snippet, snippet

U16, U32, F16, F32, S32 = np.uint16, np.uint32, np.float16, np.float32, np.int32
VALUES = (np.arange(64, dtype=U32) * 2654435761).astype(U32)


def fragment(matrix, per):
    """A matrix [rows, per * 4 of a register's columns ...] as a warp's registers: [registers, 32] of words."""
    words = np.ascontiguousarray(matrix).view(U32)  # [rows, columns / per]
    blocks = [words[r : r + 8, c : c + 4] for c in range(0, words.shape[1], 4) for r in range(0, len(words), 8)]
    return [block.reshape(-1) for block in blocks]


KINDS = {
    "tf32": (F32, 1),
    "f16": (F16, 2),
    "bf16": (U16, 2),
    "s8": (np.int8, 4),
    "e4m3": (np.uint8, 4),
    "e5m2": (np.uint8, 4),
}


def meaning(matrix, kind):
    if kind == "bf16":
        return (matrix.astype(U32) << 16).view(F32).astype(np.float64)
    return FP8[kind][matrix].astype(np.float64) if kind in FP8 else matrix.astype(np.float64)


def random_matrix(rng, shape, kind):
    dtype, _ = KINDS[kind]
    if kind == "tf32":
        return (rng.standard_normal(shape).astype(F32).view(U32) & U32(0xFFFFE000)).view(F32)
    if kind == "bf16":
        return (rng.standard_normal(shape).astype(F32).view(U32) >> 16).astype(U16)
    if kind == "f16":
        return rng.standard_normal(shape).astype(F16)
    return rng.integers(0, 100, shape).astype(dtype)


MMA = {
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32": ("f16", 8),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": ("f16", 16),
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": ("bf16", 16),
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": ("tf32", 8),
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": ("s8", 32),
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32": ("e4m3", 32),
    "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32": ("e5m2", 32),
}


@pytest.mark.parametrize("opcode", MMA)
def test_products_of_matrices(opcode):
    """mma of one warp, with registers filled as the tables of its fragments say."""
    kind, depth = MMA[opcode]
    rng, total, per = np.random.default_rng(0), S32 if kind == "s8" else F32, KINDS[kind][1]
    left, right = random_matrix(rng, (16, depth), kind), random_matrix(rng, (8, depth), kind)  # right: transposed
    added = rng.integers(-9, 9, (16, 8)).astype(total)
    a, b = fragment(left, per), fragment(right, per)
    rows = [added[r + np.arange(32) // 4, 2 * (np.arange(32) % 4) + i] for r in (0, 8) for i in (0, 1)]
    loaded = [*a, *b, *(row.view(U32) for row in rows)]
    memory = np.stack(loaded, 1).reshape(-1)  # a thread's words side by side
    n = len(loaded)
    declared = f".reg .b32 %x<{n}>;\n"
    loads = f"mad.wide.u32 %w, %t, {4 * (n - 1)}, %at_a;" + "".join(
        f"ld.global.b32 %x{i}, [%w+{4 * i}];" for i in range(n)
    )
    regs = [f"%x{i}" for i in range(n)]
    groups = [regs[: len(a)], regs[len(a) : len(a) + len(b)], regs[-4:]]
    first, second, third = ("{" + ", ".join(group) + "}" for group in groups)
    text = f"{loads} {opcode} {{%o0, %o1, %o2, %o3}}, {first}, {second}, {third};"
    got = run_many(text, memory, 4, declared, total)
    want = meaning(left, kind) @ meaning(right, kind).T + added
    for i, (r, c) in enumerate(((0, 0), (0, 1), (8, 0), (8, 1))):
        expected = want[r + np.arange(32) // 4, 2 * (np.arange(32) % 4) + c]
        np.testing.assert_allclose(got[i], expected, rtol=1e-6, atol=1e-6)


def run_many(text, memory, num_outputs, declared, dtype, num_threads=32):
    """Run in one thread block; the memory has more words than there are threads."""
    results = [np.zeros(num_threads, dtype) for _ in range(num_outputs)]
    kernel = Kernel(snippet(text, [memory.dtype], [np.dtype(dtype)] * num_outputs, declared))
    arrays = [memory, *results]
    regions = [(each.ctypes.data, each.nbytes) for each in arrays]
    kernel.launch((1, 1, 1), num_threads, kernel.pack([each.ctypes.data for each in arrays]), regions)
    return results


STORES = {
    1: "stmatrix.sync.aligned.m8n8.x1.shared.b16",
    2: "stmatrix.sync.aligned.m8n8.x2.shared.b16",
    4: "stmatrix.sync.aligned.m8n8.x4.shared.b16",
}
TRANSPOSED_STORES = {
    1: "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16",
    2: "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16",
    4: "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
}
LOADS = {
    1: "ldmatrix.sync.aligned.m8n8.x1.shared.b16",
    2: "ldmatrix.sync.aligned.m8n8.x2.shared.b16",
    4: "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
}
TRANSPOSED_LOADS = {
    1: "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16",
    2: "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16",
    4: "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
}


def registers(name, count):
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


def matrices_of(given, count):
    return [(given + U32(1000 * i)).view(U16).reshape(8, 8) for i in range(count)]


ROOM = ".shared .align 16 .b8 room[512];\n.reg .b32 %r<4>, %m<4>;\n"
GIVEN = "shl.b32 %u, %t, 4; mov.u32 %v, room; add.u32 %u, %u, %v;" + "".join(
    f"add.u32 %r{i}, %a, {1000 * i};" for i in range(4)
)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("stores, loads", [(STORES, LOADS), (STORES, TRANSPOSED_LOADS), (TRANSPOSED_STORES, LOADS)])
def test_matrices_move_between_shared_memory_and_registers(count, stores, loads):
    """What stmatrix has stored, ldmatrix loads; each row of 16 bytes lies where a thread's address says."""
    text = f"{GIVEN} {stores[count]} [%u], {registers('r', count)}; bar.sync 0;"
    text += f"{loads[count]} {registers('m', count)}, [%u];" + "".join(f"mov.u32 %o{i}, %m{i};" for i in range(count))
    got = run_snippet(text, [VALUES[:32]], [U32] * count, ROOM)
    for words, matrix in zip(got, matrices_of(VALUES[:32], count), strict=True):
        turned = stores is TRANSPOSED_STORES or loads is TRANSPOSED_LOADS
        assert words.tolist() == np.ascontiguousarray(matrix.T if turned else matrix).view(U32).reshape(-1).tolist()


@pytest.mark.parametrize("stores", [STORES, TRANSPOSED_STORES])
def test_rows_of_a_stored_matrix_are_where_the_addresses_say(stores):
    text = f"{GIVEN} {stores[1]} [%u], {{%r0}}; bar.sync 0;"
    text += "shl.b32 %u, %t, 2; add.u32 %u, %u, %v; ld.shared.b32 %o0, [%u];"
    (got,) = run_snippet(text, [VALUES[:32]], [U32], ROOM)
    (matrix,) = matrices_of(VALUES[:32], 1)
    want = np.ascontiguousarray(matrix.T if stores is TRANSPOSED_STORES else matrix)
    assert got.tolist() == want.view(U32).reshape(-1).tolist()


def swizzled(matrix):
    """Halves of rows of 128 bytes, as a warp group reads them: pieces of 16 bytes change places in each row."""
    flat, at = np.zeros(matrix.size, U16), np.arange(matrix.size) * 2
    flat[(at ^ ((at >> 7 & 7) << 4)) // 2] = matrix.view(U16).reshape(-1)
    return flat


def descriptor(start, leading, stride):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 62


def group_text(loads, products):
    """Copy the swizzled halves to shared memory, and multiply; the first product forgets what the registers held."""
    copied = "".join(f"ld.global.b32 %c, [%y+{512 * i}]; st.shared.b32 [%v+{512 * i}], %c;" for i in range(loads))
    place = "shl.b32 %u, %t, 2; mov.u32 %v, room; add.u32 %v, %v, %u; cvt.u64.u32 %w, %u;"
    place += "ld.param.u64 %y, [p_a]; add.s64 %y, %y, %w;"
    text = f"{place} {copied} fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;"
    for i, product in enumerate(products):
        text += f"setp.ne.u32 %p, {i}, 0; {product}"
    return f"{text} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


GROUPS = {
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16": "f16",
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16": "bf16",
}


def check_group(got, want):
    """[64, n] over the registers of four warps."""
    thread = np.arange(128)
    for i, words in enumerate(got):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i >> 1 & 1)
        np.testing.assert_allclose(words, want[row, 8 * (i >> 2) + 2 * (thread % 4) + (i & 1)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opcode", GROUPS)
def test_products_of_a_warp_group(opcode):
    """[64, 64] times [64, 16], both in shared memory, in four steps of 16 columns."""
    rng, kind = np.random.default_rng(1), GROUPS[opcode]
    left, right = random_matrix(rng, (64, 64), kind), random_matrix(rng, (16, 64), kind)  # right: transposed
    memory = np.concatenate([swizzled(left), swizzled(right)]).view(U32)
    places = [[descriptor(start + 32 * step, 16, 1024) for start in (0, 8192)] for step in range(4)]
    products = [
        f"mov.u64 %w, {a}; mov.u64 %y, {b}; {opcode} {registers('o', 8)}, %w, %y, %p, 1, 1, 0, 0;" for a, b in places
    ]
    declared = ".shared .align 1024 .b8 room[10240];\n.reg .b32 %c; .reg .b64 %y;\n"
    got = run_many(group_text(20, products), memory, 8, declared, F32, 128)
    check_group(got, meaning(left, kind) @ meaning(right, kind).T)


@pytest.mark.parametrize("opcode", GROUPS)
def test_products_of_a_warp_group_with_registers(opcode):
    """[64, 16] in registers times [16, 64], whose rows lie in shared memory as they are."""
    rng, kind = np.random.default_rng(2), GROUPS[opcode]
    left, right = random_matrix(rng, (64, 16), kind), random_matrix(rng, (16, 64), kind)
    fragments = np.stack([fragment(left[row : row + 16], 2) for row in range(0, 64, 16)], 1).reshape(4, 128)
    memory = np.concatenate([swizzled(right).view(U32), fragments.reshape(-1)])
    text = "shl.b32 %u, %t, 2; cvt.u64.u32 %w, %u; ld.param.u64 %y, [p_a]; add.s64 %y, %y, %w;"
    text += "".join(f"ld.global.b32 %x{i}, [%y+{2048 + 512 * i}];" for i in range(4))
    opcode = opcode.replace("n16", "n64")
    product = (
        f"mov.u64 %w, {descriptor(0, 16, 1024)}; {opcode} {registers('o', 32)}, {registers('x', 4)}, %w, %p, 1, 1, 1;"
    )
    declared = ".shared .align 1024 .b8 room[2048];\n.reg .b32 %x<4>, %c; .reg .b64 %y;\n"
    got = run_many(text + group_text(4, [product]), memory, 32, declared, F32, 128)
    check_group(got, meaning(left, kind) @ meaning(right, kind))
