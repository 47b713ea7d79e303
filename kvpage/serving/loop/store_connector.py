"""StoreConnector: between the blocks of an engine and a store of chunks, beside the serving loop, never in its way.

    a request waits ─► lookup ─► its turn ─► blocks for all of its tokens ─► load ─► commit: the prefix tree has them,
                       thread                this thread                     thread  and the request finds them there
    on a GPU                                                    verified ─► commit; each layer waits for its bytes

    its prefill is done ─► pin the cached blocks ─► store ─► unpin
                           this thread              thread

Whatever goes wrong, or takes longer than the deadline, is a request that computes. A load that comes late goes into
the tree all the same. Until then it writes to blocks of its own. These are its own until the last byte is there.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import wait

from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.interrupts import interruptible
from kvpage.checks.wait_limit import WaitLimit
from kvpage.serving.loop.moves.loads.prompt_loads import PromptLoads
from kvpage.serving.loop.moves.loads.store_stats import StoreConnectorStats
from kvpage.serving.loop.moves.saves import Saves
from kvpage.serving.loop.moves.written_layers import Growth, WrittenLayers
from kvpage.serving.loop.request import Request
from kvpage.store.block_store import BlockStore, TokenIds
from kvpage.store.load.block_chunks import move_padding

__all__ = ["BlockStore", "StoreConnectorStats"]


class StoreConnector:
    """Loads and saves of one engine. All methods are for the engine's thread.

    cache: the blocks. chunk_size: tokens of the store's chunks. max_saves: under way at once.
    save_generated: store the generated tokens, too, once a request has finished.
    save_portions: store the chunks of a prompt while the rest of it is computed.
    """

    def __init__(
        self,
        store: BlockStore,
        cache: CacheEngine,
        loads: PromptLoads,
        saves: Saves,
        *,
        chunk_size: int,
        max_saves: int = 8,
        save_generated: bool = False,
        save_portions: bool = False,
    ) -> None:
        self.store, self.loads, self.saves = store, loads, saves
        self.save_generated, self.save_portions = save_generated, save_portions
        self._cache, self._chunk_size, self._max_saves = cache, chunk_size, max_saves
        self._newest_saves: deque[tuple[TokenIds, bytes]] = deque(maxlen=2 * max_saves)  # all under way are among them

    @property
    def stats(self) -> StoreConnectorStats:
        """The counters of this object and of the store."""
        return self.loads.stats

    @property
    def rule(self) -> LoadOrCompute | None:
        """Whether loading is worth it; None for always."""
        return self.loads.rule

    def rehearse(self) -> None:
        """Ask for the kernels that move chunks, where these are kvpage's own."""
        if self.store.metadata is not None:
            move_padding(self._cache, self.store.metadata.fmt)

    def ask(self, waiting: Iterable[Request]) -> None:
        """Go on with everything under way, and look up the first of the waiting."""
        self._poll()
        self.loads.ask(waiting)

    def wait(self, limit: WaitLimit | None = None) -> None:
        """Wait until something is done that a request waits for, or is late; no longer than the limit."""
        self.loads.wait(limit)

    def reclaim(self) -> bool:
        """Wait for a load or a save that has blocks, so that these can be evicted; False if there is none."""
        if self.loads.reclaim():
            return True
        if self.saves:
            with interruptible():
                wait(self.saves.futures[:1])
            self._poll()
            return True
        return False

    def save(self, tokens: TokenIds, namespace: bytes) -> None:
        """Store tokens that are committed, as far as they are cached on the device."""
        if len(self.saves) >= self._max_saves and not self.saves.has_begun(tokens, namespace):
            self.stats.note_skipped()
            return
        self.saves.begin(tokens, namespace)
        self._newest_saves.append((tokens, namespace))

    def prefetch(self, tokens: TokenIds, namespace: bytes) -> None:
        """Bring what is stored of tokens nearer, within the store, in a thread."""
        self.loads.bring_nearer(tokens, namespace)

    def save_portion(self, tokens: TokenIds, start: int, namespace: bytes) -> None:
        """Store the whole chunks of committed tokens, if those from `start` on have completed one.

        It leaves half of the places to prompts that are done. Skipped chunks are stored with the next portion, as far
        as they are still cached then.
        """
        size = self._chunk_size
        num_tokens = len(tokens) // size * size
        if num_tokens <= start // size * size:
            return
        if 2 * len(self.saves) < self._max_saves or self.saves.has_begun(tokens, namespace):
            self.save(tokens[:num_tokens], namespace)

    def begin_step(self, prompts: Iterable[Growth]) -> WrittenLayers | None:
        """Begin to store the first layers of chunks that a step completes, until `end_step`.

        Returns the object that wants to know of each layer that is written; None if nobody does.
        """
        return self.saves.begin_step(prompts, max(self._max_saves // 2 - len(self.saves), 0))

    def end_step(self) -> None:
        """End what `begin_step` has begun, whether the step has ended well or not."""
        self.saves.end_step()

    def drain(self) -> None:
        """Wait until everything that is under way is done, and forget what requests were asked for."""
        while futures := [*self.loads.futures, *self.saves.futures]:
            wait(futures, return_when="FIRST_COMPLETED")
            self._poll()
        self.loads.let_all_go()

    def close(self) -> None:
        """Drain, and end the threads. The store stays open: it is its owner's."""
        self.drain()
        self.loads.close()
        self.saves.close()

    def _poll(self) -> None:
        self.loads.poll()
        done = self.saves.take_done()
        for save in done:
            self.stats.note_saved(self.loads.result(save))
        for tokens, namespace in self._newest_saves if done else ():
            self.loads.note_saved(tokens, namespace)
        self.stats.note_saves(self.saves.take_failures(), self.saves.seconds)
