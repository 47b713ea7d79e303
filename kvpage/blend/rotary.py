"""RotaryTables: rotate K from the positions where it was computed to the positions where it is used.

A rotary embedding turns each pair of a head's dimensions by an angle that grows with the position. From old to new:

    cos = (cos_new cos_old + sin_new sin_old) / a^2          a: the model's scale of its tables (YaRN)
    sin = (sin_new cos_old - cos_new sin_old) / a^2

Both are composed from the model's own tables, so that the tables' rounding cancels. It would not in
cos(difference * frequency), whose error grows with the distance. The arithmetic is in fp32, and always begins from the
K that was computed.
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
    """The rotation of K in one kind of layer.

    Attributes:
        cos_sin: maps positions int64 [n] to cos and sin, fp32 [n, rotary_size / 2], the model's own.
        head_size: of K.
        rotary_size: dimensions of a head that are rotated, from `offset` on; even.
        is_interleaved: pairs are neighbours, (0, 1), (2, 3), rather than (0, rotary_size / 2) and so on.
        scaling: the factor `a` of the model's tables.
        offset: the first dimension that is rotated.

    Raises:
        ValueError: a size breaks a rule.
        TypeError: cos_sin cannot be called, or a field is of the wrong type.
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
        """Return tables of plain inverse frequencies.

        Args:
            frequencies: fp32 [rotary_size / 2].
            head_size: of K.
            scaling: the factor of the tables.
            is_interleaved: as the attribute.

        Returns:
            The tables.
        """
        frequencies = as_floats("frequencies", frequencies, 1)

        def cos_sin(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = positions.to(frequencies.device, torch.float32)[:, None] * frequencies
            return angles.cos() * scaling, angles.sin() * scaling

        return cls(cos_sin, head_size, 2 * len(frequencies), is_interleaved, scaling)

    def difference(self, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the rotation from old to new positions.

        Args:
            old: int64 [n].
            new: int64 [n].

        Returns:
            (cos, sin), fp32 [n, rotary_size / 2] each.
        """
        old, new = as_indices("old", old), as_indices("new", new)
        cos_old, sin_old = self.cos_sin(old.long())
        cos_new, sin_new = self.cos_sin(new.long())
        square = self.scaling * self.scaling
        cos = (cos_new * cos_old + sin_new * sin_old) / square
        sin = (sin_new * cos_old - cos_new * sin_old) / square
        return cos, sin

    def rotation(self, old: torch.Tensor, new: torch.Tensor, device: torch.device | str = "cpu") -> Rotation:
        """Return the rotation from old to new positions, one for all layers of this kind.

        Args:
            old: int64 [n].
            new: int64 [n].
            device: of the result.

        Returns:
            The rotation.

        Raises:
            ValueError: old and new have different lengths.
        """
        old, new, device = as_indices("old", old), as_indices("new", new), as_device("device", device)
        if len(old) != len(new):
            raise ValueError(f"old and new must be of as many tokens, got {len(old)} and {len(new)}")
        cos, sin = (part.to(device, torch.float32).contiguous() for part in self.difference(old, new))
        return Rotation(cos, sin, self.head_size, self.offset, self.is_interleaved)

    def rotate(self, k: torch.Tensor, old: torch.Tensor, new: torch.Tensor, token_dim: int = 0) -> torch.Tensor:
        """Return each token's K as it would be at its new position.

        Args:
            k: [num_tokens, heads * head_size] or [num_tokens, heads, head_size].
            old: int64 [num_tokens].
            new: int64 [num_tokens].
            token_dim: the dimension of k's tokens.

        Returns:
            A new tensor of k's shape and dtype.

        Raises:
            ValueError: shapes do not fit together.
        """
        k, old, new = as_floats("k", k), as_indices("old", old), as_indices("new", new)
        token_dim = as_dim("token_dim", token_dim, k)
        check_heads(k, token_dim, self.head_size)
        if not len(old) == len(new) == k.shape[token_dim]:
            raise ValueError(f"old and new must be of {k.shape[token_dim]} tokens, got {len(old)} and {len(new)}")
        return mix(k, token_dim, self.head_size, self.rotation(old, new, k.device))
