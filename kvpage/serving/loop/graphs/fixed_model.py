"""FixedModel: sees whether a model still computes what a captured step of it does.

A replay runs no Python. So it misses hooks, and modules and weights that were replaced since. Weights that change in
place count at once: their addresses stay. All of this is looked at before each replay, without a wait.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

KNOWN_PACKAGES = ("torch", "transformers", "transformers_modules", "kvpage")
"""The packages whose modules do the same at each call. Others may depend on attributes, as adapters do."""


class Viewed(Protocol):
    """A model and the view of it that computes; see ModelRunner."""

    model: PreTrainedModel

    @property
    def view(self) -> PreTrainedModel:
        """The modules that compute."""

    @property
    def view_version(self) -> int:
        """A number that grows whenever modules were replaced."""


class FixedModel:
    """The model of `runner` as it is now, while its steps are captured. It keeps the weights alive.

    tensors: others at fixed addresses, which are looked at, too.
    """

    def __init__(self, runner: Viewed, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._runner, self._others = runner, list(tensors)
        self._version = runner.view_version
        modules = [*runner.view.modules()]
        self._attributes = [vars(module) for module in runner.model.modules()]
        self._num_attributes = [*map(len, self._attributes)]
        self._hooks = _hooks(modules)
        self._parts: list[Mapping[str, torch.Tensor | None]] = []
        for module in modules:
            self._parts += module._parameters, module._buffers
        self._tensors = self._tensors_now()
        self._addresses = [*map(torch.Tensor.data_ptr, self._tensors)]
        self._autocast = torch.is_autocast_enabled()

    def why_not_now(self) -> str | None:
        """Return why this step must run the model's Python; None if it need not."""
        if any(self._hooks):
            return "the model has hooks"
        if torch.is_autocast_enabled() != self._autocast:
            return "autocast is on or off, other than at the capture"
        return None

    def why_never(self) -> str | None:
        """Return why captured steps are out of date; None if they are not."""
        if self._runner.view_version != self._version:
            return "modules of the model were replaced"
        if [*map(len, self._attributes)] != self._num_attributes:
            return "attributes of the model's modules were added or removed"
        if [*map(torch.Tensor.data_ptr, self._tensors_now())] != self._addresses:
            return "weights of the model, or blocks of the cache, have moved"
        return None

    def _tensors_now(self) -> list[torch.Tensor]:
        values = chain.from_iterable([part.values() for part in self._parts])
        return [*self._others, *(tensor for tensor in values if tensor is not None)]


def why_not_fixed(model: nn.Module) -> str | None:
    """Return why steps of the model cannot be captured; None if they may be."""
    if any(_hooks(model.modules())):
        return "the model has hooks"
    for name, module in model.named_modules():
        package = type(module).__module__.partition(".")[0]
        if package not in KNOWN_PACKAGES:
            return (
                f"{name or 'the model'} is a {type(module).__name__} of {package}, which may change from step to step"
            )
        if "forward" in vars(module):
            return f"the forward of {name or 'the model'} was replaced"
    return None


def _hooks(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Return all places of hooks that a forward calls: a module's own, and torch's for all modules."""
    module_hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    return [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks, *module_hooks]
