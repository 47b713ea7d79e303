"""RowStates: the state slots of one cache's rows, which a manager gives out."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.cache.state_cache import StateCache
from kvpage.ops.cuda.uploads import upload
from kvpage.serving.generate.states.row_pass import RowPass
from kvpage.serving.model.states.mixer import PieceForward


class RowStates:
    """Slots of a pool, for the rows of one cache after the other.

    forwards: Of the modules of the model that read and write states.
    """

    def __init__(self, manager: BlockManager, cache: StateCache, forwards: Sequence[PieceForward]) -> None:
        self.forwards = forwards
        assert manager.states is not None, "the manager has a group of states"
        self._manager, self._group, self._cache = manager, manager.states, cache

    @property
    def shares_answers(self) -> bool:
        """Whether tokens that were generated leave what the same tokens of a prompt would."""
        return self._group.options.shares_answers

    @property
    def layer_ids(self) -> set[int]:
        """The layers that have states."""
        return {layer_id for layer_id, _, _ in self._cache.views}

    def begin(
        self, seq_ids: Sequence[Hashable], is_findable: Sequence[bool], start: int, end: int, num_prompt: int
    ) -> RowPass:
        """Return the states of a forward over the tokens [start, end) of each row. Moves that are due are made.

        num_prompt: How many of each row's tokens are a prompt's.
        """
        rows = list(zip(seq_ids, is_findable, strict=True))
        marks = [self._group.reserve(seq_id, start, end) if findable else [] for seq_id, findable in rows]
        self._group.do_moves(self._cache.do_move)
        slots = np.array([self._group.slot_of(seq_id) for seq_id in seq_ids], np.int64)
        return RowPass(self._cache.views, upload([slots], self._cache.device)[0], start, end, marks, num_prompt)

    def keep(self, seq_ids: Sequence[Hashable]) -> None:
        """Make the states at marks findable, whose tokens are committed."""
        for seq_id in seq_ids:
            self._manager.keep(seq_id)

    def keep_ends(self, seq_ids: Sequence[Hashable]) -> None:
        """Make the states of rows findable, whose tokens are all committed. The rows are released next."""
        for seq_id in seq_ids:
            self._manager.keep_end(seq_id)

    def copy(self, seq_id: Hashable, to: Hashable) -> None:
        """Copy the state of a row to another."""
        self._group.do_moves(self._cache.do_move)
        self._cache.copy(torch.tensor([[self._group.slot_of(seq_id), self._group.slot_of(to)]]))
