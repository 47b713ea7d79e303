"""Check the fields of parameter classes, and turn each into a plain value.

A check takes the field's name and value. It returns the plain value, or raises ValueError with the name.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Check = Callable[[str, Any], Any]
RealCheck = Callable[[str, Any], float]
TokenIds = tuple[int, ...]


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def at_least(least: int, rule: str) -> Check:
    """Return a check for integers from `least` on. rule: the words of the message."""

    def check(name: str, value: Any) -> int:
        if not is_int(value) or value < least:
            raise ValueError(f"{name} must be {rule}, got {value!r}")
        return int(value)

    return check


POSITIVE = at_least(1, "a positive integer")
COUNT = at_least(0, "an integer that is not negative")


def between(least: int, most: int) -> Check:
    """Return a check for integers from `least` to `most`."""

    def check(name: str, value: Any) -> int:
        if not is_int(value) or not least <= value <= most:
            raise ValueError(f"{name} must be an integer in [{least}, {most}], got {value!r}")
        return int(value)

    return check


def real(rule: str, accepts: Callable[[float], bool]) -> RealCheck:
    """Return a check for numbers that `accepts` is true of. True and False are not numbers. rule: as `at_least`."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{name} must be a number, got {type(value).__name__}")
        if not accepts(float(value)):
            raise ValueError(f"{name} must be {rule}, got {value!r}")
        return float(value)

    return check


FINITE = real("finite", math.isfinite)
MAX_BIAS = 1e30  # sums of them are numbers of 32 bits, and so are logits with them
_BIAS = real(f"a number of at most {MAX_BIAS:g}", lambda number: number <= MAX_BIAS)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def texts(name: str, values: Any) -> tuple[str, ...]:
    """Read a text, or a list of texts, none of them empty."""
    items = (values,) if isinstance(values, str) else values
    if isinstance(items, bytes | Mapping) or not isinstance(items, Iterable):
        raise ValueError(f"{name} must be a text or a list of texts, got {values!r}")
    strings = tuple(items)
    if not all(isinstance(item, str) and item for item in strings):
        raise ValueError(f"{name} must be texts that are not empty, got {values!r}")
    return strings


def token_id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return int(value)


def token_ids(name: str, values: Any) -> TokenIds:
    """Read a list, an array or another collection of integers."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of token ids, got {values!r}")
    try:
        return tuple(token_id(name, value) for value in values)
    except ValueError:
        raise ValueError(f"{name} must be integers, got {values!r}") from None


def one_or_more_ids(name: str, values: Any) -> TokenIds:
    """Read one token id, or a list of token ids."""
    return token_ids(name, values if isinstance(values, Iterable) else [values])


def words(name: str, values: Any) -> tuple[TokenIds, ...]:
    """Read a list of lists of token ids, none of them empty."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of lists of token ids, got {values!r}")
    sequences = tuple(token_ids(name, word) for word in values)
    if not all(sequences):
        raise ValueError(f"{name} must be lists of at least one token id, got {values!r}")
    return sequences


def token_biases(name: str, values: Any) -> tuple[tuple[int, float], ...]:
    """Read a dict of token id to number, or pairs of them, at most MAX_BIAS each. -inf is allowed."""
    pairs = _pairs(name, values, "a dict of a token id to a number")
    return tuple((token_id(name, token), _bias(name, bias)) for token, bias in pairs)


def word_biases(name: str, values: Any) -> tuple[tuple[TokenIds, float], ...]:
    """Read a dict of token ids, as a tuple, to number, or pairs of them, at most MAX_BIAS. -inf is allowed."""
    pairs = _pairs(name, values, "a dict of a tuple of token ids to a number")
    return tuple((words(name, [word])[0], _bias(name, bias)) for word, bias in pairs)


def length_decay(name: str, value: Any) -> tuple[int, float]:
    """Read a pair of a number of tokens and a factor."""
    if not isinstance(value, Iterable) or len(pair := list(value)) != 2:
        raise ValueError(f"{name} must be a number of tokens and a factor, got {value!r}")
    return COUNT(name, pair[0]), FINITE(name, pair[1])


def _pairs(name: str, values: Any, rule: str) -> list[tuple[Any, Any]]:
    try:
        return [(key, value) for key, value in (values.items() if isinstance(values, Mapping) else values)]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {rule}, got {values!r}") from None


def _bias(name: str, value: Any) -> float:
    return _BIAS(name, value)


def check_fields(params: object, checks: Mapping[str, Check]) -> None:
    """Check the fields that are not None, and set each to its plain value. For the class's own __post_init__."""
    for name, check in checks.items():
        value = getattr(params, name)
        if value is not None:
            object.__setattr__(params, name, check(name, value))


def check_given(params: object, names: Iterable[str]) -> None:
    """Raise ValueError for fields that are None and have no default."""
    for name in names:
        if getattr(params, name) is None:
            raise ValueError(f"{name} must be given, got None")
