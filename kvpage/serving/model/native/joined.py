"""JoinedLinear: linear layers with one input, computed by one product. Their weights lie side by side in memory.

    q_proj ─┐                        [ W of q ]
    k_proj ─┼─► x @ ................ [ W of k ] ^T      by the first that is called; the others take their columns
    v_proj ─┘                        [ W of v ]

Like NativeLinear, each shares all attributes with the model's own layer. The model's parameters stay the same objects
with the same values, at other addresses: their memory becomes a part of one tensor, and their attribute `joined_at`
says where. A layer whose weight is moved away later computes by itself again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from kvpage.serving.model.native.plain import version_of

PlainCall = Callable[[torch.Tensor], bool]


class JoinedLinear(nn.Linear):
    """Stand in for a layer of exactly the class nn.Linear that belongs to a JoinedProduct."""

    __slots__ = ("_index", "_product", "_source")  # not in the shared dict
    _index: int
    _product: "JoinedProduct"
    _source: nn.Linear

    @classmethod
    def of(cls, source: nn.Linear, product: "JoinedProduct", index: int) -> "JoinedLinear":
        """Return the layer that stands in for `source`. Whatever is done to one is done to both."""
        layer = cls.__new__(cls)
        object.__setattr__(layer, "__dict__", vars(source))
        object.__setattr__(layer, "_index", index)
        object.__setattr__(layer, "_product", product)
        object.__setattr__(layer, "_source", source)
        return layer

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return x W^T + b. The model's own class computes all but plain calls over joined weights."""
        if not args and not kwargs and type(self._source) is nn.Linear:
            columns = self._product.columns_of(self._index, input)
            if columns is not None:
                return columns
        output: torch.Tensor = type(self._source).forward(self._source, input, *args, **kwargs)
        return output


class JoinedProduct:
    """The product of several layers. It keeps the last one until each layer has taken its columns.

    Args:
        sources: The model's layers, in the order of their weights.
        weight: [all columns, size]: their weights.
        bias: [all columns]; None without.
        is_plain: Tells whether a call has only to compute.
    """

    def __init__(
        self, sources: Sequence[nn.Linear], weight: torch.Tensor, bias: torch.Tensor | None, is_plain: PlainCall
    ) -> None:
        self._sources, self._weight, self._bias, self._is_plain = sources, weight, bias, is_plain
        self._addresses = [parameter.data_ptr() for parameter in self._parameters()]
        self._counts = [source.out_features for source in sources]
        self._input: torch.Tensor | None = None
        self._versions: list[int] = []  # of the input and the parameters, when they were multiplied
        self._columns: dict[int, torch.Tensor] = {}  # those that are not taken yet

    def columns_of(self, index: int, rows: torch.Tensor) -> torch.Tensor | None:
        """Return a layer's columns of the product with `rows`; None if the layer has to compute by itself."""
        parameters = self._parameters()
        if not self._is_plain(rows) or [parameter.data_ptr() for parameter in parameters] != self._addresses:
            self._forget()
            return None
        versions = [version_of(tensor) for tensor in (rows, *parameters)]
        if self._input is not rows or versions != self._versions or index not in self._columns:
            if rows.dtype is not self._weight.dtype:
                return None
            product = nn.functional.linear(rows, self._weight, self._bias)
            self._input, self._versions = rows, versions
            self._columns = dict(enumerate(torch.split(product, self._counts, -1)))
        columns = self._columns.pop(index)
        if not self._columns:
            self._forget()
        return columns

    def _forget(self) -> None:
        self._input = None
        self._columns.clear()

    def _parameters(self) -> list[torch.Tensor]:
        return [part for source in self._sources for part in source._parameters.values() if part is not None]


def join(sources: Sequence[nn.Linear], is_plain: PlainCall) -> list[JoinedLinear] | None:
    """Put the weights of layers side by side, and return layers that stand in for them; None if they do not fit.

    Args:
        sources: Layers of exactly the class nn.Linear.
        is_plain: Tells whether a call has only to compute.
    """
    weights = [source._parameters.get("weight") for source in sources]
    biases = [source._parameters.get("bias") for source in sources]
    if any(weight is None or weight.dim() != 2 for weight in weights):
        return None
    has_bias = biases[0] is not None
    if any((bias is None) == has_bias for bias in biases):
        return None
    if not _fit(weights) or (has_bias and not _fit(biases)):
        return None
    weight, bias = _side_by_side(weights), _side_by_side(biases) if has_bias else None
    product = JoinedProduct(sources, weight, bias, is_plain)
    return [JoinedLinear.of(source, product, index) for index, source in enumerate(sources)]


def _fit(parameters: Sequence[Any]) -> bool:
    """Whether the parameters are plain, alike but for their first sizes, and each has memory of its own, or all one."""
    first = parameters[0]
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or hasattr(parameter, "device_mesh"):
            return False
        if parameter.layout is not torch.strided or not parameter.is_contiguous() or parameter.is_neg():
            return False
        if (parameter.dtype, parameter.device, parameter.shape[1:]) != (first.dtype, first.device, first.shape[1:]):
            return False
        if not parameter.dtype.is_floating_point or not parameter.numel() or not parameter.data_ptr():
            return False
    return _are_side_by_side(parameters) or all(map(_has_own_memory, parameters))


def _has_own_memory(parameter: torch.Tensor) -> bool:
    return parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


def _are_side_by_side(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether each begins where the one before it ends, in one storage: as another engine has put them."""
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    ends = [parameter.data_ptr() + parameter.numel() * parameter.element_size() for parameter in parameters]
    starts = [parameter.data_ptr() for parameter in parameters]
    return len(storages) == 1 and ends[:-1] == starts[1:]


def _side_by_side(parameters: Sequence[Any]) -> torch.Tensor:
    """Return one tensor whose memory the parameters share from now on."""
    num_rows = [len(parameter) for parameter in parameters]
    first: torch.Tensor = parameters[0].detach()
    if _are_side_by_side(parameters):
        return first.as_strided((sum(num_rows), *first.shape[1:]), first.stride())
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(joined, num_rows), strict=True):
        parameter.data = part
        parameter.joined_at = part.data_ptr()  # for those who watch whether others give it other memory
    return joined
