"""Paths to values in a line of JSON, such as rows[seqs=256;mode~greedy].us.median. It needs nothing but Python.

Keys come after a dot or in brackets. Brackets choose among several rows by conditions, the row in which they hold: ~
that a text is in the value, !~ that it is not, > that the value is more. rows[*;seqs>1] is of all such rows; each of
its values is a list.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
CONDITION = re.compile(r"(.+?)(!~|~|>|=)(.*)")
INTERVAL = ("median", "low", "high")
"""The names of three numbers in a list: a mean, and the ends of its interval."""


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return a value of a row, and None where the row lacks it."""
    value: Any = row
    for step in STEP.findall(path):
        value = None if value is None else _step(value, step.strip("[]"))
    return value


def _step(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(key)
    if not isinstance(value, Sequence):
        return getattr(value, key)
    return value[INTERVAL.index(key)] if key in INTERVAL else _chosen(value, key.split(";"))


def _chosen(rows: Sequence[Any], conditions: Sequence[str]) -> Any:
    fitting = [row for row in rows if all(_holds(row, condition) for condition in conditions if condition != "*")]
    if "*" in conditions:
        return {key: [row[key] for row in fitting] for key in fitting[0]} if fitting else None
    if len(fitting) > 1:
        raise ValueError(f"conditions must hold in a single row, {conditions} hold in {len(fitting)}")
    return fitting[0] if fitting else None


def _holds(row: Mapping[str, Any], condition: str) -> bool:
    match = CONDITION.fullmatch(condition)
    if match is None:
        raise ValueError(f"a condition must be like seqs=256, got {condition!r}")
    key, sign, text = match.groups()
    value = row.get(key)
    if sign == ">":
        return bool(value is not None and value > float(text))
    if sign == "=":
        return str(value[0] if isinstance(value, list) and len(value) == 1 else value) == text
    return (text in str(value)) == (sign == "~")
