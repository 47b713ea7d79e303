"""Arrays that their holder owns: tensors, numpy's arrays, or those of another library that slice as they do.

Never a view into something larger, which would live as long as the view.
"""

import copy
from typing import Any

import numpy as np
import torch

from kvpage.checks.tensors import check_dense


def check_array(name: str, array: Any) -> None:
    """TypeError unless it is a tensor or an array that slices. A tensor raises as check_dense does."""
    if isinstance(array, torch.Tensor):
        check_dense(name, array)
    elif not _slices(array):
        raise TypeError(f"{name} must be a tensor or an array that slices, got {type(array).__name__}")


def owned(array: Any) -> Any:
    """`array`, or a copy if what it keeps in memory holds more than its own elements.

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
    """A copy in kind, by its `copy` or `clone`, or as the standard library's copy makes one."""
    for name in ("copy", "clone"):
        method = getattr(array, name, None)
        if callable(method):
            return method()
    return copy.copy(array)


def _slices(array: Any) -> bool:
    """It has a shape of integers, and items."""
    shape = getattr(array, "shape", None)
    has_shape = isinstance(shape, (tuple, list)) and all(isinstance(size, (int, np.integer)) for size in shape)
    return has_shape and hasattr(type(array), "__getitem__")
