"""What temperature, top_k, top_p and min_p leave of the logits, for many sequences with parameters of their own.

    scores / temperature, the likeliest at 0      0   -0.4   -1.1   -3.0   -7.2
    top_k=3: the 3rd is at -1.1                                 |
    top_p=0.8: of these, 2 make up 0.8                  |
    min_p=0.2: log 0.2 is at -1.6                                  |
    the highest threshold rules                   0   -0.4

Only top_p, and a large top_k, sort anything: for top_p it is what reaches a bound that the threshold cannot lie below.
Of equals all stay.
"""

import numpy as np
import numpy.typing as npt
import torch

BLOCK = 128
"""Scores whose greatest one, and whose sum of weights, are looked at as one."""

LEAST_TEMPERATURE, MOST_TEMPERATURE = 2.0**-126, 3e38
"""Others are taken for these, fp32's least normal number and about its greatest."""

LEAST_SCORE = -87.0
"""Its weight is 1.6e-38 of the likeliest token's, and taken for 0."""

FEW = 512
"""Up to so many of a row are taken by selection, more by sorting it."""


def scale(scores: torch.Tensor, temperatures: npt.NDArray[np.float64]) -> None:
    """Shifts each row until its greatest is 0, and divides it by its temperature, in place: fp32 [n, columns].

    Dividing can then only send the others to -inf, never to inf - inf.
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
    """Sends what cannot be drawn to -inf, in place. scores: what `scale` left; each parameter: [n], where 0, 1 and 0
    cut nothing off.
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
    """exp(scores), in place; 0 below LEAST_SCORE, where exp would leave the normal numbers and take long."""
    return torch.nn.functional.threshold(scores.clamp_(min=LEAST_SCORE).exp_(), 2e-38, 0.0, inplace=True)


def in_blocks(scores: torch.Tensor) -> torch.Tensor:
    """[n, columns], a whole number of blocks, as [n, blocks, BLOCK]."""
    return scores.unflatten(1, (-1, BLOCK))


def block_maxima(scores: torch.Tensor) -> torch.Tensor:
    """The greatest score of each block: [n, blocks]."""
    return in_blocks(scores).amax(dim=-1)


def _kth_greatest(scores: torch.Tensor, ks: npt.NDArray[np.int64]) -> torch.Tensor:
    """The ks[i]-th greatest of row i: [n]."""
    most = int(ks.max())
    ordered = scores.topk(most).values if most <= FEW else _descending(scores)
    return ordered.gather(1, _index(ks - 1).to(scores.device)[:, None]).squeeze(1)


def _nucleus(scores: torch.Tensor, thresholds: torch.Tensor, top_p: npt.NDArray[np.float64]) -> torch.Tensor:
    """The score of the last of the likeliest that make up `top_p` of what reaches the threshold: [n].

    Tokens of less than (1 - top_p) / columns of the whole make up less than 1 - top_p: none is needed.
    """
    share = torch.from_numpy(top_p).to(scores.device)[:, None]
    kept = scores.masked_fill(scores < thresholds[:, None], -torch.inf)
    total = in_blocks(to_weights(kept.clone())).sum(dim=-1).double().sum(dim=-1, keepdim=True)
    bound = ((1 - share) * total / scores.shape[1]).log() - 1e-3
    ordered = _descending(_candidates(kept, bound.float()))
    weights = ordered.double().exp()
    is_needed = weights.cumsum(dim=-1) - weights < share * total
    last = is_needed.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, last).squeeze(1)


def _candidates(scores: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Of each row the scores that reach its bound, in some order, filled up with -inf; or all. bounds: [n, 1]."""
    reach = scores >= bounds
    counts = reach.sum(dim=-1)
    width = int(counts.max())
    if 4 * width > scores.shape[1]:
        return scores
    rows, columns = reach.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=scores.device) - (counts.cumsum(0) - counts)[rows]
    found = scores.new_full((len(scores), max(width, 1)), -torch.inf)
    found[rows, places] = scores[rows, columns]
    return found


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """Each row by itself; by numpy where it can be, which sorts with vectors."""
    if scores.device.type != "cpu":
        return scores.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)


def _index(rows: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(rows)
