"""Find logits that are no numbers, before a token is chosen and before other requests can find the K and V.

    a row                          is
    [ 0.3   -inf   2.0 ]           finite: models and processors rule tokens out by -inf
    [ 0.3    nan   2.0 ]           not: a NaN anywhere makes softmax NaN everywhere
    [ 0.3   +inf   2.0 ]           not
    [ -inf  -inf  -inf ]           not: nothing is left to choose

A NaN in a token's K or V reaches the logits of every later token that attends to it. So K and V can be cached where
the last row of logits is finite.
"""

from collections.abc import Sequence

import torch


class LogitsNotFinite(ValueError):
    """Some rows of logits hold NaN or +inf, or no finite number.

    Args:
        rows: the indices of the call's requests, branches or token lists whose logits are not finite, ascending.
        names: their names in the message.
    """

    def __init__(self, rows: Sequence[int], names: Sequence[str]) -> None:
        super().__init__(rows, names)
        self.rows = list(rows)
        self.names = list(names)

    def __str__(self) -> str:
        return f"logits must be numbers, those of {', '.join(self.names)} are not"


def rows_not_finite(highest: torch.Tensor) -> list[int]:
    """Return the rows that are not finite. highest: [num_rows], the greatest logit of each, NaN if it holds one."""
    finite = torch.isfinite(highest)
    rows: list[int] = [] if bool(finite.all()) else (~finite).nonzero().flatten().tolist()
    return rows


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row, int64; -1 for rows that hold NaN or +inf, or no finite number.

    logits: [num_rows, vocab_size].
    """
    highest, tokens = logits.max(dim=-1)
    # torch.where would copy the -1 to the device, and wait.
    return tokens.masked_fill_(~torch.isfinite(highest), -1)
