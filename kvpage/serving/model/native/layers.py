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

from torch import nn

from kvpage.serving.model.native.gated_mlp import GatedForward, activation_of
from kvpage.serving.model.native.linear import NativeLinear, is_factor
from kvpage.serving.model.native.norm import NormKinds
from kvpage.serving.model.native.rotary import RotaryKinds

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
LIBRARIES = ("transformers", "transformers_modules")
"""Top-level packages of a model's own code. The second holds code that comes with weights."""


class NativeLayers:
    """The native layers of one view. Layers of modules that stay are the same objects at every call."""

    def __init__(self) -> None:
        self._layers: dict[nn.Module, nn.Module | None] = {}
        self._norms, self._rotary = NormKinds(), RotaryKinds()

    def containers(self, copied: Iterable[nn.Module]) -> list[nn.Module]:
        """Return modules that must be copied, too, so that layers inside of them can be native.

        copied: the modules that are copied anyway.
        """
        found = dict.fromkeys(copied)
        given, left = len(found), [*found]
        while left:
            children = [child for child in [*left.pop()._modules.values()] if child is not None and child not in found]
            inner = [child for child in children if _is_the_models(child) and _has_layers(child)]
            found.update(dict.fromkeys(inner))
            left += inner
        return [*found][given:]

    def stand_ins(self, copied: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
        """Return the native layers in place of children of copied modules, by the model's own layers."""
        children = {child for module in copied for child in [*module._modules.values()] if child is not None}
        self._layers = {
            child: self._layers[child] if child in self._layers else self._make(child) for child in children
        }
        return {child: layer for child, layer in self._layers.items() if layer is not None}

    def _make(self, module: nn.Module) -> nn.Module | None:
        return NativeLinear.of(module) if type(module) is nn.Linear else self._norms.stand_in(module)

    def fused_forward(self, module: nn.Module, copy: nn.Module) -> Any:
        """Return a forward for the module's copy with fewer operations; None to leave it as it is."""
        activation = activation_of(module)
        return (
            self._rotary.forward_of(module, copy) if activation is None else GatedForward(copy, activation, is_factor)
        )


def _is_the_models(module: nn.Module) -> bool:
    """Whether nobody but the model's own code sets attributes of the module, to all that is usual."""
    return type(module) in CONTAINERS or type(module).__module__.split(".")[0] in LIBRARIES


def _has_layers(module: nn.Module) -> bool:
    return any(type(one) is nn.Linear for one in module.modules() if one is not module)
