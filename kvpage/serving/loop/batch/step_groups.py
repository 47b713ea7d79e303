"""StepGroups: the groups of a manager in a step: the blocks of windows' layers, and the states of sequences.

prompts beside decodes    begin ─► moves of blocks ─► Step ─► add_to
decodes alone             do_moves ─► moves of blocks ─► decodes ─► a replay, or Step ─► add_decodes
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import BlockMove, Kind, Pairs
from kvpage.blocks.rows import StepInputs
from kvpage.serving.loop.graphs.decode_inputs import DecodeInputs
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.loop.ranks.step_plan import GroupBlocks
from kvpage.serving.model.states.state_pass import StatePass, StateRow
from kvpage.serving.model.step import Step


class StepGroups:
    """The blocks of windows and the state slots that a step reads, beside the blocks of the full layers.

    caches: of all groups. tell: called with each move that was made, and its group's number, for other ranks; None if
    there are none.
    """

    def __init__(
        self, manager: BlockManager, caches: RankCaches, tell: Callable[[int, Kind, Pairs], object] | None = None
    ) -> None:
        self._manager, self._caches, self._tell = manager, caches, tell

    def __len__(self) -> int:
        return len(self._caches.groups) - 1

    def rows(
        self,
        seq_ids: Sequence[Hashable],
        starts: Sequence[int],
        ends: Sequence[int],
        num_decodes: int,
        nums_prompt: Sequence[int | None],
    ) -> list[StateRow]:
        """Return the states of a step, once those that are due have been copied; none without states.

        Call it before the moves of blocks: marks may evict checkpoints, and so add moves. num_decodes: how many of the
        sequences, the first ones, have no marks. nums_prompt: see StateRow.
        """
        group = self._manager.states
        if group is None:
            return []
        bounds = list(zip(seq_ids, starts, ends, strict=True))
        marks = [group.reserve(*bound) if index >= num_decodes else [] for index, bound in enumerate(bounds)]
        group.do_moves(partial(self._do_move, len(self)))
        slots = [group.slot_of(seq_id) for seq_id in seq_ids]
        return [StateRow(*row) for row in zip(slots, starts, ends, marks, nums_prompt, strict=True)]

    def blocks(self, seq_ids: Sequence[Hashable], starts: Sequence[int], ends: Sequence[int]) -> list[GroupBlocks]:
        """Return the blocks of each window, once the due copies are made. The positions have room: see Windows.open."""
        for number, window in enumerate(self._manager.windows, 1):
            window.blocks.do_moves(partial(self._do_move, number))
        return [
            GroupBlocks(window.slot_mappings(seq_ids, starts, ends), window.tables(seq_ids))
            for window in self._manager.windows
        ]

    def do_moves(self) -> None:
        """Make the moves of states and of windows' blocks that are due, before a step of decodes."""
        if self._manager.states is not None:
            self._manager.states.do_moves(partial(self._do_move, len(self)))
        for number, window in enumerate(self._manager.windows, 1):
            window.blocks.do_moves(partial(self._do_move, number))

    def decodes(self, seq_ids: Sequence[Hashable], full: StepInputs) -> DecodeInputs:
        """Return the arguments of a step that computes the last token of each sequence. full: of the full layers."""
        starts, ends = (full.seq_lens - 1).tolist(), full.seq_lens.tolist()
        windows = [
            StepInputs(group.slot_mappings(seq_ids, starts, ends), group.tables(seq_ids), full.seq_lens)
            for group in self._manager.windows
        ]
        states = self._manager.states
        slots = None if states is None else np.array([states.slot_of(seq_id) for seq_id in seq_ids], np.int64)
        return DecodeInputs(full, windows, slots)

    def add_decodes(self, step: Step, inputs: DecodeInputs) -> None:
        """Let windows' layers, and mixers, compute a step of these arguments. All tokens were generated."""
        for cache, window in zip(self._caches.windows, inputs.windows, strict=True):
            step.use_window(Step.of_newest(cache, window))
        if self._caches.states is not None:
            step.use_states(StatePass(self._caches.states, inputs.state_rows()))

    def _do_move(self, group: int, move: BlockMove) -> None:
        self._caches.do_move(group, move)
        if self._tell is not None:
            self._tell(group, *move)
