"""KVScales: the factors of the elements in a cache of 8-bit floats, and the ways to find them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpage.checks.tensors import check_plain
from kvpage.checks.values import check_flag

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """The scales of one layer. A stored element q means q * scale.

    They are fixed before the first block is written that others read.

    Args:
        key: fp32 [1] for the whole tensor, or [num_kv_heads]; finite and positive, on the cache's device.
        value: The same for V. It is not read for a cache without a value part.

    Raises:
        TypeError: A scale is no tensor.
        ValueError: A scale is not finite and positive, or not one contiguous row of fp32.
    """

    key: torch.Tensor
    value: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            scale = getattr(self, name)
            _check_row(name, scale)
            if scale.device.type == "meta":
                raise ValueError(f"{name} must have numbers, got a tensor on meta")
            if not bool(((scale > 0) & scale.isfinite()).all()):
                raise ValueError(f"{name} must be finite and positive, got {scale.tolist()}")

    @classmethod
    def of(
        cls, key: float | Sequence[float], value: float | Sequence[float], device: torch.device | str = "cpu"
    ) -> "KVScales":
        """Make scales of plain numbers.

        Args:
            key: One number for the whole tensor, or one a head.
            value: The same for V.
            device: The cache's device.

        Returns:
            The scales, in fp32.

        Raises:
            ValueError: A number is not finite and positive in fp32, or torch does not know the device.
        """
        rows = [[scale] if isinstance(scale, (int, float)) else list(scale) for scale in (key, value)]
        try:
            return cls(*(torch.tensor(row, dtype=torch.float32, device=device) for row in rows))
        except (RuntimeError, AssertionError) as error:  # torch's, of a number or a device that it does not know
            raise ValueError(f"key and value must be numbers, and device a device, got {device!r}: {error}") from error

    @classmethod
    def unchecked(cls, key: torch.Tensor, value: torch.Tensor) -> "KVScales":
        """Make scales of tensors without a look at their numbers, which on CUDA would wait for the device.

        Args:
            key: As in the constructor.
            value: As in the constructor.

        Returns:
            The scales. They hold the tensors themselves.

        Raises:
            TypeError: A scale is no tensor.
            ValueError: A scale is not one contiguous row of fp32.
        """
        _check_row("key", key)
        _check_row("value", value)
        scales = object.__new__(cls)
        object.__setattr__(scales, "key", key)
        object.__setattr__(scales, "value", value)
        return scales

    @classmethod
    def from_rows(
        cls, key: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype, per_head: bool = False
    ) -> "KVScales":
        """Compute scales with which the largest magnitude of K, and of V, becomes the largest number of `dtype`.

        Args:
            key: Floats [num_tokens, num_kv_heads, size].
            value: The same for V; None for a cache without a value part, which gets the scale 1.
            dtype: The cache's dtype, an 8-bit float.
            per_head: Whether each head gets a scale of its own. Otherwise one scale is for all heads.

        Returns:
            The scales, fp32 [1] or [num_kv_heads], on the device of the rows.

        Raises:
            TypeError: An argument is of another type.
            ValueError: There are no rows, a number is not finite, or `dtype` takes no such scales.
        """
        if dtype not in FP8_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, FP8_DTYPES))}, got {dtype}")
        check_flag("per_head", per_head)
        scales = [_scale(name, rows, dtype, per_head) for name, rows in (("key", key), ("value", value))]
        return cls(*scales)

    def digest(self) -> bytes:
        """Return 32 bytes that name the scales. Blocks with other scales have other numbers."""
        parts = [scale.cpu().numpy().astype("<f4").tobytes() for scale in (self.key, self.value)]
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def _check_row(name: str, scale: torch.Tensor) -> None:
    check_plain(name, scale)
    if scale.dtype != torch.float32 or scale.dim() != 1 or not scale.is_contiguous() or len(scale) == 0:
        raise ValueError(f"{name} must be one row of fp32, got {scale.dtype} {tuple(scale.shape)}")


def _scale(name: str, rows: torch.Tensor | None, dtype: torch.dtype, per_head: bool) -> torch.Tensor:
    if rows is None:
        return torch.ones(1)
    check_plain(name, rows)
    if not rows.dtype.is_floating_point or rows.device.type == "meta":
        raise ValueError(f"{name} must be of floats, got {rows.dtype} on {rows.device}")
    if rows.dim() != 3 or rows.numel() == 0:
        raise ValueError(f"{name} must be [num_tokens, num_kv_heads, size], not empty, got {tuple(rows.shape)}")
    largest = rows.float().abs().amax((0, 2) if per_head else (0, 1, 2)).reshape(-1)
    if not bool(largest.isfinite().all()):
        raise ValueError(f"{name} must be finite, its largest magnitude is {largest.max().item()}")
    scale = largest / torch.finfo(dtype).max
    # Rows of zeros, and scales that fp32 holds only as subnormals, would not survive a division.
    return torch.where(scale >= torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))
