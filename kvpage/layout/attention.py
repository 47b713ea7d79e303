"""Attention: the one description of attention over blocks, taken by every implementation.

    query, key ─► * scale ─► softcap ─► window, causality ─► softmax with sinks ─► sum of the values
                                        (query_positions)                          (value_size)

A new option is a field here, a line in the reference, and a line in each kernel. The doors, the operators of torch and
the checks of types take the fields as they find them.
"""

import dataclasses
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvpage.checks.values import as_integer

MAX_WINDOW = 2**62
MAX_FP32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The options of one call of attention. It holds tensors and never changes them.

    Args:
        scale: Factor of the products, a finite number of fp32. Default: key_size ** -0.5.
        sliding_window: Number of keys that a query sees, its own included. Default: all up to its own.
        softcap: A score s becomes softcap * tanh(s / softcap). Positive, and normal in fp32. Default: s.
        sinks: [num_heads], one more score in the softmax of each head. It has no value, is not scaled and not capped.
        value_size: Elements of a value and of the output. Default: the layout's head_size.
        query_positions: int64 [num_tokens], on the CPU or the cache's device: the position of each query in its
            sequence, ascending in each sequence. Default: the last ones. A query sees the keys up to its own.

    Raises:
        TypeError: An option is of another type.
        ValueError: A number is out of its range. Shapes and devices of tensors are checked by the operation.
    """

    scale: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    value_size: int | None = None
    query_positions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not (type(self.scale) is float and abs(self.scale) <= MAX_FP32):
            object.__setattr__(self, "scale", fp32_number("scale", self.scale))
        if self.sliding_window is not None:
            object.__setattr__(self, "sliding_window", _window(self.sliding_window))
        if self.softcap is not None:
            object.__setattr__(self, "softcap", _softcap(self.softcap))
        if self.value_size is not None and type(self.value_size) is not int:
            object.__setattr__(self, "value_size", as_integer("value_size", self.value_size))

    @classmethod
    def of(cls, attention: "Attention | None", options: Mapping[str, Any]) -> "Attention":
        """Return `attention`, or one made of `options`, its fields by name.

        Args:
            attention: The options as one object; None if they are given by name.
            options: The options by name; empty if `attention` is given.

        Raises:
            TypeError: `attention` is no Attention, or an option has an unknown name or another type.
            ValueError: Both are given, or an option is out of range.
        """
        if attention is None:
            return cls(**options)
        if not isinstance(attention, Attention):
            raise TypeError(f"attention must be an Attention, got {type(attention).__name__}")
        if options:
            raise ValueError(f"options must be given in attention or by name, got both: {', '.join(options)}")
        return attention


OPTIONS = tuple(field.name for field in dataclasses.fields(Attention))
"""The names of the options, in their order."""


def option_values(attention: Attention) -> dict[str, Any]:
    """Return the options by name."""
    return {name: getattr(attention, name) for name in OPTIONS}


def fp32_number(name: str, value: float) -> float:
    """Return `value` as a float. TypeError unless it is a real number, ValueError unless it is finite in fp32."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not abs(value) <= MAX_FP32:
        raise ValueError(f"{name} must be a finite number of fp32, got {value}")
    return float(value)


def _window(sliding_window: int) -> int:
    if not 1 <= (window := as_integer("sliding_window", sliding_window)) <= MAX_WINDOW:
        raise ValueError(f"sliding_window must be at least 1, got {window}")
    return window


def _softcap(softcap: float) -> float:
    """Scores are divided by it: a subnormal one may be taken for zero, and has no precision."""
    least = torch.finfo(torch.float32).tiny
    if isinstance(softcap, numbers.Real) and not least <= softcap <= MAX_FP32:
        raise ValueError(f"softcap must be positive and a normal number of fp32, got {softcap}")
    return fp32_number("softcap", softcap)
