"""Arrays that their holder owns: tensors, numpy's arrays, or another library's arrays that slice as they do.

They are never views into a larger array, which would live as long as the view.
"""

import copy
from typing import Any

import numpy as np
import torch

from kvpage.checks.tensors import check_dense


def check_array(name: str, array: Any) -> None:
    """Raise TypeError unless it is a tensor or an array that slices. For a tensor, raise as check_dense does."""
    if isinstance(array, torch.Tensor):
        check_dense(name, array)
    elif not _slices(array):
        raise TypeError(f"{name} must be a tensor or an array that slices, got {type(array).__name__}")


def owned(array: Any) -> Any:
    """Return `array`, or a copy if it keeps more memory than its own elements need.

    A copy of a tensor is contiguous. A tensor raises as check_dense does. An object that is no array stays as it is.
    """
    if isinstance(array, torch.Tensor):
        check_dense("a tensor", array)
        if array.untyped_storage().nbytes() == array.nbytes:
            return array
        return array.clone(memory_format=torch.contiguous_format)
    is_view = getattr(array, "base", None) is not None and _slices(array)
    return copied(array) if is_view else array


def copied(array: Any) -> Any:
    """Return a copy of the same kind, by the array's `copy` or `clone`, or by the standard library's copy."""
    for name in ("copy", "clone"):
        method = getattr(array, name, None)
        if callable(method):
            return method()
    return copy.copy(array)


def _slices(array: Any) -> bool:
    """Return whether it has a shape of integers, and items."""
    shape = getattr(array, "shape", None)
    has_shape = isinstance(shape, (tuple, list)) and all(isinstance(size, (int, np.integer)) for size in shape)
    return has_shape and hasattr(type(array), "__getitem__")
