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
from kvpage.serving.model.native.trial import own_forward, random_rows, relative_error

MAX_ERROR = 1e-5  # of fp32 rows, relative
SIZE = 8  # of rows, in the trial


class NativeLinear(nn.Linear):
    """Stand in for a layer of exactly the class nn.Linear. See NativeLinear.of.

    It is native for as long as torch computes a linear layer by the function that was tried out: see product_of_torch.
    """

    __slots__ = ("_is_forced", "_product", "_source", "_threads")  # not in the shared dict
    _is_forced: bool
    _product: Any
    _source: nn.Linear
    _threads: TorchThreads

    @classmethod
    def of(cls, source: nn.Linear, threads: TorchThreads, product: Any, is_forced: bool = False) -> "NativeLinear":
        """Return the layer that stands in for `source`. Whatever is done to one is done to both.

        product: that of product_of_torch. is_forced: see host_product.
        """
        layer = cls.__new__(cls)
        object.__setattr__(layer, "__dict__", vars(source))
        object.__setattr__(layer, "_is_forced", is_forced)
        object.__setattr__(layer, "_product", product)
        object.__setattr__(layer, "_source", source)
        object.__setattr__(layer, "_threads", threads)
        return layer

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return x W^T + b. The model's own class computes all but plain calls over plain weights."""
        if not args and not kwargs and is_torchs(self) and is_plain_call(input):
            parameters: dict[str, Any] = self._parameters  # torch's lookup of attributes takes a microsecond
            weight, bias = parameters.get("weight"), parameters.get("bias", self)
            num_threads = self._threads.caller or get_num_threads()
            output = host_product(input, weight, bias, None, 0, num_threads, self._is_forced)
            if output is not None:
                return output
        with self._threads.lifted():
            result: torch.Tensor = type(self._source).forward(self._source, input, *args, **kwargs)
        return result


def product_of_torch() -> Any:
    """Return nn.Linear's forward and the function that it calls, if a trial shows a product; None if it shows another.

    Libraries put functions of their own in their places, for all models of the process.
    """
    layer = nn.Linear(SIZE, SIZE, bias=True, device="meta")
    weight, bias, rows = torch.split(random_rows(2 * SIZE * SIZE + SIZE), [SIZE * SIZE, SIZE, SIZE * SIZE])
    weight, rows = weight.reshape(SIZE, SIZE), rows.reshape(SIZE, SIZE)
    product = own_forward(layer, rows, _parameters={"weight": weight, "bias": bias})
    if product is not None and relative_error(product, rows @ weight.T + bias) <= MAX_ERROR:
        return nn.Linear.forward, nn.functional.linear
    return None


def is_torchs(layer: Any) -> bool:
    """Return whether a native layer still stands in for an nn.Linear that computes as it did when it was tried out."""
    forward, product = layer._product
    return (
        type(layer._source) is nn.Linear  # else it has got a parametrisation since
        and nn.Linear.forward is forward
        and nn.functional.linear is product
    )


def is_factor(layer: Any) -> bool:
    """Return whether the layer is a product without bias and nothing else, and nothing watches it."""
    return (
        type(layer) is NativeLinear
        and is_torchs(layer)
        and layer._parameters.get("bias", layer) is None
        and is_unwatched(layer)
    )
