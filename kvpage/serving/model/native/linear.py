"""NativeLinear: a linear layer of a view. It shares all attributes with the model's own, and computes with kvpage.

the model's nn.Linear ──┐
                        ├─► one dict: weight, bias, hooks, all that is set on the layer at any time
the view's NativeLinear ┘
"""

from typing import Any

import torch
from torch import get_num_threads, nn

from kvpage.ops.cpu.host_layers import host_product
from kvpage.serving.model.native.plain import is_plain_call, is_unwatched
from kvpage.serving.model.native.torch_threads import TorchThreads


class NativeLinear(nn.Linear):
    """Stand in for a layer of exactly the class nn.Linear. See NativeLinear.of."""

    __slots__ = ("_source", "_threads")  # not in the shared dict
    _source: nn.Linear
    _threads: TorchThreads

    @classmethod
    def of(cls, source: nn.Linear, threads: TorchThreads) -> "NativeLinear":
        """Return the layer that stands in for `source`. Whatever is done to one is done to both."""
        layer = cls.__new__(cls)
        object.__setattr__(layer, "__dict__", vars(source))
        object.__setattr__(layer, "_source", source)
        object.__setattr__(layer, "_threads", threads)
        return layer

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return x W^T + b. The model's own class computes all but plain calls over plain weights."""
        if not args and not kwargs and type(self._source) is nn.Linear and is_plain_call(input):
            held: dict[str, Any] = self._parameters  # torch's lookup of attributes takes a microsecond
            output = host_product(
                input, held.get("weight"), held.get("bias", self), None, 0, self._threads.caller or get_num_threads()
            )
            if output is not None:
                return output
        with self._threads.lifted():
            own: torch.Tensor = type(self._source).forward(self._source, input, *args, **kwargs)
        return own


def is_factor(layer: Any) -> bool:
    """Return whether the layer is a product without bias and nothing else, and nothing watches it."""
    return (
        type(layer) is NativeLinear
        and type(layer._source) is nn.Linear  # else it has got a parametrisation since
        and layer._parameters.get("bias", layer) is None
        and is_unwatched(layer)
    )
