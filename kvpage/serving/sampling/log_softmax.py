"""The logarithm of softmax of rows of scores, each row by itself."""

import torch

from kvpage.ops.cuda.layers import device_log_softmax


def log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return log_softmax of fp32 rows [num_rows, vocab_size], whose last dimension is contiguous.

    On a GPU torch's kernel sums a row in an order that follows from its address, so it is kvpage's.
    """
    return device_log_softmax(scores) if scores.is_cuda else torch.log_softmax(scores, dim=-1)
