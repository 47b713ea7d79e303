"""The logarithm of softmax of rows of scores, each row by itself."""

import torch

from kvpage.ops.cuda.layers import device_log_softmax


def log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return log_softmax of rows [num_rows, vocab_size].

    On a GPU torch's kernel sums a row in an order that follows from its address, so it is kvpage's for fp32.
    """
    out = device_log_softmax(scores) if scores.is_cuda else None
    return torch.log_softmax(scores, dim=-1) if out is None else out
