"""Sensitivity: the change of a segment's rows with the text before it, measured once, when the segment is kept.

    computed by itself       [ She  was  born  in  Oslo ]
    and after other text     [ x x x x x | She  was  born  in  Oslo ]
    V differs                              ##    #    .    .    .          the sensitivity of each token

It is mostly a property of the row. A token that refers to something before the segment changes after any text; a token
that is complete by itself changes after none. So the rows to recompute are known before there is a prompt.
"""

from collections.abc import Iterable

import torch

from kvpage import ops
from kvpage.checks.tensors import as_floats


def measure_sensitivity(layers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """Measure the mean square change of each token's V, relative to that of the layer's V, as a mean over layers.

    Args:
        layers: for each layer V of the same tokens, computed alone and after other text: [num_tokens, num_kv_heads,
            head_size] of one dtype and device, contiguous in the last dimension. Each pair is let go of before the
            next one is taken.

    Returns:
        fp32 [num_tokens] on the CPU; None if V is not finite.

    Raises:
        ValueError: there are no layers, or tensors do not fit together.
        TypeError: a value is not a tensor.
    """
    total, num_layers = None, 0
    for alone, after in layers:
        change = _relative_change(alone, after)
        if total is not None and change.shape != total.shape:
            raise ValueError(f"layers must be of the same tokens, got {len(total)} and {len(change)}")
        total, num_layers = change if total is None else total.to(change.device) + change, num_layers + 1
    if total is None:
        raise ValueError("layers must be at least one, got none")
    sensitivity = (total / num_layers).cpu()
    return sensitivity if bool(sensitivity.isfinite().all()) else None


def _relative_change(alone: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    alone, after = as_floats("alone", alone, 3), as_floats("after", after, 3)
    if alone.shape != after.shape:
        raise ValueError(f"layers must hold V of one shape, got {list(alone.shape)} and {list(after.shape)}")
    all_valid = torch.ones(len(alone), dtype=torch.bool, device=alone.device)
    size = ops.row_deviation(alone, torch.zeros_like(alone), all_valid).mean()
    return ops.row_deviation(after, alone, all_valid) / size.clamp(min=torch.finfo(torch.float32).tiny)
