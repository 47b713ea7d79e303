"""NativeLinear: a linear layer of a view. It shares all attributes with the model's own, and computes with kvpage.

the model's nn.Linear ──┐
                        ├─► one dict: weight, bias, hooks, all that is set on the layer at any time
the view's NativeLinear ┘
"""

from typing import Any

import torch
from torch import nn

from kvpage import ops
from kvpage.serving.model.native.plain import is_plain_call, is_plain_weight, is_unwatched


class NativeLinear(nn.Linear):
    """Stand in for a layer of exactly the class nn.Linear. See NativeLinear.of."""

    __slots__ = ("_source",)  # not in the shared dict
    _source: nn.Linear

    @classmethod
    def of(cls, source: nn.Linear) -> "NativeLinear":
        """Return the layer that stands in for `source`. Whatever is done to one is done to both."""
        layer = cls.__new__(cls)
        object.__setattr__(layer, "__dict__", vars(source))
        object.__setattr__(layer, "_source", source)
        return layer

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return x W^T + b. The model's own class computes all but plain calls over plain weights."""
        if not args and not kwargs and is_plain_call(input) and self.is_plain(input.dtype):
            plain: dict[str, Any] = self._parameters  # torch's lookup of attributes takes a microsecond
            return ops.linear(input, plain["weight"], plain["bias"])
        output: torch.Tensor = type(self._source).forward(self._source, input, *args, **kwargs)
        return output

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Return whether the layer is a product with weights of this dtype, and nothing else."""
        if type(self._source) is not nn.Linear:  # it has got a parametrisation since
            return False
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias", self)
        return is_plain_weight(weight, dtype) and (bias is None or is_plain_weight(bias, dtype))


def is_factor(layer: Any, dtype: torch.dtype) -> bool:
    """Return whether the layer is native, a product of this dtype without bias, and nothing watches it."""
    return (
        type(layer) is NativeLinear
        and layer.is_plain(dtype)
        and layer._parameters["bias"] is None
        and is_unwatched(layer)
    )
