"""DeviceBits: RowBits on a GPU, where torch's operators choose an order by the number of rows more often.

    EXACT        ─► torch, but for writes by an index, which several threads do in any order
    FUNCTIONS    ─► torch, over contiguous memory: one formula for all elements
    PRODUCTS     ─► kvpage.kernels.linear
    another      ─► OptionError, with its name: sums of rows among them, which the layers' own kernels take

No kernel of this way has run on a device yet: the interpreter of Triton has run them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpage.checks.errors import OptionError
from kvpage.ops.cuda.layers import device_linear
from kvpage.ops.cuda.libraries.rules import OURS
from kvpage.serving.model.native.bits.operators import EXACT_POWERS, REDUCTIONS
from kvpage.serving.model.native.bits.row_bits import RowBits

_UNORDERED = """
    _unique2 addcmul addcmul_ argsort bincount histc index_add index_add_ index_copy index_copy_ index_put index_put_
    scatter scatter_ sort topk
"""
UNORDERED = frozenset(_UNORDERED.split())
"""Exact on a CPU. Here some write or choose in no order, and others round a product and a sum at once."""
EXTREMA = frozenset(("amax", "amin", "aminmax", "max", "min"))
"""Reductions whose order makes no difference."""
MATRICES = frozenset(("addmm", "baddbmm", "bmm", "mm"))


class DeviceBits(RowBits):  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
    """The mode of one model's view on a GPU."""

    DEVICE = "cuda"

    def _rule_of(self, function: Any) -> Any:
        name, rule = super()._rule_of(function)
        if name in UNORDERED or (name in REDUCTIONS and name not in EXTREMA):
            return name, self._refuse
        return name, rule

    def _multiply(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        self._noted.add(name)
        is_usual = name in MATRICES and all(value == 1 for value in kwargs.values())
        out = _product(*args) if is_usual else None
        if out is None:
            refused: torch.Tensor = self._refuse(function, name, args, kwargs, "of another form than kvpage's kernel")
            return refused
        return out

    def _by_elements(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, others = args[0], tuple(args[1:])
        if not isinstance(x, torch.Tensor) or x.is_complex() or any(isinstance(y, torch.Tensor) for y in others):
            return self._refuse(function, name, args, kwargs, "of several tensors")
        if x.is_contiguous() or (name.startswith("pow") and others[0] in EXACT_POWERS):
            return function(*args, **kwargs)
        self._noted.add(name)
        if not name.endswith("_"):
            return function(x.contiguous(), *others, **kwargs)
        return x.copy_(function(x.contiguous(), *others, **kwargs))


def _product(*args: torch.Tensor) -> torch.Tensor | None:
    """Return rows @ matrix of the last two arguments, of one matrix or of several, plus the one before; None if the
    kernel does not take them."""
    *addends, rows, matrix = args
    if rows.dim() == 3:
        parts = [device_linear(part, other.t(), None) for part, other in zip(rows, matrix, strict=True)]
        out = None if None in parts or not parts else torch.stack(parts)  # type: ignore[arg-type]
    elif addends and addends[0].dim() == 1 and len(addends[0]) == matrix.shape[1]:
        return device_linear(rows, matrix.t(), addends[0].contiguous())
    else:
        out = device_linear(rows, matrix.t(), None)
    return out if out is None or not addends else out + addends[0]


def check_device_bits(
    model: PreTrainedModel, *, has_states: bool, backend: str, blends: bool, native_layers: bool, attention_backend: str
) -> None:
    """Raise OptionError for what cannot have the same bits on a GPU, with the reason. Operators are looked at later.

    backend: of the cache. The others are options of an engine.
    """
    name = type(model).__name__
    for is_refused, why in (
        (has_states, f"{name} keeps states, whose scans on a GPU are others' kernels"),
        (backend == "mla", "latents are multiplied by torch on a GPU, in an order of its own"),
        (blends, "blending chooses tokens by torch's operators on a GPU"),
        (getattr(model, "hf_quantizer", None) is not None, f"products of the quantised weights of {name} are others'"),
        (not native_layers, "native_layers is False, and torch's norms on a GPU depend on the number of rows"),
        (
            attention_backend not in ("auto", OURS),
            f"attention_backend is {attention_backend!r}, and only kvpage's kernel splits keys by position",
        ),
    ):
        if is_refused:
            raise OptionError(f"same_bits must be False: {why}")
