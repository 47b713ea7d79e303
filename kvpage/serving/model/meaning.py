"""A function's code with another meaning of one name of its file. The function itself stays as it is.

    forward ── deprecate ──► wraps ──► the code that calls NAME        a decorator holds what it wraps in a cell

A wrapped function is made anew with each of its wrappers, each of which holds the next one.
"""

import functools
import inspect
from types import CellType, FunctionType
from typing import Any


def innermost(own: object, name: str) -> FunctionType | None:
    """Return the function within all wrappers, if its code has the name; None for anything else."""
    inner = inspect.unwrap(own) if callable(own) else None
    return inner if type(inner) is FunctionType and name in inner.__code__.co_names else None


def with_meaning(own: object, name: str, meaning: object) -> FunctionType | None:
    """Return the same function, wrappers included, in whose innermost code `name` means something else.

    None if a wrapper is no function, or holds what it wraps in another way than a decorator does.
    """
    if type(own) is not FunctionType:
        return None
    inner: object = getattr(own, "__wrapped__", None)
    if inner is None:
        return _copy(own, {**own.__globals__, name: meaning}, own.__closure__)
    other, cells = with_meaning(inner, name, meaning), own.__closure__ or ()
    if other is None or not any(_holds(cell, inner) for cell in cells):
        return None
    copy = _copy(own, own.__globals__, tuple(CellType(other) if _holds(cell, inner) else cell for cell in cells))
    functools.update_wrapper(copy, other, assigned=(), updated=())  # sets __wrapped__ alone
    return copy


def _copy(function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _holds(cell: CellType, inner: object) -> bool:
    try:
        return cell.cell_contents is inner
    except ValueError:  # nothing is in it yet
        return False
