"""The fields of SamplingParams and BeamSearchParams: checked one by one, and as plain values.

What is checked wrong raises a ValueError that names the field.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Check = Callable[[str, Any], Any]
TokenIds = tuple[int, ...]


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def at_least(least: int, rule: str) -> Check:
    """Integers from `least` on; `rule` is how the message calls them."""

    def check(name: str, value: Any) -> int:
        if not is_int(value) or value < least:
            raise ValueError(f"{name} must be {rule}, got {value!r}")
        return int(value)

    return check


POSITIVE = at_least(1, "a positive integer")
COUNT = at_least(0, "an integer that is not negative")


def real(rule: str, accepts: Callable[[float], bool]) -> Check:
    """Numbers of which `accepts` holds; True and False are none."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{name} must be a number, got {type(value).__name__}")
        if not accepts(float(value)):
            raise ValueError(f"{name} must be {rule}, got {value!r}")
        return float(value)

    return check


FINITE = real("finite", math.isfinite)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def token_id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return int(value)


def token_ids(name: str, values: Any) -> TokenIds:
    """From a list, an array or another collection of integers."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of token ids, got {values!r}")
    try:
        return tuple(token_id(name, value) for value in values)
    except ValueError:
        raise ValueError(f"{name} must be integers, got {values!r}") from None


def one_or_more_ids(name: str, values: Any) -> TokenIds:
    """From a token id, or a list of some."""
    return token_ids(name, values if isinstance(values, Iterable) else [values])


def words(name: str, values: Any) -> tuple[TokenIds, ...]:
    """From a list of lists of token ids, none of them empty."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of lists of token ids, got {values!r}")
    each = tuple(token_ids(name, word) for word in values)
    if not all(each):
        raise ValueError(f"{name} must be lists of at least one token id, got {values!r}")
    return each


def token_biases(name: str, values: Any) -> tuple[tuple[int, float], ...]:
    """From a dict of a token id to a number, or pairs of them; -inf is a number here."""
    pairs = _pairs(name, values, "a dict of a token id to a number")
    return tuple((token_id(name, one), _bias(name, bias)) for one, bias in pairs)


def word_biases(name: str, values: Any) -> tuple[tuple[TokenIds, float], ...]:
    """From a dict of a tuple of token ids to a number, or pairs of them."""
    pairs = _pairs(name, values, "a dict of a tuple of token ids to a number")
    return tuple((words(name, [word])[0], _bias(name, bias)) for word, bias in pairs)


def length_decay(name: str, value: Any) -> tuple[int, float]:
    """From a number of tokens and a factor."""
    if not isinstance(value, Iterable) or len(pair := list(value)) != 2:
        raise ValueError(f"{name} must be a number of tokens and a factor, got {value!r}")
    return COUNT(name, pair[0]), FINITE(name, pair[1])


def _pairs(name: str, values: Any, rule: str) -> list[tuple[Any, Any]]:
    try:
        return [(key, value) for key, value in (values.items() if isinstance(values, Mapping) else values)]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {rule}, got {values!r}") from None


def _bias(name: str, value: Any) -> float:
    return real("a number below infinity", lambda number: number < math.inf)(name, value)


def check_fields(params: object, checks: Mapping[str, Check]) -> None:
    """Checks the fields that are not None, and sets each to its plain value."""
    for name, check in checks.items():
        value = getattr(params, name)
        if value is not None:
            object.__setattr__(params, name, check(name, value))


def check_given(params: object, names: Iterable[str]) -> None:
    """For fields that have no default to take."""
    for name in names:
        if getattr(params, name) is None:
            raise ValueError(f"{name} must be given, got None")
