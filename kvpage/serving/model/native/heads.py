"""HeadForward: the forward of an attention's copy, whose heads are normed, rotated and written by one operation.

    rows ─► q_proj, k_proj, v_proj ─► one operation ─► attention over blocks ─► o_proj

Calls outside of an engine's step, and all that are not of the shape that the trial has shown, take another forward.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers import Cache

from kvpage.layout.attention import Attention
from kvpage.layout.row_norm import RowNorm
from kvpage.ops import BoundCache
from kvpage.serving.model.native.head_shape import FUNCTIONS, HeadShape, head_shape_of
from kvpage.serving.model.native.norm import row_norm_of
from kvpage.serving.model.native.rotary import RotaryForward

OPTIONS = {"scaling", "sliding_window", "softcap", "s_aux", "dropout"}
"""Arguments of the attention function that the module itself gives."""
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Norms = tuple[RowNorm, RowNorm] | None
WriteHeads = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Norms, torch.Tensor, torch.Tensor, BoundCache, torch.Tensor],
    torch.Tensor | None,
]


class Attends(Protocol):
    """See kvpage.serving.model.attention.HeadAttention."""

    def step_of(self, module: nn.Module, function: object, step: Any) -> Any:
        """Return the step of a layer whose rows are all written and attended to; else None."""

    def attend(
        self,
        module: nn.Module,
        step: Any,
        attention: Attention,
        write: Callable[[BoundCache, torch.Tensor], torch.Tensor | None],
        rows: Callable[[], Heads],
    ) -> torch.Tensor:
        """Write K and V and attend: [1, num_tokens, heads, value_size]."""


class HeadForward:
    """The forward of one copy.

    copy: the attention's copy. shape: shown by a trial. other: the forward for all calls that are not plain.
    """

    def __init__(
        self,
        copy: nn.Module,
        shape: HeadShape,
        other: RotaryForward,
        is_plain: Callable[[torch.Tensor], bool],
        attends: Attends,
        write: WriteHeads,
    ) -> None:
        self._copy, self._shape, self._other = copy, shape, other
        self._is_plain, self._attends, self._write = is_plain, attends, write
        self._own: Any = type(copy).forward
        options = shape.sliding_window, shape.softcap, None, shape.value_size
        self._attention = Attention(shape.scaling or shape.size**-0.5, *options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows: Any = kwargs.get("hidden_states")
        embeddings: Any = kwargs.get("position_embeddings")
        if args or not self._is_usual(rows, embeddings, kwargs):
            return self._other(*args, **kwargs)
        norms = self._norms()
        step = self._step(kwargs) if norms is None or all(norms) else None
        if step is None:
            return self._other(**kwargs)
        parts: dict[str, Any] = self._copy._modules
        query, key, value = (
            parts[name](rows).unflatten(-1, (-1, self._shape.size)) for name in ("q_proj", "k_proj", "v_proj")
        )

        def write(cache: BoundCache, slots: torch.Tensor) -> torch.Tensor | None:
            cos, sin = embeddings
            return self._write(query[0], key[0], value[0], norms, cos[0], sin[0], cache, slots)

        def turned() -> Heads:
            return self._turned(query, key, value, embeddings)

        output = self._attends.attend(self._copy, step, self._attention, write, turned)
        return parts["o_proj"](output.flatten(2)), None

    def _is_usual(self, rows: Any, embeddings: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the call has only to compute, with arguments as in the trial."""
        if type(rows) is not torch.Tensor or rows.dim() != 3 or len(rows) != 1 or not self._is_plain(rows):
            return False
        if type(embeddings) is not tuple or len(embeddings) != 2:
            return False
        if any(
            type(part) is not torch.Tensor or part.shape != (1, rows.shape[1], self._shape.size) for part in embeddings
        ):
            return False
        if not OPTIONS.isdisjoint(kwargs) or any(kwargs.get(name) is not None for name in self._shape.absent):
            return False
        if any(isinstance(value, Cache) for value in kwargs.values()):
            return False
        return type(self._copy).forward is self._own and not self._copy.training and self._other.rotates_as_tried()

    def _norms(self) -> Any:
        """Return the numbers of both norms, None for one that has to be called; None if there are no norms."""
        parts = self._copy._modules
        return (row_norm_of(parts["q_norm"]), row_norm_of(parts["k_norm"])) if self._shape.has_norms else None

    def _step(self, kwargs: dict[str, Any]) -> Any:
        """Return the step, if the module would call kvpage's attention; else None."""
        copy: Any = self._copy
        functions = self._other.names.get(FUNCTIONS, {})
        return self._attends.step_of(copy, functions.get(copy.config._attn_implementation), kwargs.get("kvpage"))

    def _turned(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, embeddings: Any) -> Heads:
        """Return the heads as the module's own forward hands them to attention."""
        if self._shape.has_norms:
            parts: dict[str, Any] = self._copy._modules
            query, key = parts["q_norm"](query), parts["k_norm"](key)
        query, key = self._other.rotate(query.transpose(1, 2), key.transpose(1, 2), *embeddings)
        return query, key, value.transpose(1, 2)


class HeadKinds:
    """The forwards of one view that write heads.

    Args:
        is_plain: Tells of rows whether a call has only to compute.
        attends: Attention over blocks.
        write: Norms, rotates and writes heads, and returns queries; None for those that it does not take.
    """

    def __init__(self, is_plain: Callable[[torch.Tensor], bool], attends: Attends, write: WriteHeads) -> None:
        self._is_plain, self._attends, self._write = is_plain, attends, write

    def forward_of(self, module: nn.Module, copy: nn.Module, other: RotaryForward) -> HeadForward | RotaryForward:
        """Return a forward for an attention's copy: `other`, if its heads are made in another way."""
        shape = head_shape_of(module)
        if shape is None:
            return other
        return HeadForward(copy, shape, other, self._is_plain, self._attends, self._write)
