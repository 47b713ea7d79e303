"""The choice of a token from each row of logits in host memory: one native call for all rows."""

import numpy as np
import torch

import kvpage._C as _C
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.reference.sampling import SamplingRecord, ruled_logits

ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.int64),  # of the draw: how many tokens were generated before
        ("top_k", np.int64),  # 0: all
        ("top_p", np.float64),  # 1: all
        ("temperature", np.float32),  # 0: the likeliest token is taken
        ("least_score", np.float32),  # the logarithm of min_p; -inf: all
    ]
)
"""A row's numbers, as csrc/sampling/row_rules.h has them."""


def sample_host_rows(logits: torch.Tensor, records: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """See kvpage.ops.sample_rows, which has checked all but the numbers in the records. ValueError for these."""
    found = [SamplingRecord.of(words) for words in records]
    for row, one in enumerate(found):
        if one.counts and not one.words:
            raise ValueError(f"records must have a table of words where tokens are counted, got none in row {row}")
    numbers = [
        (one.seed, position, one.top_k, one.top_p, one.temperature, one.least_score)
        for one, position in zip(found, positions.tolist(), strict=True)
    ]
    if any(one.words or one.biases for one in found):
        each = zip(logits, found, positions.tolist(), strict=True)
        logits = torch.stack([ruled_logits(row, one, position) for row, one, position in each])
    place = (logits.data_ptr(), logits.stride(0) * logits.element_size(), ROW_TYPES[logits.dtype], *logits.shape)
    chosen = np.empty(len(found), np.int32)
    _C.sample_rows(place, np.array(numbers, ROW), [], [], chosen, torch.get_num_threads())
    out.copy_(torch.from_numpy(chosen))
    for one, token in zip(found, chosen.tolist(), strict=True):
        one.count_chosen(token, logits.shape[1])
