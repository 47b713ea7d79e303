"""WindowSaves: prompts of a model with windows on their way into a store, in a thread, with what windows still have."""

from kvpage.blocks.groups.windowed_manager import WindowedManager
from kvpage.serving.loop.moves.store_saves import Saves
from kvpage.serving.loop.moves.stored_windows import StoredWindows
from kvpage.store.block_store import TokenIds


class WindowSaves(Saves):
    """Saves under way. All methods are for the engine's thread.

    Args:
        stored: The store's side of windows.
        manager: Of the blocks.
    """

    def __init__(self, stored: StoredWindows, manager: WindowedManager) -> None:
        super().__init__(stored.device)
        self._stored, self._manager = stored, manager

    def begin(self, tokens: TokenIds, namespace: bytes) -> None:
        """Store tokens that are committed, as far as they are cached in whole blocks."""
        held = self._manager.hold_cached(tokens, namespace)
        if not held.num_tokens:
            held.release()
            return
        try:
            prompt = tokens[: held.num_tokens].copy()
            self._submit(held.release, lambda: self._stored.store(prompt, held, namespace))
        except BaseException:
            held.release()
            raise
