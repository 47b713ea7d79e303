"""RowGrid: how the rows of a tensor lie in memory, whatever its dimensions: rows of rows, each with a stride."""

from typing import NamedTuple

import torch


class RowGrid(NamedTuple):
    """Rows by number: row i begins (i // inner) * outer_stride + (i % inner) * inner_stride elements from the first.

    Attributes:
        num_rows: Of all.
        inner: Rows of the inner dimension, at least 1.
        outer_stride: Elements from the first row of an inner run to that of the next.
        inner_stride: Elements from a row to the next of its run.
        size: Elements of a row, side by side.
    """

    num_rows: int
    inner: int
    outer_stride: int
    inner_stride: int
    size: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "RowGrid | None":
        """Return the grid of a tensor's last dimension; None where its rows need more strides, or are not contiguous.

        Args:
            tensor: [..., size], strided.
        """
        *counts, size = tensor.shape
        *strides, last = tensor.stride()
        if last != 1 and size > 1:
            return None
        runs: list[tuple[int, int]] = []  # (rows, stride), the innermost first
        for count, stride in zip(reversed(counts), reversed(strides), strict=True):
            if count == 1:
                continue
            if runs and stride == runs[-1][0] * runs[-1][1]:
                runs[-1] = runs[-1][0] * count, runs[-1][1]
            else:
                runs.append((count, stride))
        if len(runs) > 2:
            return None
        outer, outer_stride = runs.pop() if runs else (1, size)
        inner, inner_stride = runs.pop() if runs else (1, 0)
        return cls(inner * outer, max(inner, 1), outer_stride, inner_stride, size)

    @property
    def is_plain(self) -> bool:
        """Whether one stride tells where each row begins."""
        return self.inner == 1
