"""Selection: the tokens of a blended prompt to compute again, whose fresh K or V differ most from the retrieved ones.

One layer chooses, or several in turn, each among the rows that the one before has left (gradual filtering).

deviation  [ .0  .1  .9  NaN .2 | .3  .8  .1 ]      two requests; the fourth row is invalid
always              4 (invalid), 5 and 8 (the last of each request)
ratio 1/3     1 of 4 valid rows: 3                  1 of 3: 7
chosen        [  .   .   #   #   # |  .   #   # ]
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvpage import ops
from kvpage.blend.indices import as_mask
from kvpage.blend.mixing import as_rows
from kvpage.checks.tensors import as_bounds, as_dim, as_floats, as_ratio
from kvpage.checks.values import as_list

METRICS = ("k", "v", "kv")
SEAM = 32.0


class Stage(NamedTuple):
    """A layer that chooses, and the share of the valid rows, 0 to 1, that later layers compute."""

    layer: int
    ratio: float


def check_filters(filters: Sequence[tuple[int, float]], check_layer: int, least: int) -> tuple[Stage, ...]:
    """Return the filters as stages.

    Raises ValueError unless their layers rise, from `least` on and below the check layer, and their ratios do not rise.
    """
    stages = tuple(Stage(*as_list("filters", stage)) for stage in as_list("filters", filters))
    for layer, ratio in stages:
        if isinstance(layer, bool) or not isinstance(layer, int) or not least <= layer < check_layer:
            raise ValueError(f"filters must be of layers from {least} to under {check_layer}, got {layer!r}")
        as_ratio("filters' ratios", ratio)
    for before, after in zip(stages, stages[1:], strict=False):
        if after.layer <= before.layer or after.ratio > before.ratio:
            pairs = [tuple(stage) for stage in stages]
            raise ValueError(f"filters must have rising layers and ratios that do not rise, got {pairs}")
    return stages


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that a layer has chosen for the layers after it.

    Attributes:
        indices: int64, the chosen rows, ascending.
        query_start_loc: int64 [num_requests + 1], the begin of each request's chosen rows, and the end.
        deviation: fp32 [num_tokens], 0 in invalid rows and in rows that were not left to choose among.
    """

    indices: torch.Tensor
    query_start_loc: torch.Tensor
    deviation: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Return the number of all rows."""
        return len(self.deviation)

    @property
    def places(self) -> torch.Tensor:
        """Return for each row its place among the chosen ones, or -1: int64 [num_tokens]."""
        places = torch.full((self.num_tokens,), -1, device=self.indices.device)
        places[self.indices] = torch.arange(len(self.indices), device=self.indices.device)
        return places


def token_deviation(fresh: torch.Tensor, retrieved: torch.Tensor, valid: torch.Tensor, token_dim: int) -> torch.Tensor:
    """Return the mean squared difference of each token.

    Args:
        fresh: K or V as computed now.
        retrieved: K or V as retrieved, of the same shape.
        valid: bool [num_tokens].
        token_dim: the dimension of the tokens.

    Returns:
        fp32 [num_tokens]; 0 for tokens that are not valid.

    Raises:
        ValueError: shapes do not fit together.
        TypeError: an argument is not a tensor.
    """
    fresh, retrieved = as_floats("fresh", fresh), as_floats("retrieved", retrieved)
    token_dim = as_dim("token_dim", token_dim, retrieved)
    if fresh.shape != retrieved.shape or retrieved.dim() < 2:
        raise ValueError(
            f"fresh and retrieved must be rows of one shape, got {list(fresh.shape)} and {list(retrieved.shape)}"
        )
    if not retrieved.numel():
        return torch.zeros(retrieved.shape[token_dim], device=retrieved.device)
    fresh_rows = as_rows(fresh.to(retrieved.dtype), token_dim, None)
    return ops.row_deviation(fresh_rows, as_rows(retrieved, token_dim, None), valid)


def check_seam(seam: float) -> float:
    """Return the seam as a float. Raises ValueError unless it is a finite number, not negative."""
    if isinstance(seam, bool) or not isinstance(seam, numbers.Real) or not 0 <= seam < float("inf"):
        raise ValueError(f"seam must be finite and not negative, got {seam!r}")
    return float(seam)


def seam_weights(offsets: torch.Tensor, seam: float) -> torch.Tensor:
    """Return the weight of each row's mean squared difference: fp32, (1 + seam / (1 + offset))^2.

    offsets: of rows after the seam, where a segment begins and its context is not the one it was computed in. Text
    seldom refers far back. So deeper layers miss more near the seam than the check layer sees.
    """
    return (1.0 + seam / (1.0 + offsets.float())).square()


def offsets_after_seams(
    valid: torch.Tensor, original: torch.Tensor, positions: torch.Tensor, query_start_loc: torch.Tensor
) -> torch.Tensor:
    """Return for each row the number of rows before it that were before it already, one after the other: int64.

    valid, original, positions: of each row, [num_tokens] on one device. query_start_loc: [num_requests + 1].
    """
    here, shift = torch.arange(len(valid), device=valid.device), positions - original
    goes_on = torch.zeros_like(valid)
    goes_on[1:] = valid[1:] & valid[:-1] & (shift[1:] == shift[:-1])
    starts = query_start_loc.to(valid.device, torch.int64)[:-1]  # bytes would be taken for a mask
    goes_on[starts[starts < len(valid)]] = False
    return here - here.masked_fill(goes_on, 0).cummax(0).values


def ranks(scores: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Return for each row the share of the rows of its kind that are not ranked before it: fp32 in (0, 1].

    Larger scores are ranked first, and of equal ones the first. So scores of several kinds, each in a unit of its own,
    become comparable, and the largest ranks have the same share of every kind.

    scores: fp32 [num_rows]. kinds: int64 [num_rows].
    """
    order = scores.sort(descending=True, stable=True).indices
    order = order[kinds[order].sort(stable=True).indices]  # by kind, in each by score
    counts = torch.unique(kinds, return_counts=True)[1]
    firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    position = torch.arange(len(scores), device=scores.device) - firsts
    out = torch.empty_like(scores)
    out[order] = 1.0 - position / counts.repeat_interleave(counts)
    return out


