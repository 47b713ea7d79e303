"""RowNorm: the numbers of one root mean square norm, for kernels that norm rows beside other work."""

from typing import NamedTuple

import torch


class RowNorm(NamedTuple):
    """out = x / sqrt(mean(x**2) + eps) * (weight + weight_offset), see kvpage.ops.rms_norm.

    Attributes:
        weight: [size], in the rows' dtype.
        eps: Added to the mean square.
        weight_offset: Added to the weight.
        rounds_before_weight: Whether normalised numbers are rounded before their product with the weight.
    """

    weight: torch.Tensor
    eps: float
    weight_offset: float
    rounds_before_weight: bool
