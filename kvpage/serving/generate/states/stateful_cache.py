"""StatefulCache: the part of a transformers Cache that mixers call, which keep states of one token position."""

from abc import abstractmethod
from typing import Any

import torch

from kvpage.serving.generate.layered_cache import KVPageLayer, LayeredCache
from kvpage.serving.generate.states.row_pass import RowPass
from kvpage.serving.model.states.piece_cache import PieceCache


# transformers does not annotate CacheLayerMixin.__init_subclass__.
class StatefulLayer(KVPageLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """One layer within a forward, whose states mixers of transformers before 5.21 read here."""

    record_past = False  # states are of one position

    def __init__(self, cache: LayeredCache, layer_idx: int, states: PieceCache) -> None:
        super().__init__(cache, layer_idx)
        of_layer = states.layers[layer_idx]
        self._states, self.device = of_layer, of_layer.device

    @property
    def conv_states(self) -> Any:
        """The states of convolutions, as transformers' cache has them."""
        return self._states.conv_states

    @property
    def recurrent_states(self) -> Any:
        """The recurrent states, as transformers' cache has them."""
        return self._states.recurrent_states


class StatefulCache(LayeredCache):
    """A cache whose states are those of a RowPass, within a forward."""

    @property
    @abstractmethod
    def row_pass(self) -> RowPass | None:
        """The states of the forward that is under way; None outside of one, and for a model without states."""

    def _made_layers(self) -> list[Any]:
        """Return what `layers` is at this moment. Within a forward, layers have states, also those without K and V."""
        if self.row_pass is None:
            return super()._made_layers()
        return [StatefulLayer(self, layer_idx, self.row_pass.states) for layer_idx in range(len(self))]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the states of a convolution, [num_rows, *shape], which the mixer may change; None before the first.

        Args:
            layer_idx: The layer.
            state_idx: Which of the layer's.
        """
        return self._states.get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return recurrent states, [num_rows, *shape], which the mixer may change; None before the first.

        Args:
            layer_idx: The layer.
            state_idx: Which of the layer's.
        """
        return self._states.get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the last columns of a convolution's inputs.

        Args:
            conv_states: [num_rows, channels, tokens].
            layer_idx: The layer.
            state_idx: Which of the layer's.
            kwargs: Ignored.

        Returns:
            The columns before, and these.
        """
        return self._states.update_conv_state(conv_states, layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep recurrent states, and return them.

        Args:
            recurrent_states: [num_rows, *shape].
            layer_idx: The layer.
            state_idx: Which of the layer's.
            kwargs: Ignored.

        Returns:
            The same states.
        """
        return self._states.update_recurrent_state(recurrent_states, layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there is a state before the tokens that are computed next.

        Args:
            layer_idx: The layer; None for any.
            state_idx: Which of the layer's.
        """
        if self.row_pass is None:
            return self.get_seq_length() > 0
        return self.row_pass.states.has_previous_state(layer_idx, state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are of one position.

        Args:
            layer_idx: The layer.
        """
        return False

    @property
    def _states(self) -> PieceCache:
        if self.row_pass is None:
            raise ValueError("states must come from a forward of the pool's model, before release")
        return self.row_pass.states
