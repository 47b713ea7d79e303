"""Logits that are no numbers are found before a token is chosen, and before their K and V can be found.

    a row                          is
    [ 0.3   -inf   2.0 ]           finite: models and processors rule tokens out by -inf
    [ 0.3    nan   2.0 ]           not: a NaN anywhere makes softmax NaN everywhere
    [ 0.3   +inf   2.0 ]           not
    [ -inf  -inf  -inf ]           not: nothing is left to choose

A NaN in K or V of a token reaches the logits of every later token that attends to it. So K and V whose last row is
finite can be cached.
"""

from collections.abc import Sequence

import torch


class LogitsNotFinite(ValueError):
    """Some rows of logits hold NaN or +inf, or no finite number at all.

    rows: which of what the call was given (requests, branches, token lists), ascending.
    names: how the message calls them.
    """

    def __init__(self, rows: Sequence[int], names: Sequence[str]) -> None:
        super().__init__(rows, names)
        self.rows = list(rows)
        self.names = list(names)

    def __str__(self) -> str:
        return f"logits must be numbers, those of {', '.join(self.names)} are not"


def rows_not_finite(highest: torch.Tensor) -> list[int]:
    """The rows of logits to end. highest: [num_rows], the greatest entry of each, NaN where there is one."""
    finite = torch.isfinite(highest)
    return [] if bool(finite.all()) else (~finite).nonzero().flatten().tolist()
