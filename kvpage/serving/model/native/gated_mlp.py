"""GatedForward: the forward of a gated MLP's copy, whose first two products, activation and factor are one operation.

x ─┬─► gate_proj ─► act_fn ─┐
   │                        ├─► * ─► down_proj           down_proj is called as ever, hooks and all
   └─► up_proj ─────────────┘
   └────── gated_linear ──────┘
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import get_num_threads, nn

from kvpage.ops.cpu.host_layers import host_product
from kvpage.ops.cpu.linear import ACTIVATIONS as NUMBERED
from kvpage.serving.model.native.plain import is_plain_call, is_unwatched
from kvpage.serving.model.native.torch_threads import TorchThreads
from kvpage.serving.model.native.trial import own_forward, random_rows, relative_error

PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": lambda rows: nn.functional.gelu(rows, approximate="tanh"),
}
MAX_ERROR = 1e-5  # of fp32 rows, relative
SIZES = 8, 12  # of rows and of what is between, in the trial
SCALES = (1e-2, 1.0, 10.0, 1e3)  # of rows: a limit anywhere between shows


class GatedForward:
    """The forward of one copy. Its class's own forward computes all but plain calls, as do forwards that it or the
    activation's class gets later.

    is_factor: whether a layer is a product without bias, that nothing watches: see linear.is_factor.
    """

    def __init__(
        self, copy: nn.Module, activation: str, is_factor: Callable[[Any], bool], threads: TorchThreads
    ) -> None:
        self._copy, self._is_factor, self._threads = copy, is_factor, threads
        self._activation, _ = NUMBERED[activation]
        self._own: Any = type(copy).forward
        modules: dict[str, Any] = copy._modules
        self._own_activation: Any = type(modules["act_fn"]).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts: dict[str, Any] = self._copy._modules
        if len(args) == 1 and not kwargs and is_plain_call(args[0]) and self._is_plain(parts):
            gate, up = parts["gate_proj"]._parameters.get("weight"), parts["up_proj"]._parameters.get("weight", self)
            num_threads = self._threads.caller or get_num_threads()
            is_forced = parts["gate_proj"]._is_forced
            between = host_product(args[0], gate, None, up, self._activation, num_threads, is_forced)
            if between is not None:
                return parts["down_proj"](between)
        return type(self._copy).forward(self._copy, *args, **kwargs)

    def _is_plain(self, parts: dict[str, Any]) -> bool:
        return (
            type(self._copy).forward is self._own
            and self._is_factor(parts["gate_proj"])
            and self._is_factor(parts["up_proj"])
            and type(parts["act_fn"]).forward is self._own_activation
            and is_unwatched(parts["act_fn"])
        )


def activation_of(module: nn.Module) -> str | None:
    """Return the name of the activation of a gated MLP, found by trying its forward out; None for other modules."""
    parts = module._modules
    if parts.keys() != PARTS or module._parameters or module._buffers or "forward" in vars(module):
        return None
    act_fn = parts["act_fn"]
    if act_fn is None or not is_unwatched(act_fn) or any(True for _ in act_fn.parameters()):
        return None
    weights = _trial_weights()
    rows = torch.cat([random_rows(2, SIZES[0]) * scale for scale in SCALES])
    output = own_forward(module, rows, _modules={**weights, "act_fn": act_fn})
    if output is None:
        return None
    errors = {name: relative_error(_formula(rows, weights, function), output) for name, function in ACTIVATIONS.items()}
    return next((name for name, error in errors.items() if error <= MAX_ERROR), None)


def _formula(
    rows: torch.Tensor, weights: dict[str, nn.Linear], function: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    gate, up, down = (weights[name].weight for name in ("gate_proj", "up_proj", "down_proj"))
    with torch.no_grad():
        return (function(rows @ gate.T) * (rows @ up.T)) @ down.T


def _trial_weights() -> dict[str, nn.Linear]:
    """Return three small layers of random weights, without a use of torch's own generator."""
    size, inner = SIZES
    shapes = {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}
    numbers = random_rows(3 * size * inner).chunk(3)
    layers = {}
    for part, (name, shape) in zip(numbers, shapes.items(), strict=True):
        layers[name] = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        layers[name].register_parameter("weight", nn.Parameter(part.reshape(shape), requires_grad=False))
    return layers
