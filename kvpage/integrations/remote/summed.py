"""summed: the numbers of several workers as one."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

Stats = TypeVar("Stats")


def summed(each: Sequence[Stats]) -> Stats:
    """Return the sums of dataclasses, mappings, tuples and numbers, field by field; at least one.

    None counts as nothing. Of other values, the first one stays.
    """
    known = [one for one in each if one is not None]
    if not known:
        return each[0]
    first: Any = known[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        made: Any = replace(first, **{name: summed([getattr(one, name) for one in known]) for name in names})
        return made  # type: ignore[no-any-return]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for one in known for key in one)  # type: ignore[attr-defined]
        return {key: summed([one[key] for one in known if key in one]) for key in keys}  # type: ignore[index,operator,return-value]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(known)  # type: ignore[arg-type,return-value]
    return first  # type: ignore[no-any-return]
