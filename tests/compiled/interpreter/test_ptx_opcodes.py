"""Opcodes of the interpreter of PTX that work in each thread for itself, against plain Python and numpy."""

from fractions import Fraction

import numpy as np
import pytest
from support.ptx.samples import small, values_of
from support.ptx.snippet import run_snippet

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
S16, S32, S64, F16, F32, F64 = np.int16, np.int32, np.int64, np.float16, np.float32, np.float64


def each(function, dtype):
    """Apply a function of Python's integers to numbers one by one."""
    bits = 8 * np.dtype(dtype).itemsize
    return lambda *inputs: np.array(
        [function(*map(int, row)) % 2**bits for row in zip(*inputs, strict=True)], f"u{bits // 8}"
    ).view(dtype)


def truncated(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else -1


def fma_exactly(a, b, c):
    """By fractions: the nearest of the numbers around the sum, the even one of two."""
    with np.errstate(all="ignore"):
        near = (a.astype(F64) * b + c).astype(F32)
    for i in np.nonzero(np.isfinite(near) & (near != 0))[0]:
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        around = [near[i], np.nextafter(near[i], F32(np.inf)), np.nextafter(near[i], F32(-np.inf))]
        around = [one for one in around if np.isfinite(one)]
        near[i] = min(around, key=lambda one: (abs(Fraction(float(one)) - exact), one.view(U32) & 1))
    return near


def field(a, start, length):
    return a >> start & (2**length - 1)


def signed_field(a, start, length):
    end = min(start + length, 32)
    value = (a % 2**32) >> min(start, 31) & (2 ** max(end - start, 0) - 1) if length else 0
    if length and start >= 32:
        return -1 if a < 0 else 0
    return value - 2 ** (end - start) if length and value >> (end - start - 1) & 1 else value


def inserted(a, b, start, length):
    mask = (2**length - 1) << start
    return (b & ~mask) | (a << start & mask)


def permuted(a, b, selector):
    data = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    picks = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes((255 * (data[p & 7] >> 7)) if p & 8 else data[p] for p in picks), "little")


def to_bits16(numbers):
    return np.where(np.isnan(numbers), 0x7FFF, numbers.astype(F16).view(U16)).astype(U16)


def bf16_of(numbers):
    """By neighbours: of the two bf16 around a number the nearer one, of two the even one."""
    low = (numbers.view(U32) >> 16).astype(U32)
    with np.errstate(all="ignore"):
        below, above = ((word << 16).view(F32).astype(F64) for word in (low, low + U32(1)))
        limit = np.where(np.isinf(above), np.sign(above) * 2.0**128, above)
        down, up = np.abs(numbers - below), np.abs(limit - numbers)
    nearest = np.where((up < down) | ((up == down) & (low & 1 == 1)), low + U32(1), low)
    return np.where(np.isnan(numbers), 0x7FFF, np.where(np.isinf(numbers), low, nearest)).astype(U16)


def tf32_of(numbers):
    """The nearer of two numbers with 10 bits of mantissa; of two as near the larger. A NaN's bits stay."""
    words = numbers.view(U32)
    low = words & U32(0xFFFFE000)
    down, up = (np.abs(each.view(F32).astype(F64) - numbers) for each in (low, low + U32(0x2000)))
    nearest = np.where((words & U32(0x1FFF)) == 0, low, np.where(down < up, low, low + U32(0x2000)))
    return np.where(np.isnan(numbers), words, nearest)


def flushed(numbers):
    return np.where(np.abs(numbers) < 2.0**-126, np.copysign(F32(0), numbers), numbers)


def saturated(numbers):
    return np.clip(np.nan_to_num(numbers.astype(F64), nan=0), -(2.0**31), 2.0**31 - 1).astype(S32)


def quiet(function):
    def call(*inputs):
        with np.errstate(all="ignore"):
            return function(*inputs)

    return call


def widened(words):
    """bf16 to fp32."""
    return (words.astype(U32) << 16).view(F32)