def select_tokens(
    deviation: torch.Tensor,
    valid: torch.Tensor,
    query_start_loc: Sequence[int],
    ratios: Sequence[float],
    among: torch.Tensor | None = None,
) -> Selection:
    """Choose in each request every invalid row, the last row, and a share of the valid rows with the largest deviation.

    Of equal ones the first is chosen. A ratio over 0 takes at least one row, 1 takes all, 0 takes none.

    Args:
        deviation: fp32 [num_tokens].
        valid: bool [num_tokens].
        query_start_loc: int [num_requests + 1], the begin of each request, and the end.
        ratios: one for each request, 0 to 1.
        among: bool [num_tokens], the rows that are left to choose among; the share is still that of all valid rows.

    Returns:
        The selection.

    Raises:
        ValueError: arguments do not fit together.
        TypeError: an argument is of the wrong type.
    """
    deviation, valid = as_floats("deviation", deviation, 1), as_mask(valid)
    left = torch.ones_like(valid) if among is None else as_mask(among)
    for name, mask in (("valid", valid), ("among", left)):
        if mask.shape != deviation.shape or mask.device != deviation.device:
            raise ValueError(
                f"{name} must be of {len(deviation)} tokens on {deviation.device}, got {len(mask)} on {mask.device}"
            )
    query_start_loc = as_bounds("query_start_loc", query_start_loc, len(deviation))
    ratios = [as_ratio("ratios", ratio) for ratio in as_list("ratios", ratios)]
    if len(ratios) != len(query_start_loc) - 1:
        raise ValueError(f"ratios must be one for each of {len(query_start_loc) - 1} requests, got {len(ratios)}")
    chosen = ~valid & left
    for begin, end, ratio in zip(query_start_loc[:-1], query_start_loc[1:], ratios, strict=True):
        if end > begin:
            rows = slice(begin, end)
            chosen[begin + _largest(deviation[rows], valid[rows], left[rows], ratio)] = True
            chosen[end - 1] = True
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device=chosen.device), chosen.cumsum(0)])
    starts = before[torch.tensor(query_start_loc, device=chosen.device)]
    return Selection(chosen.nonzero().flatten(), starts, deviation)


def _largest(deviation: torch.Tensor, valid: torch.Tensor, left: torch.Tensor, ratio: float) -> torch.Tensor:
    """Return indices of the valid rows with the largest deviation, among the rows that are left."""
    num_valid, num_left = int(valid.sum()), int((valid & left).sum())
    count = min(num_left, max(int(num_valid * ratio), 1)) if ratio > 0 else 0
    ranked = deviation.masked_fill(~(valid & left), -1.0).sort(descending=True, stable=True).indices
    return ranked[:count]
