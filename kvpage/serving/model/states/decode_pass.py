"""DecodePass: the states of a decode step whose slots are static memory, so that a device can capture the step.

    slots     [ 3 0 1 2 | 9 9 9 9 ]      others at each replay; slot 9 is that of padding
    a mixer   one call over all states, gathered; then they go back into their slots

Padding has states, too: it goes on from whatever bytes its slot has. No row depends on another one's state.
"""

from collections.abc import Sequence

import torch

from kvpage.cache.state_cache import StateCache
from kvpage.serving.model.states.mixer import PieceForward
from kvpage.serving.model.states.row_cuts import Cut
from kvpage.serving.model.states.state_pass import PackedStates, Piece


class DecodePass(PackedStates):
    """One generated token after a state, of each of several sequences. Make one for each time that it is computed.

    slots: of each sequence, int64 [num_seqs] on the states' device. Several may name a slot that nobody reads.
    """

    def __init__(self, states: StateCache, slots: torch.Tensor) -> None:
        super().__init__(states, len(slots))
        self._decodes = Piece(Cut(slice(0, len(slots)), True), slots, True, [], is_answer=True)

    def check(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Raise ValueError unless a step with these lengths has one token of each sequence."""
        if list(query_lens) != [1] * self._num_tokens:
            raise ValueError(f"query_lens must be 1 for each of {self._num_tokens} sequences, got {list(query_lens)}")

    def _pieces_of(self, forward: PieceForward) -> list[Piece]:
        return [self._decodes]
