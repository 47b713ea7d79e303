"""Numbers of 64 bits in the interpreter of PTX, against plain numpy."""

import numpy as np
import pytest
from support.ptx.samples import values_of
from support.ptx.snippet import run_snippet

U32, U64, S64, F32, F64 = np.uint32, np.uint64, np.int64, np.float32, np.float64


def values(dtype, seed):
    """Floats that fit into 64 bits: conversions of others are not defined in numpy."""
    found = values_of(dtype, seed)
    return np.where(np.abs(found) < 2.0**62, found, dtype(-2.75)) if dtype in (F32, F64) else found


CASES = [
    ("add.rn.f64 %o0, %a, %b;", F64, (F64, F64), np.add),
    ("mul.rn.f64 %o0, %a, %b;", F64, (F64, F64), np.multiply),
    ("div.rn.f64 %o0, %a, %b;", F64, (F64, F64), np.divide),
    ("max.s64 %o0, %a, %b;", S64, (S64, S64), np.maximum),
    ("xor.b64 %o0, %a, %b;", U64, (U64, U64), np.bitwise_xor),
    ("bfe.u64 %o0, %a, 7, 21;", U64, (U64,), lambda a: a >> U64(7) & U64(2**21 - 1)),
    ("setp.ge.f64 %p, %a, %b; selp.f64 %o0, %a, %b, %p;", F64, (F64, F64), np.maximum),
    ("setp.gt.f64 %p, %a, %b; selp.u32 %o0, 1, 0, %p;", U32, (F64, F64), np.greater),
    ("cvt.f64.f32 %o0, %a;", F64, (F32,), lambda a: a.astype(F64)),
    ("cvt.rn.f32.u32 %o0, %a;", F32, (U32,), lambda a: a.astype(F32)),
    ("cvt.rn.f64.s64 %o0, %a;", F64, (S64,), lambda a: a.astype(F64)),
    ("cvt.rn.f64.u64 %o0, %a;", F64, (U64,), lambda a: a.astype(F64)),
    ("cvt.rzi.s64.f32 %o0, %a;", S64, (F32,), lambda a: np.trunc(a).astype(S64)),
    ("cvt.rzi.s64.f64 %o0, %a;", S64, (F64,), lambda a: np.trunc(a).astype(S64)),
]


@pytest.mark.parametrize("code, out, dtypes, function", CASES, ids=[code.split()[0] for code, *_ in CASES])
def test_an_instruction(code, out, dtypes, function):
    inputs = [values(dtype, seed) for seed, dtype in enumerate(dtypes, 1)]
    (got,) = run_snippet(code, inputs, [out])
    with np.errstate(all="ignore"):
        want = function(*inputs).astype(out)
    np.testing.assert_array_equal(got, want)
