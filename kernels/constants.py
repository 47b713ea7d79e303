"""Constants of a kernel in one structure: its last argument, in place of one argument each.

    @dataclass(frozen=True, slots=True)
    class Shape(Constants):             kernel[grid](rows, out, Shape(128, 16))
        SIZE: int
        TILE_ROWS: int                  def kernel(row_ptr, out_ptr, SHAPE: tl.constexpr):
                                            SIZE: tl.constexpr = SHAPE.value.SIZE

A kernel binds a constant to a name before it computes with it, and a string or a type before a function takes it: up to
Triton 3.6 no function takes a plain string. For a comparison a structure has a property: Triton 3.2 compares no plain
integers.

The compiler makes one kernel for each that differs, by its repr. It wraps the structure, and `.value` unwraps it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """The base of such structures: integers, strings, types of Triton, and structures of these."""

    @property
    def value(self) -> "Constants":
        """The structure itself: the interpreter passes it as it is."""
        return self
