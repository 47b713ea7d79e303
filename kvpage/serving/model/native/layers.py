"""NativeLayers: which modules of a view compute with kvpage's operations, and what stands in for them.

    nn.Linear, exactly               NativeLinear               shares its attributes with the model's own
    ...RMSNorm with one weight       a subclass of its own      the same; if a trial has shown that it is the formula
    gate_proj, up_proj, down_proj    GatedForward               in the copy that the view has of the module; likewise
    attention with rotated rows      RotaryForward              the same

Modules of the caller's own, as adapters, are never copied for this: what is switched on them must count at once. What
is inside of them stays the model's own, too.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kvpage.serving.model.native.gated_mlp import GatedForward, activation_of
from kvpage.serving.model.native.linear import NativeLinear, is_factor, product_of_torch
from kvpage.serving.model.native.norm import NormKinds, is_native_norm
from kvpage.serving.model.native.rotary import RotaryForward, RotaryKinds
from kvpage.serving.model.native.torch_threads import TorchThreads

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
LIBRARIES = ("transformers", "transformers_modules")
"""Top-level packages of a model's own code. The second holds code that comes with weights."""


class NativeLayers:
    """The native layers of one view. Layers of modules that stay are the same objects at every call."""

    def __init__(self) -> None:
        self.threads = TorchThreads()
        self._layers: dict[nn.Module, nn.Module | None] = {}
        self._product = product_of_torch()
        self._norms, self._rotary = NormKinds(self.threads), RotaryKinds()

    def containers(self, copied: Iterable[nn.Module]) -> list[nn.Module]:
        """Return modules that must be copied, too, so that layers inside of them can be native.

        copied: the modules that are copied anyway.
        """
        containers = dict.fromkeys(copied)
        num_copied, left = len(containers), [*containers]
        while left:
            children = [child for child in [*left.pop()._modules.values()] if child is not None]
            unseen = [child for child in children if child not in containers]
            inner = [child for child in unseen if _is_the_models(child) and _has_layers(child)]
            containers.update(dict.fromkeys(inner))
            left += inner
        return [*containers][num_copied:]

    def stand_ins(self, copied: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
        """Return the native layers in place of children of copied modules, by the model's own layers."""
        children = {child for module in copied for child in [*module._modules.values()] if child is not None}
        self._layers = {
            child: self._layers[child] if child in self._layers else self._make(child) for child in children
        }
        return {child: layer for child, layer in self._layers.items() if layer is not None}

    def _make(self, module: nn.Module) -> nn.Module | None:
        if type(module) is not nn.Linear:
            return self._norms.stand_in(module)
        if hasattr(module._parameters.get("weight"), "device_mesh"):  # a shard: the model's own hooks join the ranks
            return None
        return None if self._product is None else NativeLinear.of(module, self.threads, self._product)

    def fused_forward(self, module: nn.Module, copy: nn.Module) -> Any:
        """Return a forward for the module's copy with fewer operations; None to leave it as it is."""
        activation = activation_of(module)
        if activation is None:
            return self._rotary.forward_of(module, copy)
        return GatedForward(copy, activation, is_factor, self.threads)


def is_wholly_native(view: nn.Module) -> bool:
    """Return whether all products of a view with weights are those of native layers, by the kinds of its modules.

    Weights that a native layer leaves to torch do not count: it sees to them when it is called.
    """
    return all(_has_no_product(module) for module in view.modules())


def _has_no_product(module: nn.Module) -> bool:
    """Whether the module is native, or has no weights but those that are looked up or multiplied one by one."""
    if type(module) is NativeLinear or is_native_norm(module) or isinstance(module, nn.Embedding):
        return True
    forward = vars(module).get("forward")
    if forward is not None and type(forward) not in (GatedForward, RotaryForward):
        return False
    if not _is_the_models(module) and not type(module).__module__.startswith("torch.nn.modules."):
        return False
    tensors: list[torch.Tensor | None] = [*module._parameters.values()]
    tensors += [tensor for name, tensor in module._buffers.items() if not name.endswith("_cached")]
    return all(tensor is None or tensor.dim() < 2 for tensor in tensors)


def _is_the_models(module: nn.Module) -> bool:
    """Whether nobody but the model's own code sets attributes of the module, to all that is usual."""
    return type(module) in CONTAINERS or type(module).__module__.split(".")[0] in LIBRARIES


def _has_layers(module: nn.Module) -> bool:
    return any(type(part) is nn.Linear for part in module.modules() if part is not module)
