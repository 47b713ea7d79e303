"""Comparisons, predicates and choices in the interpreter of PTX, against plain numpy."""

import operator
import re

import numpy as np
import pytest
from support.ptx.samples import values_of
from support.ptx.snippet import run_snippet

U16, U32, F16, F32 = np.uint16, np.uint32, np.float16, np.float32
DTYPES = {"b16": U16, "s16": np.int16, "u16": U16, "b32": U32, "s32": np.int32, "u32": U32, "b64": np.uint64}
DTYPES |= {"s64": np.int64, "u64": np.uint64, "f16": F16, "f32": F32, "f64": np.float64}
FORMS = re.findall(
    r"\S+",
    """
setp.eq.b16 setp.ne.b16 setp.gt.s16 setp.lt.s16 setp.le.u16 setp.lt.u16 setp.gt.u16
setp.eq.b32 setp.ne.b32 setp.ge.s32 setp.gt.s32 setp.le.s32 setp.lt.s32 setp.ge.u32 setp.gt.u32 setp.le.u32 setp.lt.u32
setp.eq.b64 setp.ne.b64 setp.eq.s64 setp.ge.s64 setp.gt.s64 setp.le.s64 setp.lt.s64
setp.ge.u64 setp.gt.u64 setp.le.u64 setp.lt.u64
setp.eq.f32 setp.ge.f32 setp.gt.f32 setp.le.f32 setp.lt.f32 setp.ne.f32 setp.lt.f16 setp.ne.f16 setp.lt.f64 setp.ltu.f64
setp.equ.f32 setp.geu.f32 setp.gtu.f32 setp.leu.f32 setp.ltu.f32 setp.neu.f32 setp.num.f32 setp.nan.f32
""",
)


def outcome(name, a, b):
    """Compare as Python does; an ordered comparison of a NaN does not hold, an unordered one does."""
    is_nan = (a != a) | (b != b)
    if name in ("num", "nan"):
        return is_nan == (name == "nan")
    return np.where(is_nan, name.endswith("u"), getattr(operator, name[:2])(a, b))


@pytest.mark.parametrize("form", FORMS)
def test_a_comparison_and_its_opposite(form):
    _, name, kind = form.split(".")
    a, b = values_of(DTYPES[kind], 1), values_of(DTYPES[kind], 2)
    b = np.where(np.arange(len(a)) % 3 == 0, a, b)
    got = run_snippet(f"{form} %p|%q, %a, %b; selp.u32 %o0, 1, 0, %p; selp.u32 %o1, 1, 0, %q;", [a, b], [U32, U32])
    want = outcome(name, a, b)
    assert got[0].tolist() == want.tolist() and got[1].tolist() == (~want).tolist()


@pytest.mark.parametrize("form", ["setp.ne.bf16"])
def test_bf16_are_compared_as_fp32(form):
    a, b = ((values_of(F32, seed).view(U32) >> 16).astype(U16) for seed in (1, 2))
    b = np.where(np.arange(len(a)) % 3 == 0, a, b)
    got = run_snippet(f"{form} %p|%q, %a, %b; selp.u32 %o0, 1, 0, %p; selp.u32 %o1, 1, 0, %q;", [a, b], [U32, U32])
    want = outcome(form.split(".")[1], *((one.astype(U32) << 16).view(F32) for one in (a, b)))
    assert got[0].tolist() == want.tolist() and got[1].tolist() == (~want).tolist()


PAIRS = re.findall(r"\S+", "setp.ne.f16x2 setp.lt.f16x2 setp.neu.f16x2 setp.ne.bf16x2 setp.lt.bf16x2 setp.neu.bf16x2")


@pytest.mark.parametrize("form", PAIRS)
def test_both_halves_are_compared(form):
    _, name, kind = form.split(".")
    halves = [values_of(F16, seed) for seed in range(4)]
    halves[2] = np.where(np.arange(len(halves[0])) % 3 == 0, halves[0], halves[2])
    if kind == "bf16x2":
        words = [(each.astype(F32).view(U32) >> 16).astype(U32) for each in halves]
        halves = [(word << U32(16)).view(F32) for word in words]
    else:
        words = [each.view(U16).astype(U32) for each in halves]
    given = [words[0] | words[1] << U32(16), words[2] | words[3] << U32(16)]
    got = run_snippet(f"{form} %p|%q, %a, %b; selp.u32 %o0, 1, 0, %p; selp.u32 %o1, 1, 0, %q;", given, [U32, U32])
    for i in range(2):
        assert got[i].tolist() == outcome(name, halves[i], halves[2 + i]).tolist()


CHOICES = re.findall(r"\S+", "selp.b16 selp.b32 selp.b64 selp.f32 selp.s32")


@pytest.mark.parametrize("form", CHOICES)
def test_one_of_two_is_chosen(form):
    dtype = DTYPES[form.split(".")[1]]
    a, b, chooses = values_of(dtype, 1), values_of(dtype, 2), values_of(U32, 3) % 2
    (got,) = run_snippet(f"setp.eq.u32 %p, %c, 1; {form} %o0, %a, %b, %p;", [a, b, chooses], [dtype])
    np.testing.assert_array_equal(got, np.where(chooses == 1, a, b))


LOGIC = {
    "and.pred": np.logical_and, "or.pred": np.logical_or, "xor.pred": np.logical_xor,
    "not.pred": lambda a, b: ~a, "mov.pred": lambda a, b: a,
}  # fmt: skip


@pytest.mark.parametrize("form", LOGIC)
def test_logic_of_predicates(form):
    a, b = (values_of(U32, seed) % 2 for seed in (1, 2))
    inputs = "%p" if form in ("not.pred", "mov.pred") else "%p, %q"
    text = f"setp.ne.u32 %p, %a, 0; setp.ne.u32 %q, %b, 0; {form} %p, {inputs}; selp.u32 %o0, 1, 0, %p;"
    (got,) = run_snippet(text, [a, b], [U32])
    assert got.tolist() == LOGIC[form](a == 1, b == 1).tolist()


@pytest.mark.parametrize("join", ["setp.lt.and.s32", "setp.lt.or.s32", "setp.lt.xor.s32"])
def test_a_comparison_joined_with_a_predicate(join):
    a, b, other = values_of(np.int32, 1), values_of(np.int32, 2), values_of(U32, 3) % 2
    (got,) = run_snippet(f"setp.eq.u32 %q, %c, 1; {join} %p, %a, %b, %q; selp.u32 %o0, 1, 0, %p;", [a, b, other], [U32])
    joined = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[join.split(".")[2]]
    assert got.tolist() == joined(a < b, other == 1).tolist()


def test_the_threads_that_are_here():
    text = "mov.u32 %o0, 0; setp.lt.u32 %p, %a, 40; @%p activemask.b32 %o0;"
    (got,) = run_snippet(text, [np.arange(64, dtype=U32)], [U32])
    assert got.tolist() == [2**32 - 1] * 32 + [255] * 8 + [0] * 24


def test_advice_for_caches_changes_nothing():
    text = "createpolicy.fractional.L2::evict_first.b64 %w, 1.0; ld.global.L2::cache_hint.b32 %o0, [%at_a], %w;"
    given = values_of(U32, 1)
    assert run_snippet(text, [given], [U32])[0].tolist() == given.tolist()
