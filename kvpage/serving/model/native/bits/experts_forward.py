"""ExpertsForward: the forward of a module of experts in a view, whose products are two native calls a step.

    hidden_states ─► rows, sorted by expert ─► up, and gate ─► down ─► each token's experts, weighted and summed

The experts of a token are summed in the order in which the router chose them. It stands for the forwards of
transformers that its decorator for experts chooses among, which compute the same up to rounding.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from kvpage.ops.cpu.experts import grouped_linear
from kvpage.ops.cpu.linear import ACTIVATIONS
from kvpage.serving.model.native.plain import is_plain_call, is_unwatched
from kvpage.serving.model.native.torch_threads import TorchThreads
from kvpage.serving.model.native.trial import random_rows, relative_error

FLAGS = "has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm", "_is_expert_parallel"
"""What the decorator tells of a module of experts."""
DEFAULT_GATE = "_default_apply_gate"
NUM_TRIED = 64
MAX_ERROR = 1e-5  # of fp32 rows, relative


class ExpertsForward:
    """The forward of one copy. activation: the number of that of gates as the decorator makes them; 0 for others."""

    def __init__(self, copy: Any, activation: int, threads: TorchThreads) -> None:
        self._copy, self._activation, self._threads = copy, activation, threads
        self._own: Any = type(copy).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and not kwargs and self._fits(*args):
            return self._compute(*args)
        return type(self._copy).forward(self._copy, *args, **kwargs)

    def _fits(self, rows: Any, chosen: Any, factors: Any) -> bool:
        copy = self._copy
        return (
            type(copy).forward is self._own
            and is_plain_call(rows)
            and rows.dim() == 2
            and chosen.shape == factors.shape == (len(rows), chosen.shape[-1])
            and not copy._is_expert_parallel
            and all(weight.dtype == rows.dtype for weight in copy._parameters.values())
        )

    def _compute(self, rows: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        copy, num_each = self._copy, chosen.shape[1]
        flat = chosen.reshape(-1).numpy()
        order = np.argsort(flat, kind="stable")
        ends = np.bincount(flat, minlength=copy.num_experts).cumsum()
        between = self._widened(rows, order // num_each, ends)
        out = self._product(between, np.arange(len(order)), ends, "down_proj")
        if copy.has_post_expert_norm:
            out = copy.post_expert_norm(out)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        parts = out[torch.from_numpy(places)].view(*chosen.shape, -1) * factors.unsqueeze(-1)
        return parts.sum(1).to(rows.dtype)

    def _widened(self, rows: torch.Tensor, order: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return what is between the two products, after the gate or the activation."""
        copy = self._copy
        name = "gate_up_proj" if copy.has_gate else "up_proj"
        if self._activation:
            gate, up = copy._parameters[name].chunk(2, dim=1)
            return grouped_linear(
                rows, order, ends, gate, up=up, activation=self._activation, num_threads=self._num_threads
            )
        product = self._product(rows, order, ends, name)
        between: torch.Tensor = copy._apply_gate(product) if copy.has_gate else copy.act_fn(product)
        return between

    def _product(
        self,
        rows: torch.Tensor,
        order: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        name: str,
    ) -> torch.Tensor:
        weights: dict[str, torch.Tensor] = self._copy._parameters
        bias, is_turned = weights.get(f"{name}_bias"), self._copy.is_transposed
        return grouped_linear(
            rows, order, ends, weights[name], bias, is_turned=is_turned, num_threads=self._num_threads
        )

    @property
    def _num_threads(self) -> int:
        return self._threads.caller or torch.get_num_threads()


def experts_forward(module: nn.Module, copy: nn.Module, threads: TorchThreads) -> ExpertsForward | None:
    """Return the forward for the copy of a module of experts; None for other modules."""
    attributes, weights = vars(module), module._parameters
    if any(flag not in attributes for flag in FLAGS) or "forward" in attributes:
        return None
    names = ["gate_up_proj" if attributes["has_gate"] else "up_proj", "down_proj"]
    names += [f"{name}_bias" for name in names] if attributes["has_bias"] else []
    if weights.keys() != {*names} or any(weight is None or not _is_host(weight) for weight in weights.values()):
        return None
    return ExpertsForward(copy, _gate_activation(module), threads)


def _is_host(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.is_cpu and weight.is_contiguous()


def _gate_activation(module: Any) -> int:
    """Return the number of the activation of a gate that the core computes; 0 for any other way to use the products."""
    gate, act_fn = type(module).__dict__.get("_apply_gate"), module._modules.get("act_fn")
    is_usual = getattr(gate, "__name__", "") == DEFAULT_GATE and module.has_gate and not module.has_bias
    if not is_usual or module.is_transposed or not module.is_concatenated or act_fn is None or not is_unwatched(act_fn):
        return 0
    rows = random_rows(1, NUM_TRIED) * 4
    with torch.no_grad():
        output = act_fn(rows)
    errors = {number: relative_error(function(rows), output) for number, function in ACTIVATIONS.values()}
    return next((number for number, error in errors.items() if error <= MAX_ERROR), 0)
