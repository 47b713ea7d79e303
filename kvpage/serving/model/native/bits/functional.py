"""Functional: what the name F means in forwards of a view, in place of torch.nn.functional."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kvpage.ops.args.dispatch_modes import unseen
from kvpage.ops.cpu.host_layers import host_product
from kvpage.serving.model.native.bits.whole_vectors import of_elements
from kvpage.serving.model.native.plain import is_plain_call
from kvpage.serving.model.native.torch_threads import TorchThreads

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
