"""MixerHooks: let the mixers of a model compute a forward in pieces, with a snapshot of their states after each.

    before    the mixer's own forward for all pieces but the last       c0 c1 c2 │ c3
    call      the last piece
    after     snapshots, and the outputs of all pieces

Other modules compute all tokens at once. Most forwards are one piece: then only the snapshot is taken.

A mixer whose steps are apart would compute one token of a prompt by another rule: see scan_step. Then the last piece is
computed before the call, too. The call's own output for it is left out.
"""

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kvpage.cache.state_cache import StateKey
from kvpage.serving.generate.forward_hooks import REGISTERING
from kvpage.serving.generate.states.row_states import RowPass
from kvpage.serving.model.states.mixer import PieceForward


class StateListener(Protocol):
    """A cache, as the hooks see it."""

    @property
    def row_pass(self) -> RowPass | None:
        """The states of the forward that is under way."""


class MixerHooks:
    """Hooks on one mixer for one listener, which they do not keep alive. They ignore calls without it."""

    def __init__(self, forward: PieceForward, listener: StateListener) -> None:
        self._mixer, self._forward = forward.mixer, forward
        self._listener: weakref.ref[StateListener] = weakref.ref(listener)
        self._outputs: list[Any] = []
        self._after_scan: dict[StateKey, torch.Tensor] | None = None  # states, where the call's are left out
        with REGISTERING:
            self._handles: list[RemovableHandle] = [
                forward.mixer.module.register_forward_pre_hook(self._before, with_kwargs=True),
                forward.mixer.module.register_forward_hook(self._after, with_kwargs=True),
            ]

    def remove(self) -> None:
        """Remove the hooks. Not within a forward that is given the listener."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._outputs, self._after_scan = [], None
        states = self._states(args, kwargs)
        if states is None or kwargs is None:
            return None
        states.states.begin(self._mixer.keys)
        pieces = states.pieces(self._mixer.is_stepwise, not self._forward.is_stepwise)
        last, is_left_out = pieces[-1], self._mixer.steps_apart and states.is_scanned(pieces[-1])
        for piece in pieces if is_left_out else pieces[:-1]:
            piece_args, named = (_cut(values, states.num_tokens, piece) for values in (args, kwargs))
            self._outputs.append(self._forward.compute(self._listener(), piece_args, named))
            states.keep(self._mixer.keys, piece.stop)
        if is_left_out:
            self._after_scan = states.copied(self._mixer.keys)
        if len(pieces) == 1:
            return None
        return _cut(args, states.num_tokens, last), _cut(kwargs, states.num_tokens, last)

    def _after(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        kwargs, output = rest if len(rest) == 2 else (None, *rest)
        states = self._states(args, kwargs)
        if states is None:
            return None
        outputs, self._outputs = self._outputs, []
        if self._after_scan is not None:
            states.put(self._after_scan)
            return _join(outputs)
        states.keep(self._mixer.keys, states.num_tokens)
        return _join([*outputs, output]) if outputs else None

    def _states(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> RowPass | None:
        """Return the states of the forward that the call belongs to. The listener belongs to its own thread."""
        listener = self._listener()
        if listener is None or kwargs is None or not any(value is listener for value in (*kwargs.values(), *args)):
            return None
        return listener.row_pass


def _cut(value: Any, num_tokens: int, piece: slice) -> Any:
    """Return the tokens of each tensor [num_rows, num_tokens, ...] or [num_tokens], in nested containers too."""
    if isinstance(value, torch.Tensor):
        if value.dim() >= 2 and value.shape[1] == num_tokens:
            return value[:, piece]
        return value[piece] if value.shape == (num_tokens,) else value
    if type(value) in (tuple, list):
        return type(value)(_cut(part, num_tokens, piece) for part in value)
    if type(value) is dict:
        return {name: _cut(part, num_tokens, piece) for name, part in value.items()}
    return value


def _join(outputs: list[Any]) -> Any:
    """Return the output of all pieces: tensors [num_rows, tokens of the piece, ...], tuples of such, or None."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(outputs, dim=1)
    if type(first) in (tuple, list):
        return type(first)(_join(list(parts)) for parts in zip(*outputs, strict=True))
    return first
