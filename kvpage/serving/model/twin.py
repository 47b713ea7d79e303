"""Twins: copies of modules over the same tensors. A twin may be patched, and keeps what its forward leaves in it."""

from copy import deepcopy
from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def twin_of(module: Module) -> Module:
    """Return a copy of a module and all within it, which shares each tensor. Other threads may use the module."""
    shared = [value for each in module.modules() for value in list(vars(each).values())]
    tensors = (*module.parameters(), *module.buffers(), *(one for one in shared if isinstance(one, torch.Tensor)))
    return deepcopy(module, {id(tensor): tensor for tensor in tensors})
