"""How much the rows of a segment change with what stands before them, measured once, when the segment is kept.

    computed by itself       [ She  was  born  in  Oslo ]
    and behind something     [ x x x x x | She  was  born  in  Oslo ]
    V differs                              ##    #    .    .    .          the sensitivity of each token

It is mostly the row's own: what refers to something before the segment changes behind anything, what says all by
itself changes behind nothing. So the rows that will need recomputing are known before there is a prompt.
"""

from collections.abc import Iterable

import torch

from kvpage import ops
from kvpage.checks.tensors import as_floats


def measure_sensitivity(layers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """Of each token, how far V is from what it was, a mean square over that of the layer's V; the mean over layers.

    layers: of each layer V of the same tokens, computed with nothing before them and behind something else:
        [num_tokens, num_kv_heads, head_size] of one dtype and device, contiguous in the last dimension. Each pair is
        let go of before the next one is taken.

    fp32 [num_tokens], on the CPU; None where V is not finite. ValueError for no layers, and with TypeError for tensors
    that do not fit each other.
    """
    total, num_layers = None, 0
    for alone, behind in layers:
        change = _relative_change(alone, behind)
        if total is not None and change.shape != total.shape:
            raise ValueError(f"layers must be of the same tokens, got {len(total)} and {len(change)}")
        total, num_layers = change if total is None else total.to(change.device) + change, num_layers + 1
    if total is None:
        raise ValueError("layers must be at least one, got none")
    found = (total / num_layers).cpu()
    return found if bool(found.isfinite().all()) else None


def _relative_change(alone: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    alone, behind = as_floats("alone", alone, 3), as_floats("behind", behind, 3)
    if alone.shape != behind.shape:
        raise ValueError(f"layers must hold V of one shape, got {list(alone.shape)} and {list(behind.shape)}")
    everything = torch.ones(len(alone), dtype=torch.bool, device=alone.device)
    size = ops.row_deviation(alone, torch.zeros_like(alone), everything).mean()
    return ops.row_deviation(behind, alone, everything) / size.clamp(min=torch.finfo(torch.float32).tiny)
