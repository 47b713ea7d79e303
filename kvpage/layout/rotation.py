"""Rotation: by which angle each row's pairs of numbers are rotated, for kvpage.ops.mix_rows.

a head     [ ... first | x x x x  y y y y | ... ]     neox: x and y of a pair lie num_pairs apart
                       | x y x y  x y x y |           interleaved: side by side
"""

from dataclasses import dataclass

import torch

from kvpage.checks.tensors import check_plain
from kvpage.checks.values import as_integer, check_flag


@dataclass(frozen=True, slots=True)
class Rotation:
    """x' = x cos - y sin, y' = y cos + x sin, in fp32.

    cos, sin: fp32 [num_rows, num_pairs], contiguous, on the device of the rows. head_size: of what is rotated. first:
    where in a head the pairs begin; what lies before and behind them stays.
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
        return self.cos.shape[0]

    @property
    def num_pairs(self) -> int:
        return self.cos.shape[1]


def check_rotation(rotation: Rotation | None) -> None:
    """TypeError unless it is one, or None."""
    if rotation is not None and not isinstance(rotation, Rotation):
        raise TypeError(f"rotation must be a Rotation or None, got {type(rotation).__name__}")
