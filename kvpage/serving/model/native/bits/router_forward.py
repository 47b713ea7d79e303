"""RouterForward: the forward of a router of experts in a view, in whose code the name F has a native product.

Routers hold a weight and call F.linear themselves, so no layer can stand in for them.
"""

from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from kvpage.ops.cpu.host_layers import host_product
from kvpage.serving.model.meaning import innermost, with_meaning
from kvpage.serving.model.native.containers import is_the_models
from kvpage.serving.model.native.plain import is_plain_call
from kvpage.serving.model.native.torch_threads import TorchThreads

NAME = "F"


class Functional:
    """torch.nn.functional, with a product whose rows do not depend on one another. threads: of the view."""

    def __init__(self, threads: TorchThreads) -> None:
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        """Return torch's function for all other names."""
        return getattr(nn.functional, name)

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows @ weight.T + bias."""
        num_threads = self._threads.caller or torch.get_num_threads()
        out = host_product(rows, weight, bias, None, 0, num_threads, True) if is_plain_call(rows) else None
        return nn.functional.linear(rows, weight, bias) if out is None else out


class RouterForward:
    """The forward of one copy. Its class computes by itself where it has got another forward since."""

    def __init__(self, copy: Any, forward: FunctionType) -> None:
        self._copy, self._own, self._forward = copy, type(copy).forward, MethodType(forward, copy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if type(self._copy).forward is self._own:
            return self._forward(*args, **kwargs)
        return type(self._copy).forward(self._copy, *args, **kwargs)


def routers_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the routers among the children of modules."""
    children = dict.fromkeys(child for module in modules for child in module._modules.values() if child is not None)
    return [child for child in children if is_router(child)]


def is_router(module: nn.Module) -> bool:
    """Return whether a module of the model's own code holds a matrix, and names torch's functions in its forward."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not is_the_models(module) or "forward" in vars(module):
        return False
    return innermost(type(module).forward, NAME) is not None


def router_forward(module: nn.Module, copy: nn.Module, threads: TorchThreads) -> RouterForward | None:
    """Return the forward for the copy of a router; None for other modules."""
    if not is_router(module):
        return None
    forward = with_meaning(type(module).forward, NAME, Functional(threads))
    return None if forward is None else RouterForward(copy, forward)
