"""Compute log-probabilities of tokens from rows of logits, for the rows that ask for them only.

    logits [7, vocab_size] ─► a few rows at once ─► fp32 ─► log_softmax ─► the token's, its rank, the likeliest ones

Each row is computed by itself, so a token's numbers depend on its logits alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpage.serving.loop.request import Request
from kvpage.serving.sampling.log_softmax import log_softmax
from kvpage.serving.text.token_logprobs import TokenLogprobs

PART_SIZE = 2**21
"""The number of logits that are processed at once."""

Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def logprobs_asked(
    logits: torch.Tensor, requests: Sequence[Request], token_ids: npt.NDArray[np.int32]
) -> dict[Request, TokenLogprobs]:
    """Return the log-probabilities of the requests that ask for them. logits, token_ids: a row and a token of each."""
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if not rows:
        return {}
    nums = [requests[row].params.logprobs or 0 for row in rows]
    logprobs = logprobs_of_rows(logits, rows, token_ids[rows], nums)
    return {requests[row]: row_logprobs for row, row_logprobs in zip(rows, logprobs, strict=True)}


def logprobs_of_rows(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Ids, nums_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of a token in each of some rows.

    logits: [any, vocab_size]. token_ids: one for each of the rows. nums_top: how many of the likeliest to name, each.
    """
    size = max(PART_SIZE // logits.shape[1], 1)
    logprobs: list[TokenLogprobs] = []
    for begin in range(0, len(rows), size):
        part = slice(begin, begin + size)
        is_run = rows[begin] + len(rows[part]) - 1 == rows[part][-1]
        part_logits = logits[rows[begin] : rows[part][-1] + 1] if is_run else logits[list(rows[part])]
        logprobs += _of_part(part_logits.float(), token_ids[part], nums_top[part])
    return logprobs


def _of_part(scores: torch.Tensor, token_ids: Ids, nums_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return those of all rows. scores: fp32 [num_rows, vocab_size]."""
    chosen = torch.from_numpy(token_ids.astype(np.int64)).to(scores.device)[:, None]
    chosen_scores = scores.gather(1, chosen)
    ranks = _ranks(scores, chosen_scores)
    logprobs = log_softmax(scores)
    ids = _likeliest(scores, min(max(nums_top), scores.shape[1]))
    tops = zip(ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True)
    numbers = zip(logprobs.gather(1, chosen)[:, 0].tolist(), ranks, tops, nums_top, strict=True)
    return [
        TokenLogprobs(logprob, rank, list(zip(top[:num], values[:num], strict=True)))
        for logprob, rank, (top, values), num in numbers
    ]


def _ranks(scores: torch.Tensor, chosen_scores: torch.Tensor) -> list[int]:
    """Return one more than how many scores of each row are greater than its own one. own: [num_rows, 1]."""
    if scores.is_cpu:  # numpy counts bits of truth, where torch sums int64
        pairs = zip(scores.numpy(), chosen_scores.numpy(), strict=True)
        return [int(np.count_nonzero(row > score)) + 1 for row, score in pairs]
    ranks: list[int] = ((scores > chosen_scores).sum(dim=-1) + 1).tolist()
    return ranks


def _likeliest(scores: torch.Tensor, num: int) -> torch.Tensor:
    """Return the columns of each row's greatest scores in order, of equal ones the first: int64 [num_rows, num]."""
    if num == 0:
        return scores.new_empty((len(scores), 0), dtype=torch.int64)
    values, ids = scores.topk(min(num + 1, scores.shape[1]))
    tied = (values[:, 1:] == values[:, :-1]).any(dim=-1)
    top_ids = ids[:, :num]
    for row in tied.nonzero()[:, 0].tolist():  # topk takes equal scores in any order
        columns = (scores[row] >= values[row, num - 1]).nonzero()[:, 0]
        order = scores[row, columns].sort(descending=True, stable=True).indices
        top_ids[row] = columns[order[:num]]
    return top_ids
