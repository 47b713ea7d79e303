"""Instructions of whole warps, in the interpreter of PTX, against plain numpy: shuffles, votes and reductions."""

import numpy as np
import pytest
from support.ptx.snippet import run_snippet

U32 = np.uint32
LANES = np.arange(64, dtype=U32)
VALUES = (LANES * 2654435761).astype(U32)
WARPS = VALUES.reshape(2, 32)


@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("form, partner", [
    ("shfl.sync.up.b32", lambda lane: lane - 3), ("shfl.sync.down.b32", lambda lane: lane + 3),
    ("shfl.sync.bfly.b32", lambda lane: lane ^ 3), ("shfl.sync.idx.b32", lambda lane: lane // 32 * 32 + 3),
])  # fmt: skip
def test_shuffles(form, partner, width):
    mode = form.split(".")[2]
    bounds = 32 - width << 8 | (0 if mode == "up" else 31)
    got, inside = run_snippet(f"{form} %o0|%p, %a, 3, {bounds}, -1; selp.u32 %o1, 1, 0, %p;", [VALUES], [U32, U32])
    for lane in range(64):
        segment = lane // width * width
        other = segment + 3 if mode == "idx" else partner(lane)
        fits = segment <= other < segment + width
        assert got[lane] == VALUES[other if fits else lane] and inside[lane] == fits


@pytest.mark.parametrize("name, function", [
    ("redux.sync.add.s32", np.add), ("redux.sync.min.u32", np.minimum), ("redux.sync.max.u32", np.maximum),
    ("redux.sync.and.b32", np.bitwise_and), ("redux.sync.or.b32", np.bitwise_or),
    ("redux.sync.xor.b32", np.bitwise_xor), ("redux.sync.max.s32", np.maximum), ("redux.sync.min.s32", np.minimum),
])  # fmt: skip
def test_reductions_of_a_warp(name, function):
    dtype = np.int32 if "s32" in name else U32
    (got,) = run_snippet(f"{name} %o0, %a, -1;", [VALUES], [U32])
    want = function.reduce(WARPS.view(dtype), axis=1, dtype=dtype)
    np.testing.assert_array_equal(got, np.repeat(want, 32).view(U32))


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
