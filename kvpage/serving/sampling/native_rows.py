"""Choose tokens on a CPU by one native call for all rows, each with rules of its own.

    rows     temperature  top_k  top_p  ...  seed  position        one record a row, kept from step to step
               0.8          50     1.0         7       12
               0             0     1.0         0       31  ─► position += 1 is all that a step changes

A row's token depends on its logits and its record alone: not on the batch, its place in it, or the number of threads.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

import kvpage._C as _C
from kvpage.layout.sampling_record import ROW_RULES, SamplingRecord
from kvpage.ops.args.tokens import ROW_TYPES as ROW_TYPES


def packed(record: SamplingRecord) -> bytes:
    """Return the bytes of a ROW_RULES, with position 0."""
    numbers = record._asdict() | {"position": 0}
    return np.array([tuple(numbers[name] for name in ROW_RULES.names or ())], ROW_RULES).tobytes()


GREEDY = packed(SamplingRecord())
"""The record of a row whose likeliest token is taken."""


def can_sample(logits: torch.Tensor) -> bool:
    """Whether `sample_rows` takes such logits: numbers in host memory as they are, in fp32, bf16 or fp16.

    A view may stand for their negatives, and a tensor of a subclass may keep its numbers elsewhere.
    """
    return (
        type(logits) is torch.Tensor
        and logits.is_cpu
        and logits.dtype in ROW_TYPES
        and logits.layout is torch.strided
        and not logits.is_neg()
    )


def sample_rows(
    logits: torch.Tensor,
    rows: npt.NDArray[np.void],
    token_rules: Sequence[_C.TokenRules | None] = (),
    tokens: Sequence[npt.NDArray[np.int32] | None] = (),
) -> npt.NDArray[np.int32]:
    """Return one token a row; -1 for rows that hold NaN or +inf, or no finite number, before or after their processing.

    A loop that keeps `rows` from step to step pays for nothing but this call. A record is `SampledRow.packed`, which is
    empty for rows that only `sample_by_torch` can serve. The record of a row without a SampledRow is GREEDY. Seed and
    position are 0 in both: set the seed once, and the position to the number of generated tokens before each call.

    logits: [num_rows, vocab_size], for which `can_sample` holds, of any row stride. They stay as they are.
    rows: contiguous records of ROW_RULES. token_rules: each row's `SampledRow.token_rules`; empty if all are None.
    tokens: for rows with token_rules, the prompt and the generated tokens, and maybe room after them. Of the prompt's
    length and the position, the call knows how many there are.

    Raises ValueError for numbers out of range, or token_rules that serve two rows at once.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    chosen = np.empty(len(rows), np.int32)
    row_stride = logits.stride(0) * logits.element_size()
    key = (logits.data_ptr(), row_stride, ROW_TYPES[logits.dtype], *logits.shape)
    _C.sample_rows(key, rows, token_rules, tokens, chosen, torch.get_num_threads())
    return chosen
