"""The choice of a token from each row of logits in host memory: one native call for all rows."""

import numpy as np
import numpy.typing as npt
import torch

import kvpage._C as _C
from kvpage.layout.sampling_record import DRAW, ROW_RULES, SAMPLING_RECORD, SamplingRecord
from kvpage.ops.args.tokens import ROW_TYPES
from kvpage.ops.reference.sampling import count_chosen, ruled_logits

if ROW_RULES != _C.ROW_RULES:
    raise ImportError(f"kvpage._C must be built for records {ROW_RULES}, got one for {_C.ROW_RULES}: build it again")


def sample_host_rows(logits: torch.Tensor, records: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """See kvpage.ops.sample_rows, which has checked all but the numbers in the records. ValueError for these."""
    fields = records.numpy().view(SAMPLING_RECORD)[:, 0]
    rules = [SamplingRecord(*numbers) for numbers in fields.tolist()]
    for row, record in enumerate(rules):
        if record.counts and not record.words:
            raise ValueError(f"records must have a table of words where tokens are counted, got none in row {row}")
    if any(record.words or record.biases for record in rules):
        triples = zip(logits, rules, positions.tolist(), strict=True)
        logits = torch.stack([ruled_logits(row, record, position) for row, record, position in triples])
    matrix = (logits.data_ptr(), logits.stride(0) * logits.element_size(), ROW_TYPES[logits.dtype], *logits.shape)
    chosen = np.empty(len(rules), np.int32)
    _C.sample_rows(matrix, _numbers(fields, positions.numpy()), [], [], chosen, torch.get_num_threads())
    out.copy_(torch.from_numpy(chosen))
    for record, token in zip(rules, chosen.tolist(), strict=True):
        count_chosen(record, token, logits.shape[1])


def _numbers(fields: npt.NDArray[np.void], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Return the rows as the extension takes them."""
    numbers = np.empty(len(fields), ROW_RULES)
    numbers["position"] = positions
    for name in DRAW:
        numbers[name] = fields[name]
    return numbers
