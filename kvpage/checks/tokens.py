"""Token ids as the rest of the library takes them: one-dimensional int32 arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64] | Any
"""A list, or anything numpy reads as a one-dimensional integer array: numpy, array.array, a torch CPU tensor."""


def as_array(values: Any, name: str) -> npt.NDArray[Any]:
    """`values` as numpy reads them. ValueError where it cannot, as of a tensor on a device or with a gradient."""
    try:
        return np.asarray(values)
    except RuntimeError as error:  # torch's, which has many reasons
        raise ValueError(f"{name} must be readable as an array: {error}") from error


def as_tokens(tokens: Tokens, name: str = "tokens") -> npt.NDArray[np.int32]:
    """`tokens` as a contiguous int32 array; the same memory if it is one already.

    ValueError if it is not one-dimensional, not of integers, or holds an id that does not fit into 32 bits. TypeError
    for text, and for all that a tokenizer has made of it.
    """
    array = as_array(tokens, name)
    if array.dtype == np.int32 and array.ndim == 1:
        return np.ascontiguousarray(array)
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


def _check_not_text(tokens: Tokens, array: npt.NDArray[Any], name: str) -> None:
    if isinstance(tokens, Mapping):
        raise TypeError(f"{name} must be token ids, got a {type(tokens).__name__}: take the row of its 'input_ids'")
    if array.dtype.kind in "SU":
        raise TypeError(
            f"{name} must be token ids, got the text {str(tokens)[:40]!r}: tokenizer(text)['input_ids'] makes ids of it"
        )
