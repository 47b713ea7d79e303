"""NativeLayers: which modules of a view compute with kvpage's operations, and what stands in for them.

    nn.Linear, exactly               NativeLinear               shares its attributes with the model's own
    ...RMSNorm with one weight       a subclass of its own      the same; if a trial has shown that it is the formula
    gate_proj, up_proj, down_proj    GatedForward               in the copy that the view has of the module; likewise
    attention with rotated rows      RotaryForward              the same

Modules of the caller's own, as adapters, are never copied for this: what is switched on them must count at once. What
is inside of them stays the model's own, too.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from kvpage.ops.cpu.host_layers import host_rms_norm
from kvpage.serving.model.native.bits.experts_forward import experts_forward
from kvpage.serving.model.native.bits.functional_forward import functional_forward, routers_of
from kvpage.serving.model.native.containers import containers_of, is_the_models
from kvpage.serving.model.native.gated_mlp import GatedForward, activation_of
from kvpage.serving.model.native.linear import NativeLinear, is_factor, product_of_torch
from kvpage.serving.model.native.norm import NormKinds, is_native_norm
from kvpage.serving.model.native.plain import is_plain_call
from kvpage.serving.model.native.rotary import RotaryForward, RotaryKinds, host_rope
from kvpage.serving.model.native.torch_threads import TorchThreads


class ViewLayers(Protocol):
    """The native layers of one view: these, or those of a GPU."""

    threads: TorchThreads

    def containers(self, copied: Iterable[nn.Module]) -> list[nn.Module]:
        """Return modules that must be copied, too, so that layers inside of them can be native."""

    def stand_ins(self, copied: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
        """Return the native layers in place of children of copied modules, by the model's own layers."""

    def fused_forward(self, module: nn.Module, copy: nn.Module) -> Any:
        """Return a forward for the module's copy with fewer operations; None to leave it as it is."""


class NativeLayers:
    """The native layers of one view. Layers of modules that stay are the same objects at every call.

    is_forced: whether products are native also where torch's are faster, but depend on the number of rows. Then those
    of experts are, too.
    """

    def __init__(self, is_forced: bool = False) -> None:
        self._is_forced = is_forced
        self.threads = TorchThreads()
        self._layers: dict[nn.Module, nn.Module | None] = {}
        self._product = product_of_torch()
        self._norms = NormKinds(is_plain_call, self._norm)
        self._rotary = RotaryKinds(is_plain_call, host_rope)

    def containers(self, copied: Iterable[nn.Module]) -> list[nn.Module]:
        """Return modules that must be copied, too, so that layers inside of them can be native."""
        copied = [*copied]
        containers = containers_of(copied)
        known = {*copied, *containers}
        return containers + [router for router in routers_of(known) if self._is_forced and router not in known]

    def stand_ins(self, copied: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
        """Return the native layers in place of children of copied modules, by the model's own layers."""
        children = {child for module in copied for child in [*module._modules.values()] if child is not None}
        self._layers = {
            child: self._layers[child] if child in self._layers else self._make(child) for child in children
        }
        return {child: layer for child, layer in self._layers.items() if layer is not None}

    def _norm(
        self, rows: torch.Tensor, weight: Any, eps: float, weight_offset: float, rounds_before_weight: bool
    ) -> torch.Tensor | None:
        num_threads = self.threads.caller or torch.get_num_threads()
        return host_rms_norm(rows, weight, eps, weight_offset, rounds_before_weight, num_threads)

    def _make(self, module: nn.Module) -> nn.Module | None:
        if type(module) is not nn.Linear:
            return self._norms.stand_in(module)
        if hasattr(module._parameters.get("weight"), "device_mesh"):  # a shard: the model's own hooks join the ranks
            return None
        return None if self._product is None else NativeLinear.of(module, self.threads, self._product, self._is_forced)

    def fused_forward(self, module: nn.Module, copy: nn.Module) -> Any:
        """Return a forward for the module's copy with fewer operations; None to leave it as it is."""
        activation = activation_of(module)
        if activation is not None:
            return GatedForward(copy, activation, is_factor, self.threads)
        rotated = self._rotary.forward_of(module, copy)
        if rotated is not None or not self._is_forced:
            return rotated
        return experts_forward(module, copy, self.threads) or functional_forward(module, copy, self.threads)


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
    if not is_the_models(module) and not type(module).__module__.startswith("torch.nn.modules."):
        return False
    tensors: list[torch.Tensor | None] = [*module._parameters.values()]
    tensors += [tensor for name, tensor in module._buffers.items() if not name.endswith("_cached")]
    return all(tensor is None or tensor.dim() < 2 for tensor in tensors)
