"""RotaryTables: K rotated from the positions where it was computed to those where it is used.

A rotary embedding turns each pair of a head's dimensions by an angle that grows with the position. From old to new:

    cos = (cos_new cos_old + sin_new sin_old) / a^2          a: what the model scales its tables by (YaRN)
    sin = (sin_new cos_old - cos_new sin_old) / a^2

composed from the model's own tables, so that what these have been rounded to cancels: cos(difference * frequency) does
not, and its error grows with the distance. The arithmetic is in fp32, and always begins from the K that was computed.
"""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvpage.blend.mixing import check_heads, mix
from kvpage.checks.tensors import as_device, as_dim, as_floats, as_indices
from kvpage.checks.values import as_integer, check_flag
from kvpage.layout.rotation import Rotation

CosSin = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""positions int64 [n] -> cos, sin: fp32 [n, rotary_size / 2], the model's own, its scaling included."""


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """How one kind of layer turns its K.

    head_size: of K. rotary_size: how many dimensions of a head are rotated, from `offset` on; even.
    is_interleaved: pairs are neighbours, (0, 1), (2, 3) ..., instead of (0, rotary_size / 2), (1, rotary_size / 2 + 1).
    scaling: `a`.
    """

    cos_sin: CosSin
    head_size: int
    rotary_size: int
    is_interleaved: bool = False
    scaling: float = 1.0
    offset: int = 0

    def __post_init__(self) -> None:
        if not callable(self.cos_sin):
            raise TypeError(f"cos_sin must be callable, got {type(self.cos_sin).__name__}")
        for name in ("head_size", "rotary_size", "offset"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        check_flag("is_interleaved", self.is_interleaved)
        if self.rotary_size < 2 or self.rotary_size % 2 or self.offset < 0:
            raise ValueError(f"rotary_size must be even and positive, got {self.rotary_size} at {self.offset}")
        if self.offset + self.rotary_size > self.head_size:
            raise ValueError(
                f"rotary_size must fit into head_size={self.head_size}, got {self.rotary_size} at {self.offset}"
            )
        if not isinstance(self.scaling, numbers.Real) or not 0 < self.scaling < math.inf:
            raise ValueError(f"scaling must be positive, got {self.scaling!r}")

    @classmethod
    def of_frequencies(
        cls, frequencies: torch.Tensor, head_size: int, scaling: float = 1.0, is_interleaved: bool = False
    ) -> "RotaryTables":
        """Of plain inverse frequencies, fp32 [rotary_size / 2]."""
        frequencies = as_floats("frequencies", frequencies, 1)

        def cos_sin(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = positions.to(frequencies.device, torch.float32)[:, None] * frequencies
            return angles.cos() * scaling, angles.sin() * scaling

        return cls(cos_sin, head_size, 2 * len(frequencies), is_interleaved, scaling)

    def difference(self, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the rotation from old to new positions: fp32 [n, rotary_size / 2]."""
        old, new = as_indices("old", old), as_indices("new", new)
        cos_old, sin_old = self.cos_sin(old.long())
        cos_new, sin_new = self.cos_sin(new.long())
        square = self.scaling * self.scaling
        cos = (cos_new * cos_old + sin_new * sin_old) / square
        sin = (sin_new * cos_old - cos_new * sin_old) / square
        return cos, sin

    def rotation(self, old: torch.Tensor, new: torch.Tensor, device: torch.device | str = "cpu") -> Rotation:
        """The rotation from old to new positions, int64 [n] each: one for all layers of this kind, on `device`."""
        old, new, device = as_indices("old", old), as_indices("new", new), as_device("device", device)
        if len(old) != len(new):
            raise ValueError(f"old and new must be of as many tokens, got {len(old)} and {len(new)}")
        cos, sin = (part.to(device, torch.float32).contiguous() for part in self.difference(old, new))
        return Rotation(cos, sin, self.head_size, self.offset, self.is_interleaved)

    def rotate(self, k: torch.Tensor, old: torch.Tensor, new: torch.Tensor, token_dim: int = 0) -> torch.Tensor:
        """A new tensor: each token's K as it would be at its new position, in k's dtype.

        k: [num_tokens, heads * head_size] or [num_tokens, heads, head_size], its tokens in dimension `token_dim`. old,
        new: int64 [num_tokens].
        """
        k, old, new = as_floats("k", k), as_indices("old", old), as_indices("new", new)
        token_dim = as_dim("token_dim", token_dim, k)
        check_heads(k, token_dim, self.head_size)
        if not len(old) == len(new) == k.shape[token_dim]:
            raise ValueError(f"old and new must be of {k.shape[token_dim]} tokens, got {len(old)} and {len(new)}")
        return mix(k, token_dim, self.head_size, self.rotation(old, new, k.device))
