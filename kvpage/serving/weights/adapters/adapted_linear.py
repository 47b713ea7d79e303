"""AdaptedLinear: a linear layer of a view, to whose outputs each row's own adapter is added.

rows of the base model    [ W x                ]
rows of adapter "a"       [ W x + B_a (A_a x)  ]      one product of W for all rows of a step
rows of adapter "b"       [ W x + B_b (A_b x)  ]
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from kvpage.serving.weights.adapters.adapter import Adapter


class AdaptedRows(NamedTuple):
    """The rows of one adapter in a forward pass. rows: a run of them, or int64 indices."""

    adapter: Adapter
    rows: "slice[int, int, None] | torch.Tensor"


class AdaptedPass:
    """Which adapters the rows of the forward pass under way have. For one thread."""

    def __init__(self) -> None:
        self.groups: Sequence[AdaptedRows] = ()
        self.num_rows = 0

    @contextmanager
    def over(self, adapters: Sequence[Adapter | None], counts: npt.NDArray[np.int64], device: Any) -> Iterator[None]:
        """Within, the rows are those of sequences with these adapters. counts: rows of each."""
        self.groups, self.num_rows = groups_of(adapters, counts, device), int(counts.sum())
        try:
            yield
        finally:
            self.groups, self.num_rows = (), 0


class AdaptedLinear(nn.Linear):
    """Stand in for a layer of exactly the class nn.Linear. See AdaptedLinear.of."""

    __slots__ = ("_base", "_pass", "_path")  # not in the shared dict
    _base: nn.Module
    _pass: AdaptedPass
    _path: str

    @classmethod
    def of(cls, source: nn.Linear, base: nn.Module, path: str, adapted: AdaptedPass) -> "AdaptedLinear":
        """Return the layer that stands in for `source`. Whatever is done to one is done to both.

        base: computes the layer's own outputs: the source, or what stands in for it. path: of the source in its model.
        """
        layer = cls.__new__(cls)
        object.__setattr__(layer, "__dict__", vars(source))
        for name, value in (("_base", base), ("_path", path), ("_pass", adapted)):
            object.__setattr__(layer, name, value)
        return layer

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return x W^T + b, and each row's adapter's part."""
        output: torch.Tensor = self._base.forward(input, *args, **kwargs)
        for adapter, rows in self._pass.groups:
            layer = adapter.layers.get(self._path)
            if layer is None:
                continue
            assert input.shape[-2] == self._pass.num_rows, "a decoder layer gets all rows of the step"
            added = layer.product(input[..., rows, :])
            output[..., rows, :] = (output[..., rows, :] + added).to(output.dtype)
        return output


def adapted_layers(
    model: nn.Module, adapters: Sequence[Adapter], bases: Mapping[nn.Module, nn.Module], adapted: AdaptedPass
) -> dict[nn.Module, nn.Module]:
    """Return the layers that stand in for those which some adapter changes, by the model's own.

    bases: what stands in for layers of the model otherwise.
    """
    layers: dict[nn.Module, nn.Module] = {}
    for path in dict.fromkeys(path for adapter in adapters for path in adapter.layers):
        source = model.get_submodule(path)
        if type(source) is not nn.Linear:
            raise ValueError(f"adapters are served on nn.Linear, {path!r} is {type(source).__name__} now")
        layers[source] = AdaptedLinear.of(source, bases.get(source, source), path, adapted)
    return layers


def groups_of(adapters: Sequence[Adapter | None], counts: npt.NDArray[np.int64], device: Any) -> Sequence[AdaptedRows]:
    """Return the rows of each adapter, for sequences that stand one after the other."""
    ends = np.cumsum(counts)
    runs: dict[Adapter, list[tuple[int, int]]] = {}
    for adapter, begin, end in zip(adapters, (ends - counts).tolist(), ends.tolist(), strict=True):
        if adapter is not None:
            of_adapter = runs.setdefault(adapter, [])
            if of_adapter and of_adapter[-1][1] == begin:
                begin = of_adapter.pop()[0]
            of_adapter.append((begin, end))
    return [AdaptedRows(adapter, _rows(of_adapter, device)) for adapter, of_adapter in runs.items()]


def _rows(runs: Sequence[tuple[int, int]], device: Any) -> "slice[int, int, None] | torch.Tensor":
    if len(runs) == 1:
        return slice(*runs[0])
    indices = np.concatenate([np.arange(begin, end) for begin, end in runs])
    return torch.from_numpy(indices).to(device)
