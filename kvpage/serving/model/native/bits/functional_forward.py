"""FunctionalForward: the forward of a module in a view, in whose code the name F is a Functional.

Routers hold a weight and call F.linear themselves, so no layer can stand in for them. Blocks of experts call F.sigmoid
of one number a token.
"""

from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from kvpage.ops.args.dispatch_modes import unseen
from kvpage.ops.cpu.host_layers import host_product
from kvpage.serving.model.meaning import innermost, with_meaning
from kvpage.serving.model.native.bits.whole_vectors import of_elements
from kvpage.serving.model.native.containers import is_the_models
from kvpage.serving.model.native.plain import is_plain_call
from kvpage.serving.model.native.torch_threads import TorchThreads

NAME = "F"
ELEMENTS = frozenset(("sigmoid", "silu", "softplus"))
"""Functions of single elements that are taken by whole vectors."""


class Functional:
    """torch.nn.functional, whose products and functions of ELEMENTS give a row the same bits in every batch.

    threads: of the view.
    """

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

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logistic function."""
        return _of_elements(torch.sigmoid, x)

    def silu(self, x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        """Return x * sigmoid(x)."""
        return nn.functional.silu(x, inplace) if inplace else _of_elements(nn.functional.silu, x)

    def softplus(self, x: torch.Tensor, *args: float, **kwargs: float) -> torch.Tensor:
        """Return log(1 + exp(x)), as torch's with its options."""
        if args or kwargs:
            return nn.functional.softplus(x, *args, **kwargs)
        return _of_elements(nn.functional.softplus, x)


def _of_elements(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if not is_plain_call(x):
        return function(x)
    with unseen():
        return of_elements(function, x)


class FunctionalForward:
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
    return weight is not None and weight.dim() == 2 and _names(module) is not None


def functional_forward(module: nn.Module, copy: nn.Module, threads: TorchThreads) -> FunctionalForward | None:
    """Return the forward for the copy of a router, or of a module that calls functions of ELEMENTS; else None."""
    if not is_router(module) and not ELEMENTS & (_names(module) or frozenset()):
        return None
    forward = with_meaning(type(module).forward, NAME, Functional(threads))
    return None if forward is None else FunctionalForward(copy, forward)


def _names(module: nn.Module) -> frozenset[str] | None:
    """Return the names in the code of a module of the model's own, that names torch's functions; None for others."""
    if not is_the_models(module) or "forward" in vars(module):
        return None
    inner = innermost(type(module).forward, NAME)
    return None if inner is None else frozenset(inner.__code__.co_names)
