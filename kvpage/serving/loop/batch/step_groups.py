"""StepGroups: the groups of a manager in a step: the blocks of windows' layers, and the states of sequences."""

from collections.abc import Hashable, Sequence

from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.serving.model.states.state_pass import StatePass, StateRow
from kvpage.serving.model.step import Step


class StepGroups:
    """The caches of a manager's groups.

    windows: one for each of `manager.windows`. states: the slots that `manager.states` gives out; None without states.
    """

    def __init__(self, manager: BlockManager, windows: Sequence[CacheEngine], states: StateCache | None) -> None:
        self._manager, self._windows, self._states = manager, windows, states

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
