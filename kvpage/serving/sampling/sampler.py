"""The next token of each sequence, from its logits and its request's SamplingParams.

Greedy rows without penalties and the like take the argmax, all in one call. The others are processed and drawn, as many
at once as stay in the processor's cache, by inverting the distribution function at a number that depends on the
request's seed and on how many tokens it has, and on nothing else: not on the batch, and not on whether a step was
computed twice.

    weights   |--a--|b|------c------|d|     the first token whose running sum exceeds u * total
                            ^ u             u: Philox of seed and position
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sampling.logits_check import LogitsNotFinite, rows_not_finite
from kvpage.serving.sampling.logits_processing import TokenArrays, process_logits, warp_by_library, watermark
from kvpage.serving.sampling.philox import uniforms
from kvpage.serving.sampling.sampled_row import SampledRow
from kvpage.serving.sampling.warping import BLOCK, block_maxima, cut, in_blocks, scale, to_weights

PART_SIZE = 2**20
"""Logits that are processed at once."""

BELOW_ONE = 1 - 2.0**-53


class Sampled(Protocol):
    """A sequence that gets a next token. The serving loop's Request is one.

    tokens: int32, of which the first num_tokens count. seed: decides every draw. sampled_row: the changes to its
    logits; None where the likeliest token is taken as it is.
    """

    request_id: str
    params: SamplingParams
    tokens: npt.NDArray[np.int32]
    num_tokens: int
    seed: int
    sampled_row: SampledRow | None

    @property
    def num_generated(self) -> int:
        """How many tokens it has generated."""


def sample(logits: torch.Tensor, requests: Sequence[Sampled]) -> list[int]:
    """One token a row. logits: [len(requests), vocab_size]. LogitsNotFinite, with the rows that hold NaN or +inf, or no
    finite number at all, before or after their processing.
    """
    if not requests:
        return []
    highest, tokens = logits.max(dim=-1)
    bad = [row for row in rows_not_finite(highest) if not requests[row].params.remove_invalid_values]
    if not bad:
        for rows in _parts(requests, logits.shape[1]):
            bad += _choose(logits, requests, rows, tokens)
    if bad:
        raise LogitsNotFinite(sorted(bad), [requests[row].request_id for row in sorted(bad)])
    return tokens.tolist()


def _parts(requests: Sequence[Sampled], vocab_size: int) -> Iterator[list[int]]:
    """The rows with more to do than to take the likeliest, those that are drawn apart from the others."""
    rows = [row for row, request in enumerate(requests) if request.sampled_row is not None]
    size = max(PART_SIZE // vocab_size, 1)
    for is_greedy in (True, False) if rows else ():
        some = [row for row in rows if requests[row].params.is_greedy is is_greedy]
        yield from (some[begin : begin + size] for begin in range(0, len(some), size))


def _choose(logits: torch.Tensor, requests: Sequence[Sampled], rows: list[int], tokens: torch.Tensor) -> list[int]:
    """Sets the tokens of these rows; the rows of which nothing is left to choose from."""
    some = [requests[row] for row in rows]
    sampled = [request.sampled_row for request in some if request.sampled_row is not None]
    token_ids = [request.tokens[: request.num_tokens] for request in some]
    padded = padded_scores(logits[rows] if len(rows) < len(logits) else logits)
    scores = padded[:, : logits.shape[1]]
    process_logits(scores, sampled, token_ids)
    if some[0].params.is_greedy:
        watermark(scores, sampled, token_ids)
        highest, tokens[rows] = scores.max(dim=-1)
        return [rows[index] for index in rows_not_finite(highest)]
    if bad := rows_not_finite(block_maxima(padded).amax(dim=-1)):
        return [rows[index] for index in bad]
    warp(padded, logits.shape[1], sampled, token_ids)
    positions = [request.num_generated for request in some]
    tokens[rows] = _draw(padded, uniforms([request.seed for request in some], positions))
    return []


def padded_scores(logits: torch.Tensor) -> torch.Tensor:
    """A copy in fp32, with columns of -inf up to a whole number of blocks."""
    num_columns = -(-logits.shape[1] // BLOCK) * BLOCK
    scores = torch.empty((len(logits), num_columns), dtype=torch.float32, device=logits.device)
    scores[:, : logits.shape[1]] = logits
    scores[:, logits.shape[1] :] = -torch.inf
    return scores


def warp(padded: torch.Tensor, vocab_size: int, rows: Sequence[SampledRow], token_ids: TokenArrays) -> None:
    """Changes the scores of rows that are drawn to those that they are drawn by: logarithms of weights."""
    warpings = np.array([row.warping for row in rows])
    scale(padded, warpings[:, 0])
    cut(padded, warpings[:, 1].astype(np.int64), warpings[:, 2], warpings[:, 3], vocab_size)
    if any(row.library is not None for row in rows):
        scores = padded[:, :vocab_size]
        warp_by_library(scores, rows, token_ids)
        watermark(scores, rows, token_ids)
        padded -= block_maxima(padded).amax(dim=-1, keepdim=True)


def _draw(scores: torch.Tensor, points: np.ndarray) -> torch.Tensor:
    """A token a row, at a point in [0, 1) of its distribution: first a block, then a token in it."""
    blocks = in_blocks(to_weights(scores))
    sums = blocks.sum(dim=-1).double()
    ends = sums.cumsum(dim=-1)
    targets = torch.from_numpy(points).to(scores.device)[:, None] * ends[:, -1:]
    found = torch.searchsorted(ends, targets, right=True)
    inside = (targets - ends.gather(1, found)) / sums.gather(1, found) + 1
    weights = blocks[torch.arange(len(scores), device=scores.device), found.squeeze(1)].double().cumsum(dim=-1)
    targets = inside.clamp(0, BELOW_ONE) * weights[:, -1:]
    return (found * BLOCK + torch.searchsorted(weights, targets, right=True)).squeeze(1)
