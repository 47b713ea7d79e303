"""Which tokens of a blended prompt are computed again: those whose fresh K or V differ most from the retrieved ones.

deviation  [ .0  .1  .9  NaN .2 | .3  .8  .1 ]      two requests; the fourth row is invalid
always              4 (invalid), 5 and 8 (the last of each request)
ratio 1/3     1 of 4 valid rows: 3                  1 of 3: 7
chosen        [  .   .   #   #   # |  .   #   # ]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpage import ops
from kvpage.blend.indices import as_mask
from kvpage.blend.mixing import as_rows
from kvpage.sequence_args import as_list
from kvpage.tensor_args import as_bounds, as_dim, as_floats, as_ratio

METRICS = ("k", "v", "kv")


@dataclass(frozen=True, slots=True)
class Selection:
    """What the check layer has chosen, for the layers behind it.

    indices: int64, the chosen rows, ascending. query_start_loc: int64 [num_requests + 1], where each request's chosen
        rows begin, and the end. deviation: fp32 [num_tokens], 0 in invalid rows. num_tokens: of all rows.
    """

    indices: torch.Tensor
    query_start_loc: torch.Tensor
    deviation: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.deviation)

    @property
    def places(self) -> torch.Tensor:
        """int64 [num_tokens]: which of the chosen rows each row is, or -1."""
        places = torch.full((self.num_tokens,), -1, device=self.indices.device)
        places[self.indices] = torch.arange(len(self.indices), device=self.indices.device)
        return places


def token_deviation(fresh: torch.Tensor, retrieved: torch.Tensor, valid: torch.Tensor, token_dim: int) -> torch.Tensor:
    """The mean squared difference of each token, in fp32: [num_tokens]; 0 where `valid` is False, whatever is there.

    fresh, retrieved: one shape. valid: bool [num_tokens]. TypeError or ValueError for anything else.
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


def select_tokens(
    deviation: torch.Tensor, valid: torch.Tensor, query_start_loc: Sequence[int], ratios: Sequence[float]
) -> Selection:
    """Of each request: every invalid row, the last row, and the share `ratio` of the valid rows, those of the largest
    deviation (of equals the first). A ratio over 0 takes at least one, 1 takes all, 0 takes none.

    deviation: fp32 [num_tokens]. valid: bool. query_start_loc: [num_requests + 1]. ratios: one a request. TypeError or
    ValueError for anything else.
    """
    deviation, valid = as_floats("deviation", deviation, 1), as_mask(valid)
    if len(valid) != len(deviation) or valid.device != deviation.device:
        raise ValueError(
            f"valid must be of {len(deviation)} tokens on {deviation.device}, got {len(valid)} on {valid.device}"
        )
    query_start_loc = as_bounds("query_start_loc", query_start_loc, len(deviation))
    ratios = [as_ratio("ratios", ratio) for ratio in as_list("ratios", ratios)]
    if len(ratios) != len(query_start_loc) - 1:
        raise ValueError(f"ratios must be one for each of {len(query_start_loc) - 1} requests, got {len(ratios)}")
    chosen = ~valid
    for begin, end, ratio in zip(query_start_loc[:-1], query_start_loc[1:], ratios, strict=True):
        if end > begin:
            chosen[begin + _largest(deviation[begin:end], valid[begin:end], ratio)] = True
            chosen[end - 1] = True
    before = torch.cat([torch.zeros(1, dtype=torch.int64, device=chosen.device), chosen.cumsum(0)])
    starts = before[torch.tensor(query_start_loc, device=chosen.device)]
    return Selection(chosen.nonzero().flatten(), starts, deviation)


def _largest(deviation: torch.Tensor, valid: torch.Tensor, ratio: float) -> torch.Tensor:
    """Indices of the valid rows that differ most."""
    num_valid = int(valid.sum())
    count = min(num_valid, max(int(num_valid * ratio), 1)) if ratio > 0 else 0
    ranked = deviation.masked_fill(~valid, -1.0).sort(descending=True, stable=True).indices
    return ranked[:count]
