"""DeviceLayers: what stands in for modules of a view on a GPU, so that a decode step launches fewer kernels.

    q_proj, k_proj, v_proj; gate_proj, up_proj    JoinedLinear          one product of torch's for each group
    ...RMSNorm with one weight                    a subclass of its own one kernel; if a trial has shown the formula
    decoder layer with such norms                 ResidualForward       one kernel for a sum and the norms around it
    act_fn(gate) * up of a gated MLP              DeviceGatedForward    one kernel; likewise
    attention with rotated rows                   RotaryForward         one kernel for queries and keys
    the same in an engine's step                  HeadForward           one kernel for norms, rotation and written rows

Each stand-in computes what the model's own module does, up to the rounding of its dtype: a trial on a CPU has shown the
formula when the view was made. A layer of a decode step launches 8 kernels beside attention for Llama, Qwen3 and Gemma
3. The modules' own are 37, 53 and 81.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from kvpage.ops.cuda.layers import device_add_norm, device_gate, device_heads, device_rms_norm, device_rope
from kvpage.serving.model.native.containers import containers_of
from kvpage.serving.model.native.gated_mlp import activation_of
from kvpage.serving.model.native.heads import Attends, HeadKinds
from kvpage.serving.model.native.joined import PlainCall, join
from kvpage.serving.model.native.norm import NormKinds
from kvpage.serving.model.native.plain import is_plain_call, is_unwatched
from kvpage.serving.model.native.residual import Sums
from kvpage.serving.model.native.rotary import RotaryForward, RotaryKinds
from kvpage.serving.model.native.torch_threads import TorchThreads

GROUPS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of layers that models call with one input, one after the other."""

is_plain_on_gpu = partial(is_plain_call, device_type="cuda")


class DeviceLayers:
    """The native layers of one view on a GPU. Layers of modules that stay are the same objects at every call.

    attends: attention over blocks, for layers whose heads are written by one kernel; None to leave heads to others.
    is_plain: tells whether a call has only to compute; tests have kernels run elsewhere.
    """

    def __init__(self, attends: Attends | None = None, is_plain: PlainCall = is_plain_on_gpu) -> None:
        self.threads = TorchThreads(lambda: None)  # nothing to limit
        self._is_plain = is_plain
        self._layers: dict[nn.Module, nn.Module | None] = {}
        self._sums = Sums(is_plain, device_add_norm)
        self._norms = NormKinds(is_plain, device_rms_norm, self._sums.take)
        self._rotary = RotaryKinds(is_plain, device_rope)
        self._heads = None if attends is None else HeadKinds(is_plain, attends, device_heads)

    def containers(self, copied: Iterable[nn.Module]) -> list[nn.Module]:
        """Return modules that must be copied, too, so that layers inside of them can be native."""
        return containers_of(copied)

    def stand_ins(self, copied: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
        """Return the native layers in place of children of copied modules, by the model's own layers."""
        layers: dict[nn.Module, nn.Module | None] = {}
        for module in copied:
            for child in [*module._modules.values()]:
                if child is not None and child not in layers:
                    layers[child] = self._layers[child] if child in self._layers else self._norms.stand_in(child)
            self._join(module._modules, layers)
        self._layers = layers
        return {child: layer for child, layer in layers.items() if layer is not None}

    def _join(self, parts: dict[str, nn.Module | None], layers: dict[nn.Module, nn.Module | None]) -> None:
        """Add the joined layers among a module's parts."""
        for names in GROUPS:
            sources: list[Any] = [parts.get(name) for name in names]
            if any(type(source) is not nn.Linear or layers[source] is not None for source in sources):
                continue
            joined = join(sources, self._is_plain)
            if joined is not None:
                layers.update(zip(sources, joined, strict=True))

    def fused_forward(self, module: nn.Module, copy: nn.Module) -> Any:
        """Return a forward for the module's copy with fewer operations; None to leave it as it is."""
        activation = activation_of(module)
        if activation is not None:
            return DeviceGatedForward(copy, activation, self._is_plain)
        forward = self._sums.forward_of(module, copy) or self._rotary.forward_of(module, copy)
        if self._heads is None or not isinstance(forward, RotaryForward):
            return forward
        return self._heads.forward_of(module, copy, forward)


class DeviceGatedForward:
    """The forward of one copy of a gated MLP. Its class's own forward computes all but plain calls, as do forwards that
    it or the activation's class gets later."""

    def __init__(self, copy: nn.Module, activation: str, is_plain: PlainCall) -> None:
        self._copy, self._is_plain = copy, is_plain
        self._gate = partial(device_gate, activation=activation)
        self._own: Any = type(copy).forward
        modules: dict[str, Any] = copy._modules
        self._own_activation: Any = type(modules["act_fn"]).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts: dict[str, Any] = self._copy._modules
        act_fn, is_own = parts["act_fn"], type(self._copy).forward is self._own
        is_plain = len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor and self._is_plain(args[0])
        if not (is_plain and is_own and type(act_fn).forward is self._own_activation and is_unwatched(act_fn)):
            return type(self._copy).forward(self._copy, *args, **kwargs)
        gates, ups = parts["gate_proj"](args[0]), parts["up_proj"](args[0])
        between = self._gate(gates, ups)
        return parts["down_proj"](act_fn(gates) * ups if between is None else between)
