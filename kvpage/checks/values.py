"""Checks of plain arguments: numbers, flags, lists, namespaces, and one number for each sequence."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvpage.checks.tokens import as_array

MAX_CALLER_NAMESPACE_BYTES = 4096
MAX_NAMESPACE_BYTES = MAX_CALLER_NAMESPACE_BYTES + 1024
"""Of a caller's namespace and the name of any weights: a request that was accepted can go to any version.

Every record of a store holds its whole namespace.
"""


def check_namespace(namespace: bytes, most: int = MAX_NAMESPACE_BYTES) -> None:
    """Raise TypeError unless it is bytes, and ValueError if it is longer.

    most: MAX_CALLER_NAMESPACE_BYTES for one that weights are yet to be named in.
    """
    if not isinstance(namespace, bytes):
        raise TypeError(f"namespace must be bytes, got {type(namespace).__name__}")
    if len(namespace) > most:
        raise ValueError(f"namespace must be at most {most} bytes, got {len(namespace)}")


def as_integer(name: str, value: SupportsIndex) -> int:
    """Return `value` as an int. Raise TypeError for a float or any other value that is no integer."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError) as error:  # torch raises the latter for a tensor without contents
        raise TypeError(f"{name} must be an integer, got {value!r}") from error


def as_real(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float. Raise TypeError unless it is a number, and ValueError if it is too large."""
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, RuntimeError, ValueError) as error:  # torch raises the latter two for tensors of many elements
        raise TypeError(f"{name} must be a number, got {value!r}") from error
    except OverflowError as error:
        raise ValueError(f"{name} must fit into a float, got {value!r}") from error


def check_at_least(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless it is an int of at least `least`. True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """Return `values` as a list. Raise TypeError if they cannot be iterated over."""
    try:
        return list(values)
    except (TypeError, RuntimeError) as error:  # torch raises it for a tensor without rows
        raise TypeError(f"{name} must be a sequence, got {type(values).__name__}") from error


def check_flag(name: str, value: bool) -> None:
    """Raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


def as_counts(name: str, counts: Sequence[int] | int, num_seqs: int) -> list[int]:
    """Return one integer for each sequence: `counts` itself, or the same number for all.

    Raises:
        TypeError: A count is no integer.
    """
    try:
        if isinstance(counts, Iterable):
            return [operator.index(count) for count in counts]
        return [operator.index(counts)] * num_seqs
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, or one integer a sequence, got {counts!r}") from error


def as_positions(name: str, positions: Sequence[int] | npt.NDArray[np.int64], num_seqs: int) -> npt.NDArray[np.int64]:
    """Return one position for each sequence, int64 [num_seqs].

    Raises:
        ValueError: There is another number of positions.
        TypeError: They are not integers.
    """
    array = as_array(positions, name)
    if array.shape != (num_seqs,):
        raise ValueError(f"{name} must have one entry for each of {num_seqs} sequences, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":  # numpy would round a float towards zero
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def runs_of(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the runs of consecutive True, each as its first place and the one after its last.

    Args:
        flags: bool, of one dimension.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
