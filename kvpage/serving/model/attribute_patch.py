"""AttributePatch: attributes of modules that are replaced for a time, and then are as before.

A twin is a copy of modules over the same tensors. It may be patched, and keeps what its forward leaves in it, while
other threads use the modules themselves.
"""

from collections.abc import Mapping
from copy import deepcopy
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

_ABSENT = object()
Module = TypeVar("Module", bound=nn.Module)


class AttributePatch:
    """Replace one attribute of some modules: set it on entry, and undo it on exit, whatever has happened between.

    The attributes are the modules' own. A submodule of the same name is hidden, and nothing is registered or removed:
    parameters, submodules and hooks stay as they are. Not for two threads over the same modules.
    """

    def __init__(self, name: str, values: Mapping[nn.Module, object]) -> None:
        self._name, self._values = name, values
        self._before: list[tuple[nn.Module, object]] = []

    def __enter__(self) -> None:
        for module, value in self._values.items():
            self._before.append((module, vars(module).get(self._name, _ABSENT)))
            vars(module)[self._name] = value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._before:
            module, value = self._before.pop()
            if value is _ABSENT:
                vars(module).pop(self._name, None)
            else:
                vars(module)[self._name] = value


def twin_of(module: Module) -> Module:
    """Return a copy of a module and all within it, which shares each tensor. Other threads may use the module."""
    shared = [value for part in module.modules() for value in list(vars(part).values())]
    tensors = (*module.parameters(), *module.buffers(), *(value for value in shared if isinstance(value, torch.Tensor)))
    return deepcopy(module, {id(tensor): tensor for tensor in tensors})
