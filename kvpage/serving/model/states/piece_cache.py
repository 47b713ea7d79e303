"""PieceCache: the cache that a state mixer is given for one piece of a packed row. It reads and writes state slots.

    one sequence        a view of its slot: what the mixer writes is in the slot
    decodes, batched    the states of all, gathered; `write_back` puts them into their slots

It has the methods of transformers' Cache that mixers call, with the same meaning, also of states that do not exist yet.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
import transformers
from packaging.version import Version

from kvpage.cache.state_cache import StateKey

ARE_NUMBERED = Version(transformers.__version__) >= Version("5.14")
"""Whether layers of transformers' cache may have several states of one kind. Updates then give columns before, too."""
Slots = slice | torch.Tensor
"""Neighbouring slots, or int64 [n] on the slots' device."""


class StatesOfLayer:
    """The states of one kind of one layer, by their index."""

    def __init__(self, get: Callable[[int, int], torch.Tensor | None], layer_idx: int) -> None:
        self._get, self._layer_idx = get, layer_idx

    def __getitem__(self, state_idx: int) -> torch.Tensor | None:
        return self._get(self._layer_idx, state_idx)


class LayerStates:
    """One layer of a PieceCache, as mixers read it: layers[i].conv_states[j], and layers[i].conv_states before 5.14."""

    record_past = False  # states are of one position

    def __init__(self, cache: "PieceCache", layer_idx: int) -> None:
        self.device = cache.device
        self._conv = StatesOfLayer(cache.get_conv_state, layer_idx)
        self._recurrent = StatesOfLayer(cache.get_recurrent_state, layer_idx)

    @property
    def conv_states(self) -> StatesOfLayer | torch.Tensor | None:
        """The states by number, or the only one."""
        return self._conv if ARE_NUMBERED else self._conv[0]

    @property
    def recurrent_states(self) -> StatesOfLayer | torch.Tensor | None:
        """The states by number, or the only one."""
        return self._recurrent if ARE_NUMBERED else self._recurrent[0]


class StateLayers:
    """The layers of a PieceCache, made as they are asked for."""

    def __init__(self, cache: "PieceCache") -> None:
        self._cache = cache

    def __getitem__(self, layer_idx: int) -> LayerStates:
        return LayerStates(self._cache, layer_idx)


class PieceCache:
    """The states of some sequences, for one call of a mixer.

    views: see StateCache. has_previous: whether these sequences have states already; whatever bytes are in the slots
    of those without, nothing reads them.
    """

    def __init__(self, views: Mapping[StateKey, torch.Tensor], slots: Slots, has_previous: bool) -> None:
        self._views, self._slots, self._has_previous = views, slots, has_previous
        self._computing: Set[StateKey] = frozenset()
        self._states: dict[StateKey, torch.Tensor] = {}  # those that the mixer has asked for, or has set

    @property
    def touched(self) -> set[StateKey]:
        """The parts that the mixer has asked for, or has set."""
        return set(self._states)

    @property
    def layers(self) -> StateLayers:
        """The states by layer, as mixers before transformers 5.21 read them."""
        return StateLayers(self)

    @property
    def device(self) -> torch.device:
        """The device of the states."""
        return next(iter(self._views.values())).device

    def begin(self, keys: Set[StateKey]) -> None:
        """Note the parts of the mixer that computes next. It is for caches that several mixers are given."""
        self._computing = keys

    def write_back(self) -> None:
        """Put gathered states into their slots."""
        if isinstance(self._slots, torch.Tensor):
            for key, states in self._states.items():
                self._views[key].index_copy_(0, self._slots, states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the states [n, *shape], which the mixer may change in place; None if there are none yet."""
        return self.known((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the states [n, *shape], which the mixer may change in place; None if there are none yet."""
        return self.known((layer_idx, "recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there is a state. layer_idx: None for the layer that computes."""
        if self._has_previous:
            return True
        if layer_idx is None:
            return not self._computing.isdisjoint(self._states)
        return (layer_idx, "conv", state_idx or 0) in self._states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are of one position."""
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the last columns of the old state and `conv_states` [n, channels, tokens], and return them all.

        Before transformers 5.14 it returns those that it keeps, as transformers' cache does.
        """
        key = layer_idx, "conv", state_idx
        before = self.known(key)
        size = self._views[key].shape[-1]
        if before is not None:
            full = torch.cat([before, conv_states], dim=-1)
        else:
            full = torch.nn.functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        stored = self.put(key, full[..., -size:])
        return full if ARE_NUMBERED else _without_gaps(stored, full[..., -size:])

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep `recurrent_states` [n, *shape], and return them."""
        stored = self.put((layer_idx, "recurrent", state_idx), recurrent_states)
        return _without_gaps(stored, recurrent_states)

    def known(self, key: StateKey) -> torch.Tensor | None:
        """Return the states [n, *shape] of a part; None if there are none yet."""
        if key not in self._states:
            if not self._has_previous:
                return None
            self._states[key] = self._in_slots(key)
        return self._states[key]

    def put(self, key: StateKey, states: torch.Tensor) -> torch.Tensor:
        """Keep the states [n, *shape] of a part, and return them. Raises ValueError for another shape."""
        if isinstance(self._slots, torch.Tensor):
            view = self._views[key]
            _check_shape(key, states, view[: len(self._slots)])
            self._states[key] = states.to(view.dtype)
        else:
            in_slot = self._in_slots(key)
            _check_shape(key, states, in_slot)
            self._states[key] = in_slot.copy_(states)
        return self._states[key]

    def _in_slots(self, key: StateKey) -> torch.Tensor:
        if isinstance(self._slots, torch.Tensor):
            return self._views[key].index_select(0, self._slots)
        return self._views[key][self._slots]


def _without_gaps(stored: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Return the states that were given, in a form that mixers can view: those of neighbouring slots lie apart."""
    return stored if stored.is_contiguous() else states.to(stored.dtype).contiguous()


def _check_shape(key: StateKey, states: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise ValueError for states of another shape: a copy would broadcast them."""
    if states.shape[1:] != expected.shape[1:]:
        layer, name, index = key
        raise ValueError(
            f"the {name} state {index} of layer {layer} must have the shape {list(expected.shape[1:])} for each "
            f"sequence, got {list(states.shape[1:])}"
        )
