"""The executor that writes into what was retrieved, against the one that leaves it alone."""

import pytest
import torch
from integrations.test_executor import ROTARY, Forward

from kvpage.integrations.lmcache import CacheBlendImpl


def blended(forward: Forward, executor: CacheBlendImpl) -> list[torch.Tensor]:
    """All that four layers give. What they are handed must be there afterwards, or hold what they give."""
    rows, results = torch.arange(forward.bounds[-1]), []
    for layer in range(4):
        given = [forward.shaped(part).clone() for part in forward.retrieved[layer]]
        before = [part.clone() for part in given]
        fresh = [forward.shaped(part[rows]) for part in forward.fresh[layer]]
        output = executor.blend(
            layer, *given, forward.valid, forward.original, *fresh, forward.positions[rows],
            torch.tensor(forward.bounds), forward.token_dim,
        )  # fmt: skip
        mixes = executor.in_place and executor.selection is not None and len(rows) < len(forward.valid)
        for part, old, found in zip(given, before, (output.k, output.v), strict=True):
            assert (found is part) == mixes
            assert mixes or torch.equal(part.view(torch.uint8), old.view(torch.uint8))
        results += [output.q, output.k, output.v, output.positions, output.local_indices]
        rows = rows[output.local_indices]
    return results


@pytest.mark.parametrize("filters", [(), [(1, 0.7)]])
@pytest.mark.parametrize("token_dim", [0, 1])
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_encoders", [False, True])
def test_in_place_gives_the_same_bytes(filters, token_dim: int, moves: bool, dtype: torch.dtype, by_encoders) -> None:
    forward, zero = Forward(11, [11, 1, 20], dtype, token_dim), torch.zeros_like
    if not moves:  # rows that were not found say 0
        forward.original = forward.positions * forward.valid
    outputs = []
    for in_place in (False, True):
        rotary = None if by_encoders else ROTARY
        executor = CacheBlendImpl(0.4, 2, "kv", rotary, filters, seam=0.0, in_place=in_place)
        executor.set_positional_encoder(lambda p, q, k: (q, ROTARY.rotate(k, zero(p), p)))
        executor.set_reverse_positional_encoder(lambda p, q, k: (q, ROTARY.rotate(k, p, zero(p))))
        outputs.append(blended(forward, executor))
    for plain, found in zip(*outputs, strict=True):
        assert torch.equal(plain.contiguous().view(torch.uint8), found.contiguous().view(torch.uint8))


def test_rows_that_stay_are_taken_as_they_are() -> None:
    """Nothing is rotated by nothing: an infinite number stays one, and encoders are not needed."""
    forward = Forward(12, [15])
    forward.valid[:], forward.original = True, forward.positions
    for k, v in forward.retrieved:
        k.nan_to_num_(), v.nan_to_num_()
        k[:, ::2] = float("inf")
    executor, rows = CacheBlendImpl(0.2), torch.arange(15)
    for layer in range(3):
        output = forward.blend(executor, layer, rows)
        rows = rows[output.local_indices]
    kept = executor.selection.places < 0
    assert torch.equal(output.k[kept], forward.retrieved[2][0][kept])
