"""StateSaves: checkpoints of prompts on their way into a store, each with the K and V before it, in a thread."""

import numpy as np
import numpy.typing as npt

from kvpage.blocks.groups.states.held_checkpoints import HeldCheckpoint
from kvpage.blocks.manager import BlockManager
from kvpage.serving.loop.moves.store_saves import StoreSaves
from kvpage.serving.loop.moves.stored_states import StoredStates

TokenIds = npt.NDArray[np.int32]


class StateSaves(StoreSaves):
    """Saves under way. All methods are for the engine's thread.

    A checkpoint's slot, its tail block and its blocks are held until it is written: steps go on meanwhile.

    Args:
        stored: The store's side of states.
        manager: Of blocks and slots.
    """

    def __init__(self, stored: StoredStates, manager: BlockManager) -> None:
        super().__init__(stored.store_blocks, manager, stored.device)
        assert manager.states is not None, "a model with states has their group"
        self._stored, self._group = stored, manager.states

    def begin(self, tokens: TokenIds, namespace: bytes) -> None:
        """Store the checkpoints of committed tokens, as far as they are on the device."""
        held = self._group.hold(tokens, namespace)
        if not held.each:
            held.release()
            return
        try:
            self._stored.make_moves()
            prompt = tokens[: held.each[-1].num_tokens].copy()
            self._submit(held.release, lambda: self._store_each(prompt, held.each, namespace))
        except BaseException:
            held.release()
            raise

    def _store_each(self, tokens: TokenIds, each: list[HeldCheckpoint], namespace: bytes) -> int:
        """Return the longest position that the store has now."""
        return max(self._stored.store(tokens[: one.num_tokens], one, namespace) for one in each)
