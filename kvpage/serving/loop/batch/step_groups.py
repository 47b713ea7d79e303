"""StepGroups: the groups of a manager in a step: the blocks of windows' layers, and the states of sequences.

prompts beside decodes    begin ─► moves of blocks ─► Step ─► add_to
decodes alone             do_moves ─► moves of blocks ─► decodes ─► a replay, or Step ─► add_decodes
"""

from collections.abc import Hashable, Sequence

import numpy as np

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.rows import StepInputs
from kvpage.serving.loop.graphs.decode_inputs import DecodeInputs
from kvpage.serving.loop.graphs.step_caches import StepCaches
from kvpage.serving.model.states.state_pass import StatePass, StateRow
from kvpage.serving.model.step import Step


class StepGroups:
    """The groups of one manager, over their caches."""

    def __init__(self, manager: BlockManager, caches: StepCaches) -> None:
        self._manager, self._windows, self._states = manager, caches.windows, caches.states

    def __len__(self) -> int:
        return len(self._windows) + (self._states is not None)

    def begin(
        self,
        seq_ids: Sequence[Hashable],
        starts: Sequence[int],
        ends: Sequence[int],
        num_decodes: int,
        nums_prompt: Sequence[int | None],
    ) -> StatePass | None:
        """Return the states of a step, once those that are due have been copied; None without states.

        Call it before the moves of blocks: marks may evict checkpoints, and so add moves. num_decodes: how many of the
        sequences, the first ones, have no marks. nums_prompt: see StateRow.
        """
        group = self._manager.states
        if group is None or self._states is None:
            return None
        bounds = list(zip(seq_ids, starts, ends, strict=True))
        marks = [group.reserve(*bound) if place >= num_decodes else [] for place, bound in enumerate(bounds)]
        group.do_moves(self._states.do_move)
        slots = [group.slot_of(seq_id) for seq_id in seq_ids]
        rows = zip(slots, starts, ends, marks, nums_prompt, strict=True)
        return StatePass(self._states, [StateRow(*row) for row in rows])

    def add_to(self, step: Step, seq_ids: Sequence[Hashable], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Let the windows' layers compute this step over their own blocks, once the due copies are made.

        The positions have room: see Windows.open.
        """
        for group, cache in zip(self._manager.windows, self._windows, strict=True):
            group.blocks.do_moves(cache.do_move)
            slots = group.slot_mappings(seq_ids, starts, ends)
            step.use_window(Step.make(cache, slots, group.tables(seq_ids), starts, ends))

    def do_moves(self) -> None:
        """Make the moves of states and of windows' blocks that are due, before a step of decodes."""
        if self._manager.states is not None and self._states is not None:
            self._manager.states.do_moves(self._states.do_move)
        for group, cache in zip(self._manager.windows, self._windows, strict=True):
            group.blocks.do_moves(cache.do_move)

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
        for cache, window in zip(self._windows, inputs.windows, strict=True):
            step.use_window(Step.of_newest(cache, window))
        if self._states is not None and inputs.state_slots is not None:
            pairs = zip(inputs.state_slots.tolist(), inputs.full.seq_lens.tolist(), strict=True)
            rows = [StateRow(slot, end - 1, end, num_prompt=0) for slot, end in pairs]
            step.use_states(StatePass(self._states, rows))
