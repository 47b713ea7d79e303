"""Adapter: a LoRA of peft: what is added to the outputs of some linear layers.

y = W x + b + B (A x)          A: [rank, inputs], B: [outputs, rank], the scaling in it
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

MAX_NAME_CHARACTERS = 256
MAX_SHOWN = 80  # characters of a name in an error


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


def check_adapter_name(name: str) -> None:
    """Raise TypeError unless an adapter's name is a str, and ValueError for a name that no request could write plainly.

    Names are models' names in requests, parts of URLs, and words of logs and metrics.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"name must have 1 to {MAX_NAME_CHARACTERS} characters, got {len(name)}")
    is_plain = name.isprintable() and name == name.strip() and not {"/", "\\"} & {*name}
    if not is_plain or name in (".", ".."):
        rule = "printable characters without slashes, and no blank at an end"
        raise ValueError(f"name must have {rule}, got {name[:MAX_SHOWN]!r}")
