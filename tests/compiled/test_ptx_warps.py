"""Instructions of whole warps, in the interpreter of PTX, against plain numpy: shuffles, votes, and matrices."""

import numpy as np
import pytest
from support.ptx.rounding import FP8
from support.ptx.snippet import run_snippet

U16, U32, F16, F32, S32 = np.uint16, np.uint32, np.float16, np.float32, np.int32
LANES = np.arange(64, dtype=U32)
VALUES = (LANES * 2654435761).astype(U32)
WARPS = VALUES.reshape(2, 32)


@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("mode, partner", [
    ("up", lambda lane: lane - 3), ("down", lambda lane: lane + 3), ("bfly", lambda lane: lane ^ 3),
    ("idx", lambda lane: lane // 32 * 32 + 3),
])  # fmt: skip
def test_shuffles(mode, partner, width):
    bounds = 32 - width << 8 | (0 if mode == "up" else 31)
    got, inside = run_snippet(
        f"shfl.sync.{mode}.b32 %o0|%p, %a, 3, {bounds}, -1; selp.u32 %o1, 1, 0, %p;", [VALUES], [U32, U32]
    )
    for lane in range(64):
        segment = lane // width * width
        other = segment + 3 if mode == "idx" else partner(lane)
        fits = segment <= other < segment + width
        assert got[lane] == VALUES[other if fits else lane] and inside[lane] == fits


@pytest.mark.parametrize("name, function", [
    ("add.s32", np.add), ("min.u32", np.minimum), ("max.u32", np.maximum), ("and.b32", np.bitwise_and),
    ("or.b32", np.bitwise_or), ("xor.b32", np.bitwise_xor),
])  # fmt: skip
def test_reductions_of_a_warp(name, function):
    (got,) = run_snippet(f"redux.sync.{name} %o0, %a, -1;", [VALUES], [U32])
    np.testing.assert_array_equal(got, np.repeat(function.reduce(WARPS, axis=1, dtype=U32), 32))


@pytest.mark.parametrize("given", [np.zeros(64), np.ones(64), LANES % 3 == 0, LANES > 31])
def test_votes(given):
    text = "setp.ne.u32 %p, %a, 0; vote.sync.ballot.b32 %o0, %p, -1; " + " ".join(
        f"vote.sync.{mode}.pred %q, %p, -1; selp.u32 %o{i}, 1, 0, %q;" for i, mode in ((1, "any"), (2, "all"))
    )
    ballot, some, every = run_snippet(text, [given.astype(U32)], [U32] * 3)
    warps = given.reshape(2, 32).astype(bool)
    masks = [sum(1 << i for i in range(32) if warp[i]) for warp in warps]
    assert ballot.tolist() == np.repeat(masks, 32).tolist()
    assert (
        some.tolist() == np.repeat(warps.any(1), 32).tolist() and every.tolist() == np.repeat(warps.all(1), 32).tolist()
    )


def fragment(matrix, per):
    """A matrix [rows, per * 4 of a register's columns ...] as a warp's registers: [registers, 32] of words."""
    words = np.ascontiguousarray(matrix).view(U32)  # [rows, columns / per]
    blocks = [words[r : r + 8, c : c + 4] for c in range(0, words.shape[1], 4) for r in range(0, len(words), 8)]
    return [block.reshape(-1) for block in blocks]


KINDS = {"f16": (F16, 2), "bf16": (U16, 2), "s8": (np.int8, 4), "e4m3": (np.uint8, 4), "e5m2": (np.uint8, 4)}


def meaning(matrix, kind):
    if kind == "bf16":
        return (matrix.astype(U32) << 16).view(F32).astype(np.float64)
    return FP8[kind][matrix].astype(np.float64) if kind in FP8 else matrix.astype(np.float64)


def random_matrix(rng, shape, kind):
    dtype, _ = KINDS[kind]
    if kind == "bf16":
        return (rng.standard_normal(shape).astype(F32).view(U32) >> 16).astype(U16)
    if kind == "f16":
        return rng.standard_normal(shape).astype(F16)
    return rng.integers(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("kind, depth", [("f16", 8), ("f16", 16), ("bf16", 16), ("s8", 32), ("e4m3", 32), ("e5m2", 32)])
def test_products_of_matrices(kind, depth):
    """mma of one warp, with registers filled as the tables of its fragments say."""
    rng, total, per = np.random.default_rng(0), S32 if kind == "s8" else F32, KINDS[kind][1]
    left, right = random_matrix(rng, (16, depth), kind), random_matrix(rng, (8, depth), kind)  # right: transposed
    added = rng.integers(-9, 9, (16, 8)).astype(total)
    a, b = fragment(left, per), fragment(right, per)
    rows = [added[r + np.arange(32) // 4, 2 * (np.arange(32) % 4) + i] for r in (0, 8) for i in (0, 1)]
    loaded = [*a, *b, *(row.view(U32) for row in rows)]
    memory = np.stack(loaded, 1).reshape(-1)  # a thread's words side by side
    name = {S32: "s32", F32: "f32"}[total]
    n = len(loaded)
    declared = f".reg .b32 %x<{n}>;\n"
    loads = f"mad.wide.u32 %w, %t, {4 * (n - 1)}, %at_a;" + "".join(
        f"ld.global.b32 %x{i}, [%w+{4 * i}];" for i in range(n)
    )
    regs = [f"%x{i}" for i in range(n)]
    groups = [regs[: len(a)], regs[len(a) : len(a) + len(b)], regs[-4:]]
    first, second, third = ("{" + ", ".join(group) + "}" for group in groups)
    opcode = f"mma.sync.aligned.m16n8k{depth}.row.col.{name}.{kind}.{kind}.{name}"
    text = f"{loads} {opcode} {{%o0, %o1, %o2, %o3}}, {first}, {second}, {third};"
    got = run_many(text, memory, 4, declared, total)
    want = meaning(left, kind) @ meaning(right, kind).T + added
    for i, (r, c) in enumerate(((0, 0), (0, 1), (8, 0), (8, 1))):
        expected = want[r + np.arange(32) // 4, 2 * (np.arange(32) % 4) + c]
        np.testing.assert_allclose(got[i], expected, rtol=1e-6, atol=1e-6)


def run_many(text, memory, num_outputs, declared, dtype):
    """Run in one warp; the memory has more words than there are threads."""
    from support.ptx.kernel import Kernel
    from support.ptx.snippet import snippet

    results = [np.zeros(32, dtype) for _ in range(num_outputs)]
    kernel = Kernel(snippet(text, [memory.dtype], [np.dtype(dtype)] * num_outputs, declared))
    arrays = [memory, *results]
    regions = [(each.ctypes.data, each.nbytes) for each in arrays]
    kernel.launch((1, 1, 1), 32, kernel.pack([each.ctypes.data for each in arrays]), regions)
    return results


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_move_between_shared_memory_and_registers(count, transposed):
    """What stmatrix has stored, ldmatrix loads; each row of 16 bytes lies where a thread's address says."""
    declared = ".shared .align 16 .b8 room[512];\n.reg .b32 %r<4>, %m<4>;\n"
    trans = ".trans" if transposed else ""
    vector = lambda name: "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"  # noqa: E731
    text = (
        "".join(f"add.u32 %r{i}, %a, {1000 * i};" for i in range(count))
        + (
            f"shl.b32 %u, %t, 4; mov.u32 %v, room; add.u32 %u, %u, %v;"
            f"stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%u], {vector('r')}; bar.sync 0;"
            f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {vector('m')}, [%u];"
        )
        + "".join(f"mov.u32 %o{i}, %m{i};" for i in range(count))
    )
    given = VALUES[:32]
    got = run_snippet(text, [given], [U32] * count, declared)
    for i, words in enumerate(got):
        matrix = (given + U32(1000 * i)).view(U16).reshape(8, 8)
        want = np.ascontiguousarray(matrix.T if transposed else matrix).view(U32).reshape(-1)
        assert words.tolist() == want.tolist()
