"""StepWindows: the blocks of windows' layers, for the sequences of a step."""

from collections.abc import Hashable, Sequence

from kvpage.blocks.groups.windowed_manager import WindowedManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.model.step import Step


class StepWindows:
    """The caches of windows' layers, one for each of `manager.windows`."""

    def __init__(self, manager: WindowedManager, caches: Sequence[CacheEngine]) -> None:
        self._manager, self._caches = manager, caches

    def add_to(self, step: Step, seq_ids: Sequence[Hashable], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Let the windows' layers compute this step over their own blocks, once the due copies are made.

        The positions have room: see WindowRoom.
        """
        manager = self._manager
        for group, cache in enumerate(self._caches):
            manager.windows[group].do_moves(cache.do_move)
            slots = manager.window_slot_mappings(group, seq_ids, starts, ends)
            step.use_window(Step.make(cache, slots, manager.window_tables(group, seq_ids), starts, ends))
