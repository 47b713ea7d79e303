"""Rotation: the angle by which each row's pairs of numbers are rotated, for kvpage.ops.mix_rows.

a head     [ ... first | x x x x  y y y y | ... ]     neox: x and y of a pair are num_pairs apart
                       | x y x y  x y x y |           interleaved: side by side
"""

from dataclasses import dataclass

import torch

from kvpage.checks.tensors import check_plain
from kvpage.checks.values import as_integer, check_flag


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of a rotation, in fp32: x' = x cos - y sin, y' = y cos + x sin.

    Args:
        cos: fp32 [num_rows, num_pairs], contiguous, on the device of the rows.
        sin: The same.
        head_size: Elements of a head of the rows.
        first: The place in a head where the pairs begin. Elements before and after the pairs stay.
        is_interleaved: Whether x and y of a pair are neighbours. Otherwise they are num_pairs apart.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A table is of another dtype or shape, the two differ, or the pairs do not fit into a head.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    head_size: int
    first: int = 0
    is_interleaved: bool = False

    def __post_init__(self) -> None:
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            check_plain(name, table)
            if table.dtype != torch.float32 or table.dim() != 2 or not table.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous fp32 [num_rows, num_pairs], got {table.dtype} {list(table.shape)}"
                )
        if self.cos.shape != self.sin.shape or self.cos.device != self.sin.device:
            raise ValueError(f"cos and sin must be alike, got shapes {list(self.cos.shape)} and {list(self.sin.shape)}")
        for name in ("head_size", "first"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        check_flag("is_interleaved", self.is_interleaved)
        if self.num_pairs < 1 or self.first < 0 or self.first + 2 * self.num_pairs > self.head_size:
            raise ValueError(
                f"pairs must lie within head_size={self.head_size}, got {self.num_pairs} from {self.first} on"
            )

    @property
    def num_rows(self) -> int:
        """Number of rows that are rotated."""
        return self.cos.shape[0]

    @property
    def num_pairs(self) -> int:
        """Number of pairs of each head that are rotated."""
        return self.cos.shape[1]


def check_rotation(rotation: Rotation | None) -> None:
    """Raise TypeError unless `rotation` is a Rotation or None."""
    if rotation is not None and not isinstance(rotation, Rotation):
        raise TypeError(f"rotation must be a Rotation or None, got {type(rotation).__name__}")
