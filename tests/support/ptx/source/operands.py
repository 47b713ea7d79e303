"""Operands of instructions, as the parser finds them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Register:
    """name: one of the entry's registers, unique over its scopes. bits: its width; 1 for a predicate."""

    name: str
    bits: int


@dataclass(frozen=True, slots=True)
class Immediate:
    """bits: of the number, in two's complement or as fp32 or fp64; a symbol's address, too."""

    bits: int


@dataclass(frozen=True, slots=True)
class Special:
    """A register that the device fills, such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    base: "Register | Immediate"
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple["Operand", ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two destinations: a|b."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True, slots=True)
class Inverted:
    """A predicate, of which the opposite counts."""

    operand: "Operand"


@dataclass(frozen=True, slots=True)
class Unwanted:
    """A destination that is dropped: _."""


@dataclass(frozen=True, slots=True)
class Label:
    name: str


Operand = Register | Immediate | Special | Address | Vector | Pair | Inverted | Unwanted | Label


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """Return a vector's items, or the operand alone."""
    return operand.items if isinstance(operand, Vector) else (operand,)