def fma_of_halves(a, b, c):
    """Exact in fp64 but for the last rounding, as a product of halves has few bits."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(a.dtype)


def larger(a, b):
    """Of two zeros the positive one."""
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))


def smaller(a, b):
    return -larger(-a, -b)


BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
CASES = [
    *((f"{name}.rn.f32 %o0, %a, %b;", F32, (F32, F32), function) for name, function in BINARY.items()),
    *((f"{name}.f64 %o0, %a, %b;", F64, (F64, F64), function) for name, function in BINARY.items()),
    ("add.f16 %o0, %a, %b;", F16, (F16, F16), np.add),
    ("sub.f16 %o0, %a, %b;", F16, (F16, F16), np.subtract),
    ("mul.f16 %o0, %a, %b;", F16, (F16, F16), np.multiply),
    ("add.s32 %o0, %a, %b;", S32, (S32, S32), np.add),
    ("sub.s32 %o0, %a, %b;", S32, (S32, S32), np.subtract),
    ("add.s64 %o0, %a, %b;", S64, (S64, S64), np.add),
    ("sub.s64 %o0, %a, %b;", S64, (S64, S64), np.subtract),
    ("add.s16 %o0, %a, %b;", np.int16, (np.int16, np.int16), np.add),
    ("mul.lo.s32 %o0, %a, %b;", S32, (S32, S32), each(lambda a, b: a * b, S32)),
    ("mul.lo.s64 %o0, %a, %b;", S64, (S64, S64), each(lambda a, b: a * b, S64)),
    ("mul.lo.u16 %o0, %a, %b;", U16, (U16, U16), each(lambda a, b: a * b, U16)),
    ("mul.hi.u16 %o0, %a, %b;", U16, (U16, U16), each(lambda a, b: a * b >> 16, U16)),
    ("mul.hi.u32 %o0, %a, %b;", U32, (U32, U32), each(lambda a, b: a * b >> 32, U32)),
    ("mul.hi.s32 %o0, %a, %b;", S32, (S32, S32), each(lambda a, b: a * b >> 32, S32)),
    ("mul.hi.s64 %o0, %a, %b;", S64, (S64, S64), each(lambda a, b: a * b >> 64, S64)),
    ("mul.wide.s32 %o0, %a, %b;", S64, (S32, S32), each(lambda a, b: a * b, S64)),
    ("mul.wide.u32 %o0, %a, %b;", U64, (U32, U32), each(lambda a, b: a * b, U64)),
    ("mad.lo.s32 %o0, %a, %b, %c;", S32, (S32, S32, S32), each(lambda a, b, c: a * b + c, S32)),
    ("mad.wide.s32 %o0, %a, %b, %c;", S64, (S32, S32, S64), each(lambda a, b, c: a * b + c, S64)),
    ("div.s32 %o0, %a, %b;", S32, (S32, S32), each(truncated, S32)),
    ("div.u32 %o0, %a, %b;", U32, (U32, U32), each(truncated, U32)),
    ("div.s64 %o0, %a, %b;", S64, (S64, S64), each(truncated, S64)),
    ("rem.s32 %o0, %a, %b;", S32, (S32, S32), each(lambda a, b: a - b * truncated(a, b) if b else a, S32)),
    ("rem.u64 %o0, %a, %b;", U64, (U64, U64), each(lambda a, b: a % b if b else a, U64)),
    ("div.rn.f32 %o0, %a, %b;", F32, (F32, F32), np.divide),
    ("fma.rn.f32 %o0, %a, %b, %c;", F32, (F32, F32, F32), fma_exactly),
    ("neg.f32 %o0, %a;", F32, (F32,), np.negative),
    ("neg.s32 %o0, %a;", S32, (S32,), np.negative),
    ("abs.f32 %o0, %a;", F32, (F32,), np.abs),
    ("abs.s32 %o0, %a;", S32, (S32,), np.abs),
    ("abs.f16 %o0, %a;", F16, (F16,), np.abs),
    ("cvt.rn.bf16.f32 %o0, %a; abs.bf16 %o0, %o0;", U16, (F32,), lambda a: bf16_of(np.abs(a))),
    ("max.f32 %o0, %a, %b;", F32, (F32, F32), np.fmax),
    ("max.NaN.f32 %o0, %a, %b;", F32, (F32, F32), np.maximum),
    ("min.f32 %o0, %a, %b;", F32, (F32, F32), np.fmin),
    ("max.s32 %o0, %a, %b;", S32, (S32, S32), np.maximum),
    ("max.u32 %o0, %a, %b;", U32, (U32, U32), np.maximum),
    ("max.u16 %o0, %a, %b;", U16, (U16, U16), np.maximum),
    ("min.u32 %o0, %a, %b;", U32, (U32, U32), np.minimum),
    ("min.s64 %o0, %a, %b;", S64, (S64, S64), np.minimum),
    ("sqrt.rn.f32 %o0, %a;", F32, (F32,), np.sqrt),
    ("rcp.rn.f32 %o0, %a;", F32, (F32,), np.reciprocal),
    ("rsqrt.approx.f32 %o0, %a;", F32, (F32,), lambda a: (1 / np.sqrt(a.astype(F64))).astype(F32)),
    ("ex2.approx.f32 %o0, %a;", F32, (F32,), lambda a: np.exp2(a.astype(F64)).astype(F32)),
    ("lg2.approx.f32 %o0, %a;", F32, (F32,), lambda a: np.log2(a.astype(F64)).astype(F32)),
    ("and.b32 %o0, %a, %b;", U32, (U32, U32), np.bitwise_and),
    ("or.b32 %o0, %a, %b;", U32, (U32, U32), np.bitwise_or),
    ("or.b64 %o0, %a, %b;", U64, (U64, U64), np.bitwise_or),
    ("xor.b16 %o0, %a, %b;", U16, (U16, U16), np.bitwise_xor),
    ("not.b32 %o0, %a;", U32, (U32,), np.invert),
    ("shl.b32 %o0, %a, %b;", U32, (U32, 40), each(lambda a, n: a << n, U32)),
    ("shr.u32 %o0, %a, %b;", U32, (U32, 40), each(lambda a, n: a >> n, U32)),
    ("shr.s32 %o0, %a, %b;", S32, (S32, 40), each(lambda a, n: a >> n, S32)),
    ("shl.b64 %o0, %a, %b;", U64, (U64, 70), each(lambda a, n: a << n, U64)),
    ("shf.l.wrap.b32 %o0, %a, %b, %c;", U32, (U32, U32, 70), each(lambda a, b, n: (b << 32 | a) << n % 32 >> 32, U32)),
    ("shf.r.clamp.b32 %o0, %a, %b, %c;", U32, (U32, U32, 70), each(lambda a, b, n: (b << 32 | a) >> min(n, 32), U32)),
    ("bfe.u32 %o0, %a, %b, %c;", U32, (U32, 36, 36), each(field, U32)),
    ("bfe.s32 %o0, %a, %b, %c;", S32, (S32, 36, 36), each(signed_field, S32)),
    ("bfi.b32 %o0, %a, %b, %c, %d;", U32, (U32, U32, 31, 32), each(inserted, U32)),
    ("lop3.b32 %o0, %a, %b, %c, 0xCA;", U32, (U32, U32, U32), lambda a, b, c: (a & b) | (~a & c)),
    ("lop3.b32 %o0, %a, %b, %c, 0x96;", U32, (U32, U32, U32), lambda a, b, c: a ^ b ^ c),
    ("prmt.b32 %o0, %a, %b, %c;", U32, (U32, U32, 65536), each(permuted, U32)),
    ("popc.b32 %o0, %a;", U32, (U32,), each(lambda a: a.bit_count(), U32)),
    ("clz.b32 %o0, %a;", U32, (U32,), each(lambda a: 32 - a.bit_length(), U32)),
    ("brev.b32 %o0, %a;", U32, (U32,), each(lambda a: int(f"{a:032b}"[::-1], 2), U32)),
    ("mov.b64 %o0, {%a, %b};", U64, (U32, U32), each(lambda a, b: b << 32 | a, U64)),
    ("mov.b64 {%u, %v}, %a; sub.u32 %o0, %u, %v;", U32, (U64,), each(lambda a: a % 2**32 - (a >> 32), U32)),
    ("setp.lt.s32 %p, %a, %b; selp.b32 %o0, %a, %b, %p;", S32, (S32, S32), np.minimum),
    ("setp.hi.u32 %p|%q, %a, %b; selp.b32 %o0, %a, %b, %q;", U32, (U32, U32), np.minimum),
    ("setp.gt.and.f32 %p, %a, %b, %q; selp.u32 %o0, 1, 0, %p;", U32, (F32, F32), None),
    ("setp.geu.f32 %p, %a, %b; selp.u32 %o0, 1, 0, %p;", U32, (F32, F32), lambda a, b: ~(a < b)),
    ("setp.ne.f32 %p, %a, %b; selp.u32 %o0, 1, 0, %p;", U32, (F32, F32), lambda a, b: (a < b) | (a > b)),
    ("setp.neu.f32 %p, %a, %b; selp.u32 %o0, 1, 0, %p;", U32, (F32, F32), lambda a, b: a != b),
    ("setp.nan.f32 %p, %a, %a; selp.u32 %o0, 1, 0, %p;", U32, (F32,), np.isnan),
    ("mov.u32 %o0, 3; setp.eq.u32 %p, %a, 7; @%p mov.u32 %o0, 5;", U32, (U32,), lambda a: np.where(a == 7, 5, 3)),
    ("mul.lo.s16 %o0, %a, %b;", S16, (S16, S16), each(lambda a, b: a * b, S16)),
    ("sub.s16 %o0, %a, %b;", S16, (S16, S16), np.subtract),
    ("mul.hi.u64 %o0, %a, %b;", U64, (U64, U64), each(lambda a, b: a * b >> 64, U64)),
    ("mad.lo.s64 %o0, %a, %b, %c;", S64, (S64, S64, S64), each(lambda a, b, c: a * b + c, S64)),
    ("mad.wide.u32 %o0, %a, %b, %c;", U64, (U32, U32, U64), each(lambda a, b, c: a * b + c, U64)),
    ("rem.s64 %o0, %a, %b;", S64, (S64, S64), each(lambda a, b: a - b * truncated(a, b) if b else a, S64)),
    ("rem.u32 %o0, %a, %b;", U32, (U32, U32), each(lambda a, b: a % b if b else a, U32)),
    ("min.s32 %o0, %a, %b;", S32, (S32, S32), np.minimum),
    ("min.relu.s32 %o0, %a, %b;", S32, (S32, S32), lambda a, b: np.maximum(np.minimum(a, b), 0)),
    ("add.f32 %o0, %a, %b;", F32, (F32, F32), np.add),
    ("sub.f32 %o0, %a, %b;", F32, (F32, F32), np.subtract),
    ("mul.f32 %o0, %a, %b;", F32, (F32, F32), np.multiply),
    ("add.rn.f32 %o0, %a, %b;", F32, (F32, F32), np.add),
    ("sub.rn.f32 %o0, %a, %b;", F32, (F32, F32), np.subtract),
    ("mul.rn.f32 %o0, %a, %b;", F32, (F32, F32), np.multiply),
    ("div.full.f32 %o0, %a, %b;", F32, (F32, F32), np.divide),
    ("div.approx.f32 %o0, %a, %b;", F32, (F32, F32), np.divide),
    ("ex2.approx.ftz.f32 %o0, %a;", F32, (F32,), lambda a: flushed(np.exp2(a.astype(F64)).astype(F32))),
    ("sin.approx.f32 %o0, %a;", F32, (F32,), lambda a: np.sin(a.astype(F64)).astype(F32)),
    ("cos.approx.f32 %o0, %a;", F32, (F32,), lambda a: np.cos(a.astype(F64)).astype(F32)),
    ("tanh.approx.f32 %o0, %a;", F32, (F32,), lambda a: np.tanh(a.astype(F64)).astype(F32)),
    ("and.b16 %o0, %a, %b;", U16, (U16, U16), np.bitwise_and),
    ("or.b16 %o0, %a, %b;", U16, (U16, U16), np.bitwise_or),
    ("and.b64 %o0, %a, %b;", U64, (U64, U64), np.bitwise_and),
    ("shl.b16 %o0, %a, %b;", U16, (U16, 20), each(lambda a, n: a << n, U16)),
    ("shr.u16 %o0, %a, %b;", U16, (U16, 20), each(lambda a, n: a >> n, U16)),
    ("shr.u64 %o0, %a, %b;", U64, (U64, 70), each(lambda a, n: a >> n, U64)),
    ("shr.s64 %o0, %a, %b;", S64, (S64, 70), each(lambda a, n: a >> n, S64)),
    ("mov.b32 %o0, %a;", U32, (U32,), np.array),
    ("griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 %o0, %a;", U32, (U32,), np.array),
    ("mov.u16 %o0, %a;", U16, (U16,), np.array),
    ("mov.b16 %o0, %a;", U16, (U16,), np.array),
    ("mov.b32 %o0, {%a, %b};", U32, (U16, U16), each(lambda a, b: b << 16 | a, U32)),
    ("cvt.rn.bf16.f32 %o0, %a;", U16, (F32,), bf16_of),
    ("cvt.rz.bf16.f32 %o0, %a;", U16, (F32,), lambda a: np.where(np.isnan(a), 0x7FFF, a.view(U32) >> 16)),
    ("cvt.rna.tf32.f32 %o0, %a;", U32, (F32,), tf32_of),
    ("cvt.rn.f16.s16 %o0, %a;", F16, (S16,), lambda a: a.astype(F16)),
    ("cvt.rn.f32.s16 %o0, %a;", F32, (S16,), lambda a: a.astype(F32)),
    ("cvt.rn.f32.s8 %o0, %a;", F32, (U16,), lambda a: a.astype(U8).view(np.int8).astype(F32)),
    ("cvt.s16.s8 %o0, %a;", S16, (U16,), lambda a: a.astype(U8).view(np.int8).astype(S16)),
    ("cvt.s32.s16 %o0, %a;", S32, (S16,), lambda a: a.astype(S32)),
    ("cvt.s8.s32 %u, %a; cvt.s32.s8 %o0, %u;", S32, (S32,), lambda a: a.astype(np.int8).astype(S32)),
    ("cvt.u16.u64 %o0, %a;", U16, (U64,), lambda a: a.astype(U16)),
    ("cvt.u32.u16 %o0, %a;", U32, (U16,), lambda a: a.astype(U32)),
    ("cvt.u32.u64 %o0, %a;", U32, (U64,), lambda a: a.astype(U32)),
    ("cvt.u64.u16 %o0, %a;", U64, (U16,), lambda a: a.astype(U64)),
    ("cvt.rn.f16.f32 %o0, %a;", U16, (F32,), to_bits16),
    ("cvt.rn.f16x2.f32 %o0, %a, %b;", U32, (F32, F32), lambda a, b: to_bits16(a).astype(U32) << 16 | to_bits16(b)),
    ("cvt.rn.bf16x2.f32 %o0, %a, %b;", U32, (F32, F32), lambda a, b: bf16_of(a).astype(U32) << 16 | bf16_of(b)),
    ("cvt.f32.bf16 %o0, %a;", F32, (U16,), lambda a: (a.astype(U32) << 16).view(F32)),
    ("cvt.f32.f16 %o0, %a;", F32, (F16,), lambda a: a.astype(F32)),
    ("cvt.rn.f32.s32 %o0, %a;", F32, (S32,), lambda a: a.astype(F32)),
    ("cvt.rn.f32.u64 %o0, %a;", F32, (U64,), lambda a: a.astype(F32)),
    ("cvt.rzi.s32.f32 %o0, %a;", S32, (F32,), lambda a: saturated(a)),
    ("cvt.rni.s32.f32 %o0, %a;", S32, (F32,), lambda a: saturated(np.rint(a))),
    ("cvt.s64.s32 %o0, %a;", S64, (S32,), lambda a: a.astype(S64)),
    ("cvt.u64.u32 %o0, %a;", U64, (U32,), lambda a: a.astype(U64)),
    ("cvt.u16.u32 %o0, %a;", U16, (U32,), lambda a: a.astype(U16)),
    ("cvt.s32.s8 %o0, %a;", S32, (U32,), lambda a: a.astype(U8).view(np.int8).astype(S32)),
    ("cvt.sat.s8.s32 %u, %a; cvt.s32.s8 %o0, %u;", S32, (S32,), lambda a: np.clip(a, -128, 127)),
]  # fmt: skip


@pytest.mark.parametrize("text, out, inputs, expected", CASES, ids=[case[0] for case in CASES])
def test_an_instruction_gives_what_numpy_gives(text, out, inputs, expected):
    given = [small(i, kind) if isinstance(kind, int) else values_of(kind, i) for i, kind in enumerate(inputs)]
    if expected is None:
        text, expected = f"setp.lt.f32 %q, %a, 0f3F800000; {text}", lambda a, b: (a > b) & (a < 1)
    (got,) = run_snippet(text, given, [out])
    want = np.asarray(quiet(expected)(*given)).astype(out)
    np.testing.assert_array_equal(got, want)
    if out in (F16, F32) and not text.startswith(("max", "min", "neg", "abs")):
        assert not np.signbit(got[np.isnan(got)]).any(), "arithmetic gives one NaN, the positive one"
        np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(want)[~np.isnan(want)])


PAIRS = {
    "add.f16x2": np.add, "mul.f16x2": np.multiply, "sub.f16x2": np.subtract, "max.f16x2": larger,
    "min.f16x2": smaller, "abs.f16x2": np.abs, "neg.f16x2": np.negative, "fma.rn.f16x2": fma_of_halves,
    "add.bf16x2": np.add, "mul.bf16x2": np.multiply, "sub.bf16x2": np.subtract, "max.bf16x2": larger,
    "min.bf16x2": smaller, "abs.bf16x2": np.abs, "neg.bf16x2": np.negative, "fma.rn.bf16x2": fma_of_halves,
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_both_halves_of_a_register(name):
    """bf16 is computed in fp32, and rounded once."""
    count = {"abs": 1, "neg": 1, "fma": 3}.get(name[:3], 2)
    is_bf16 = "bf16" in name
    kind, decoded, rounded = (F32, widened, bf16_of) if is_bf16 else (F16, np.array, to_bits16)
    sides = [[values_of(kind, 3 * side + i) for i in range(count)] for side in range(2)]
    words = [[bf16_of(one) if is_bf16 else one.view(U16) for one in side] for side in sides]
    given = [low.astype(U32) | high.astype(U32) << U32(16) for low, high in zip(*words, strict=True)]
    (got,) = run_snippet(f"{name} %o0{''.join(f', %{letter}' for letter in 'abc'[:count])};", given, [U32])
    for side, shift in zip(words, (0, 16), strict=True):
        want = quiet(PAIRS[name])(*(decoded(each) if is_bf16 else each.view(F16) for each in side))
        np.testing.assert_array_equal((got >> U32(shift)).astype(U16), rounded(want.astype(F32) if is_bf16 else want))


def test_a_sum_of_zeros_and_the_smaller_zero():
    zeros, signed = np.array([0.0, -0.0, 0.0, -0.0], F32), np.array([0.0, -0.0, -0.0, 0.0], F32)
    got = run_snippet("min.f32 %o0, %a, %b; max.f32 %o1, %a, %b;", [zeros, signed], [F32, F32])
    assert np.signbit(got[0]).tolist() == [False, True, True, True]
    assert np.signbit(got[1]).tolist() == [False, True, False, False]


def test_subnormals_are_flushed_where_asked():
    tiny = np.array([1e-40, -1e-40, 1.0, -0.0], F32)
    (got,) = run_snippet("add.ftz.f32 %o0, %a, 0f80000000;", [tiny], [F32])
    np.testing.assert_array_equal(got.view(U32), np.array([0.0, -0.0, 1.0, -0.0], F32).view(U32))


EIGHT = {
    "float8_e4m3fn": ("cvt.rn.f16x2.e4m3x2", "cvt.rn.satfinite.e4m3x2.f32"),
    "float8_e5m2": ("cvt.rn.f16x2.e5m2x2", "cvt.rn.satfinite.e5m2x2.f32"),
}


@pytest.mark.parametrize("torch_name", EIGHT)
def test_8_bit_floats(torch_name):
    """Every code to fp16; every fp16 in a register's halves, saturated, to a code."""
    torch, (widens, narrows) = pytest.importorskip("torch"), EIGHT[torch_name]
    codes = np.arange(256, dtype=U16)
    (got,) = run_snippet(f"{widens} %o0, %a;", [codes], [U32])
    want = torch.arange(256).to(torch.uint8).view(getattr(torch, torch_name)).half().numpy()
    np.testing.assert_array_equal((got & 0xFFFF).astype(U16).view(F16), want)
    numbers = np.linspace(-70000, 70000, 500, dtype=F32) * np.geomspace(1e-9, 1, 500, dtype=F32)
    (codes,) = run_snippet(f"{narrows} %o0, %b, %a;", [numbers, -numbers], [U16])
    most = torch.finfo(getattr(torch, torch_name)).max
    for values, got in ((numbers, codes & 255), (-numbers, codes >> 8)):
        want = torch.from_numpy(values).clamp(-most, most).to(getattr(torch, torch_name)).view(torch.uint8)
        np.testing.assert_array_equal(got, want.numpy())
