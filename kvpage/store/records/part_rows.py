"""PartRows: the places of tokens' rows in parts that are in host memory, as runs of bytes in a payload's order.

part       [tokens, heads, size], with any strides but within a row           "huggingface": [heads, tokens, size]
spans      of some tokens in one part: offset and bytes of each run, neighbours joined
runs       the spans of each part, at its address
"""

import numpy as np
import numpy.typing as npt
import torch

from kvpage.store.tiers.stretches import Runs

Parts = list[list[torch.Tensor]]
"""By layer and part, each [tokens, heads, size] or [heads, tokens, size]."""
Spans = npt.NDArray[np.int64]
"""int64 [n, 2]: offset, or UNWANTED, and length of n runs of bytes."""
UNWANTED = -1
MIN_ROW_BYTES = 64  # of rows with gaps between them: smaller ones are copied by numpy


class PartRows:
    """The parts' addresses and their one shape and strides. Whoever uses the runs keeps the parts alive."""

    def __init__(self, parts: Parts, fmt: str) -> None:
        flat = [part for layer in parts for part in layer]
        first, size = flat[0], flat[0].element_size()
        token_dim = 0 if fmt == "vllm" else 1
        self._addresses = np.array([part.data_ptr() for part in flat], np.int64)
        self._row_bytes = first.shape[2] * size
        self._is_token_first = fmt == "vllm"
        self._num_heads = first.shape[1 - token_dim]
        self._token_stride, self._head_stride = (first.stride(dim) * size for dim in (token_dim, 1 - token_dim))
        self._spans: dict[tuple[int, int], Spans] = {}

    @classmethod
    def of(cls, parts: Parts, fmt: str) -> "PartRows | None":
        """Return the rows of parts of one shape; None unless they are in host memory, alike, with whole rows."""
        flat = [part for layer in parts for part in layer]
        first = flat[0]
        strides = first.stride()
        if not all(part.is_cpu and part.stride() == strides for part in flat):
            return None
        if first.shape[2] > 1 and strides[2] != 1:
            return None
        return cls(parts, fmt)

    def runs(self, begin: int, end: int, num_unwanted: int = 0) -> Runs | None:
        """Return the runs of the tokens [begin, end) of all parts; None if they are too short.

        num_unwanted: tokens of the payload before those, whose runs have the address 0.
        """
        spans = self._spans_of(end - begin, num_unwanted)
        if len(spans) * MIN_ROW_BYTES > spans[:, 1].sum():
            return None
        runs = np.empty((len(self._addresses), len(spans), 2), np.int64)
        runs[:, :, 0] = np.add.outer(self._addresses + begin * self._token_stride, spans[:, 0])
        runs[:, spans[:, 0] == UNWANTED, 0] = 0
        runs[:, :, 1] = spans[:, 1]
        return runs.reshape(-1, 2)

    def _spans_of(self, num_tokens: int, num_unwanted: int) -> Spans:
        key = num_tokens, num_unwanted
        if key not in self._spans:
            tokens = np.arange(num_tokens) * self._token_stride
            lead = np.full(num_unwanted, UNWANTED)
            heads = np.arange(self._num_heads) * self._head_stride
            if self._is_token_first:
                rows = np.concatenate([np.repeat(lead, len(heads)), np.add.outer(tokens, heads).ravel()])
            else:
                rows = np.concatenate([[*lead, *(tokens + head)] for head in heads])
            self._spans[key] = _joined(rows, self._row_bytes)
        return self._spans[key]


def _joined(rows: npt.NDArray[np.int64], row_bytes: int) -> Spans:
    """Return the rows at these offsets, neighbours in memory as one."""
    is_next = np.where(rows[1:] == UNWANTED, rows[:-1] == UNWANTED, rows[1:] == rows[:-1] + row_bytes)
    is_next &= (rows[1:] == UNWANTED) == (rows[:-1] == UNWANTED)
    begins = np.flatnonzero(np.concatenate([[True], ~is_next]))
    counts = np.diff(np.append(begins, len(rows)))
    return np.stack([rows[begins], counts * row_bytes], axis=1).astype(np.int64)
