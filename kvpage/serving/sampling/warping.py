"""Apply temperature, top_k, top_p and min_p to the logits of many sequences, each with parameters of its own.

    scores / temperature, the likeliest at 0      0   -0.4   -1.1   -3.0   -7.2
    top_k=3: the 3rd is at -1.1                                 |
    top_p=0.8: of these, 2 make up 0.8                  |
    min_p=0.2: log 0.2 is at -1.6                                  |
    the highest threshold rules                   0   -0.4

Only top_p and a large top_k sort. For top_p, only scores above a lower bound of the threshold are sorted. Tokens with
equal scores stay or go together.
"""

import numpy as np
import numpy.typing as npt
import torch

BLOCK = 128
"""The number of scores in a block. A block has one maximum and one sum of weights."""

LEAST_TEMPERATURE, MOST_TEMPERATURE = 2.0**-126, 3e38
"""The bounds of temperatures: fp32's least normal number and about its greatest. Others are clipped."""

LEAST_SCORE = -87.0
"""A score below this has weight 0. The likeliest token's score is 0, so the weight is below 1.6e-38 of its."""

FEW = 512
"""The largest top_k that is found by selection. For larger ones the row is sorted."""


def scale(scores: torch.Tensor, temperatures: npt.NDArray[np.float64]) -> None:
    """Shift each row so that its maximum is 0, then divide it by its temperature, in place: fp32 [n, columns].

    So the division can overflow to -inf only, and never makes inf - inf.
    """
    clipped = np.clip(temperatures, LEAST_TEMPERATURE, MOST_TEMPERATURE).astype(np.float32)
    scores -= block_maxima(scores).amax(dim=-1, keepdim=True)
    scores /= torch.from_numpy(clipped).to(scores.device)[:, None]


def cut(
    scores: torch.Tensor,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    vocab_size: int,
) -> None:
    """Set tokens that cannot be drawn to -inf, in place.

    scores: after `scale`. top_k, top_p, min_p: [n]; 0, 1 and 0 cut nothing off.
    """
    if not (top_k.any() or (top_p < 1).any() or min_p.any()):
        return
    thresholds = torch.full((len(scores),), -torch.inf, device=scores.device)
    if len(rows := top_k.nonzero()[0]):
        thresholds[_index(rows)] = _kth_greatest(scores[_index(rows)], np.minimum(top_k[rows], vocab_size))
    if len(rows := (top_p < 1).nonzero()[0]):
        thresholds[_index(rows)] = _nucleus(scores[_index(rows)], thresholds[_index(rows)], top_p[rows])
    with np.errstate(divide="ignore"):
        lowest = torch.from_numpy(np.log(min_p).astype(np.float32)).to(scores.device)
    scores.masked_fill_(scores < torch.maximum(thresholds, lowest)[:, None], -torch.inf)


def to_weights(scores: torch.Tensor) -> torch.Tensor:
    """Exponentiate in place; 0 below LEAST_SCORE, where exp would be slow for its subnormal results."""
    return torch.nn.functional.threshold(scores.clamp_(min=LEAST_SCORE).exp_(), 2e-38, 0.0, inplace=True)


def in_blocks(scores: torch.Tensor) -> torch.Tensor:
    """Return a view [n, blocks, BLOCK] of scores [n, columns], a whole number of blocks."""
    return scores.reshape(len(scores), scores.shape[1] // BLOCK, BLOCK)


def block_maxima(scores: torch.Tensor) -> torch.Tensor:
    """Return the maximum of each block: [n, blocks]."""
    return in_blocks(scores).amax(dim=-1)


def _kth_greatest(scores: torch.Tensor, ks: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return the ks[i]-th greatest score of each row i: [n]."""
    most = int(ks.max())
    ordered = scores.topk(most).values if most <= FEW else _descending(scores)
    return ordered.gather(1, _index(ks - 1).to(scores.device)[:, None]).squeeze(1)


def _nucleus(scores: torch.Tensor, thresholds: torch.Tensor, top_p: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return the lowest score among the likeliest tokens that make up `top_p` of those at the threshold: [n].

    Tokens whose share is below (1 - top_p) / columns make up less than 1 - top_p together, so they are not needed.
    """
    share = torch.from_numpy(top_p).to(scores.device)[:, None]
    masked = scores.masked_fill(scores < thresholds[:, None], -torch.inf)
    total = in_blocks(to_weights(masked.clone())).sum(dim=-1).double().sum(dim=-1, keepdim=True)
    bound = ((1 - share) * total / scores.shape[1]).log() - 1e-3
    ordered = _descending(_candidates(masked, bound.float()))
    weights = ordered.double().exp()
    is_needed = weights.cumsum(dim=-1) - weights < share * total
    last = is_needed.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, last).squeeze(1)


def _candidates(scores: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return each row's scores from its bound up, unordered, padded with -inf; or all scores. bounds: [n, 1]."""
    reach = scores >= bounds
    counts = reach.sum(dim=-1)
    width = int(counts.max())
    if 4 * width > scores.shape[1]:
        return scores
    rows, columns = reach.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=scores.device) - (counts.cumsum(0) - counts)[rows]
    padded = scores.new_full((len(scores), max(width, 1)), -torch.inf)
    padded[rows, places] = scores[rows, columns]
    return padded


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """Sort each row. On a CPU numpy does it, with vector instructions."""
    if scores.device.type != "cpu":
        return scores.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)


def _index(rows: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(rows)
