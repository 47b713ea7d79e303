"""summed: the numbers of several workers as one."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

Stats = TypeVar("Stats")


def summed(values: Sequence[Stats]) -> Stats:
    """Return the sums of dataclasses, mappings, tuples and numbers, field by field; at least one.

    None counts as nothing. Of other values, the first one stays.
    """
    known = [value for value in values if value is not None]
    if not known:
        return values[0]
    first: Any = known[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        made: Any = replace(first, **{name: summed([getattr(value, name) for value in known]) for name in names})
        return made  # type: ignore[no-any-return]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in known for key in value)  # type: ignore[attr-defined]
        return {key: summed([value[key] for value in known if key in value]) for key in keys}  # type: ignore[index,operator,return-value]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(known)  # type: ignore[arg-type,return-value]
    return first  # type: ignore[no-any-return]
