"""StepStates: the states of the sequences of a step: where they are before it, and what becomes of them after it."""

from collections.abc import Hashable, Sequence

from kvpage.blocks.hybrid.manager import HybridManager
from kvpage.cache.state_cache import StateCache
from kvpage.serving.model.states.state_pass import StatePass, StateRow


class StepStates:
    """The slots of one cache, which `manager` gives out."""

    def __init__(self, manager: HybridManager, cache: StateCache) -> None:
        self._manager, self._cache = manager, cache

    def begin(
        self,
        seq_ids: Sequence[Hashable],
        starts: Sequence[int],
        ends: Sequence[int],
        num_decodes: int,
        nums_prompt: Sequence[int | None],
    ) -> StatePass:
        """Return the states of a step, once those that are due have been copied.

        Call it before the moves of blocks: marks may evict checkpoints, and so add moves. num_decodes: how many of the
        sequences, the first ones, have no marks. nums_prompt: see StateRow.
        """
        marks_of, bounds = self._manager.marks_of, list(zip(seq_ids, starts, ends, strict=True))
        marks = [marks_of(*one) if place >= num_decodes else [] for place, one in enumerate(bounds)]
        self._manager.do_state_moves(self._cache.do_move)
        slots = [self._manager.slot_of(seq_id) for seq_id in seq_ids]
        rows = zip(slots, starts, ends, marks, nums_prompt, strict=True)
        return StatePass(self._cache, [StateRow(*row) for row in rows])
