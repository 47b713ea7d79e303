"""Adapter: a LoRA of peft: what is added to the outputs of some linear layers.

y = W x + b + B (A x)          A: [rank, inputs], B: [outputs, rank], the scaling in it
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class LoraLayer:
    """The two factors for one linear layer.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank], with the scaling.
    """

    a: torch.Tensor
    b: torch.Tensor

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what is added to the layer's outputs for these inputs: [..., outputs], in the factors' dtype.

        rows: [..., inputs].
        """
        linear = torch.nn.functional.linear
        return linear(linear(rows.to(self.a.dtype), self.a), self.b)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that is loaded.

    Attributes:
        name: By which requests ask for it.
        digest: Of every byte of its weights, and of its settings.
        layers: The factors, by the paths of the model's layers.
        keeps_kv: Whether K and V are those of the base model, whose cached prefixes it then shares.
    """

    name: str
    digest: str
    layers: Mapping[str, LoraLayer]
    keeps_kv: bool
