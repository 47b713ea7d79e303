"""Token ids in the form that the rest of the library takes: one-dimensional int32 arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpage._C import small_ints

_INT32 = np.dtype(np.int32)
Tokens = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64] | Any
"""A list, or anything that numpy reads as a one-dimensional integer array, such as a torch CPU tensor."""


def as_array(values: Any, name: str) -> npt.NDArray[Any]:
    """Return `values` as a numpy array.

    Raises:
        ValueError: numpy cannot read them, as with a tensor on a device or with a gradient.
    """
    try:
        return np.asarray(values)
    except RuntimeError as error:  # torch has many reasons
        raise ValueError(f"{name} must be readable as an array: {error}") from error


def as_tokens(tokens: Tokens, name: str = "tokens") -> npt.NDArray[np.int32]:
    """Return `tokens` as a contiguous int32 array [num_tokens]. An array of that form is returned as it is.

    Args:
        tokens: Token ids.
        name: The argument's name in errors.

    Raises:
        ValueError: They are not one-dimensional or not integers, or an id does not fit into 32 bits.
        TypeError: They are text, or the mapping that a tokenizer returns.
    """
    if type(tokens) is list and (read := small_ints(tokens)) is not None:
        return read
    array: npt.NDArray[Any] = tokens if type(tokens) is np.ndarray else as_array(tokens, name)
    if array.dtype == _INT32 and array.ndim == 1:
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)
    _check_not_text(tokens, array, name)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    limits = np.iinfo(np.int32)
    if array.min() < limits.min or array.max() > limits.max:
        raise ValueError(f"{name} must fit into 32 bits, got {int(array.min())} to {int(array.max())}")
    return array.astype(np.int32)


def some_tokens(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Return tokens as `as_tokens` does. Raise ValueError if there are none, too."""
    array = as_tokens(tokens)
    if len(array) == 0:
        raise ValueError("tokens must hold at least one token, got none")
    return array


def _check_not_text(tokens: Tokens, array: npt.NDArray[Any], name: str) -> None:
    if isinstance(tokens, Mapping):
        raise TypeError(f"{name} must be token ids, got a {type(tokens).__name__}: take the row of its 'input_ids'")
    if array.dtype.kind in "SU":
        raise TypeError(
            f"{name} must be token ids, got the text {str(tokens)[:40]!r}: tokenizer(text)['input_ids'] makes ids of it"
        )
