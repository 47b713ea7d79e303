"""Memory that two tensors have in common, found from addresses and strides. No byte of it is read.

[ K K K ]   [ V V V ]           neighbours
[ K   K   K ]                   between one another: their bounds meet, their elements do not
  [ V   V   V ]
[ K K K ]                       two that share memory
    [ V V V ]
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the one after its last; twice 0 without elements."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum(stride * (count - 1) for stride, count in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


class _Place:
    """A tensor's memory, as numpy's array interface. The address may be of a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.begin, self.end = bounds(tensor)
        self.strides = tuple(size * stride for stride in tensor.stride())
        self.__array_interface__ = {
            "version": 3,
            "data": (self.begin, True),
            "shape": tuple(tensor.shape),
            "strides": self.strides,
            "typestr": f"|V{size}",
        }

    def array(self) -> npt.NDArray[np.void]:
        return np.asarray(self)


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether two of the tensors have a byte in common.

    Args:
        tensors: of one shape and device, with elements.
    """
    regions = sorted(map(_Place, tensors), key=lambda region: region.begin)
    told_apart = set()  # of tensors with the same strides the distance alone matters
    for at, region in enumerate(regions):
        for other in regions[at + 1 :]:
            if other.begin >= region.end:
                break
            pair = other.begin - region.begin, region.strides, other.strides
            if pair not in told_apart and np.shares_memory(region.array(), other.array()):
                return True
            told_apart.add(pair)
    return False
