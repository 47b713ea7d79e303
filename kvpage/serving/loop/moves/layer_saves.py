"""LayerSaves: saves into a store whose records have a few layers each. The first ones begin while the step computes.

    engine's thread   layers 0 to 3 | layers 4 to 7 | layers 8 to 11 | tokens, commit | hold the blocks
    saving thread                   | store 0 to 3  | store 4 to 7   |                | store what lacks: 8 to 11

The last layers are stored once the blocks are committed, as every save is. A step that raises, or gives no numbers,
completes no chunk, and whoever computes it again replaces its first layers. Blocks are the sequence's own until the
commit, and the save's afterwards. Where they will be given back, the first layers' save is waited for.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.sequence_state import Ids
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.values import runs_of
from kvpage.serving.loop.moves.saves import Saves
from kvpage.serving.loop.moves.stored_group import Hold, StoredGroup
from kvpage.serving.loop.moves.written_layers import Growth, WrittenLayers
from kvpage.store.block_store import BlockStore, TokenIds


class _Growing(NamedTuple):
    tokens: TokenIds  # as far as they are stored
    is_whole: bool  # whether nothing follows
    first_chunk: int  # that the step completes
    block_ids: Ids  # of the tokens
    namespace: bytes


class LayerSaves(Saves):
    """Saves under way, in a store with groups of layers. All methods are for the engine's thread."""

    def __init__(self, group: StoredGroup, store: BlockStore, manager: BlockManager, cache: CacheEngine) -> None:
        super().__init__(group)
        self._store, self._manager, self._cache, self._groups = store, manager, cache, store.groups
        self.chunk_size = self._groups[0].chunk_size
        self._written: WrittenLayers | None = None
        self._early: Future[None] | None = None
        self._block_ids: set[int] = set()  # that the first layers' save reads, and no other save holds yet
        self._growing: list[_Growing] = []  # of this step
        self._all_early: list[Future[None]] = []  # whose exceptions nobody has seen
        self._has_first: dict[tuple[bytes, bytes], tuple[npt.NDArray[np.bool_], bool]] = {}  # the saving thread's

    def begin_step(self, prompts: Iterable[Growth], num_places: int) -> WrittenLayers | None:
        """Store the first layers of chunks that a step computes, as they are written; `end_step` ends that.

        num_places: Prompts that will find a place among the saves under way. Others are left to these.
        """
        if len(self._groups) < 2:
            return None
        grown = map(self._as_growing, prompts)
        growing = list(islice((prompt for prompt in grown if prompt is not None), num_places))
        if not growing:
            return None
        written = self._written = WrittenLayers([group.layer_ids for group in self._groups[:-1]], self._cache.device)
        self._block_ids = {block for prompt in growing for block in prompt.block_ids.tolist()}
        self._early, self._growing = self._thread.submit(self._store_groups, growing, written), growing
        self._all_early.append(self._early)
        return written

    def begin(self, tokens: TokenIds, namespace: bytes) -> Hold | None:
        """Store tokens that are committed, as far as they are cached in whole blocks on the device."""
        if self._written is not None:
            self._written.end()
        hold = super().begin(tokens, namespace)
        if hold is not None:
            self._block_ids.difference_update(hold.block_ids.tolist())
        return hold

    def end_step(self) -> None:
        """End what `begin_step` has begun. Blocks that no save holds may be given to others after this.

        It waits for a put that reads such blocks: as long as a tier's deadline.
        """
        if self._written is None:
            return
        if self._block_ids or self._early is None:
            self._written.fail()
            if self._early is not None and not self._early.cancel():  # it has begun
                wait([self._early])
        self._written = self._early = None
        self._block_ids, self._growing = set(), []

    def has_begun(self, tokens: TokenIds, namespace: bytes) -> bool:
        """Return whether the step under way has begun to store these tokens: then they have a place."""
        return any(
            prompt.namespace == namespace and np.array_equal(tokens[: len(prompt.tokens)], prompt.tokens)
            for prompt in self._growing
        )

    def take_failures(self) -> int:
        """Return how many early saves have raised since the last call. The saves after them have made up for it."""
        done = [save for save in self._all_early if save.done()]
        self._all_early = [save for save in self._all_early if save not in done]
        return sum(not save.cancelled() and save.exception() is not None for save in done)

    def close(self) -> None:
        """End the thread. A step under way, which calls this, stores nothing more."""
        if self._written is not None:
            self._written.fail()
        super().close()

    def _call(self, hold: Hold, tokens: TokenIds, namespace: bytes) -> Callable[[], int]:
        """Return what the thread does for a save. Only one of this very step trusts the first layers that it stored."""
        if self._written is None:
            return super()._call(hold, tokens, namespace)
        return lambda: self._store_rest(hold, tokens, namespace)

    def _as_growing(self, growth: Growth) -> _Growing | None:
        """Return a prompt as far as it will be stored, if the step completes a chunk of it.

        None, too, for blocks that the sequence has given back, and those that no other request may find.
        """
        size, state = self._manager.block_size, self._manager.state(growth.seq_id)
        unit = size if growth.is_whole else math.lcm(size, self.chunk_size)  # a save holds whole blocks
        num_tokens, first_chunk = len(growth.tokens) // unit * unit, growth.start // self.chunk_size
        if num_tokens <= first_chunk * self.chunk_size or state.num_left or state.is_private:
            return None
        block_ids = self._manager.block_ids(growth.seq_id)[: num_tokens // size]
        return _Growing(growth.tokens[:num_tokens].copy(), growth.is_whole, first_chunk, block_ids, growth.namespace)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _store_groups(self, prompts: Sequence[_Growing], written: WrittenLayers) -> None:
        """Store all layers but the last ones, of chunks that lack these: nobody loads any of their layers yet."""
        self._has_first = {}
        lacks = [self._lacks(prompt) for prompt in prompts]
        for index, group in enumerate(self._groups[:-1]):
            stream = written.wait(index)
            if stream is None:
                return
            begin = time.perf_counter()
            with stream:
                for prompt, flags in zip(prompts, lacks, strict=True):
                    for first, end in runs_of(flags):
                        if written.has_failed:
                            return
                        tokens = prompt.tokens[: end * group.chunk_size]
                        group.put(tokens, prompt.block_ids, first, prompt.namespace, skip_existing=False)
            self.seconds += time.perf_counter() - begin
        for prompt, flags in zip(prompts, lacks, strict=True):
            self._has_first[_name(prompt.tokens, prompt.namespace)] = flags, prompt.is_whole

    def _lacks(self, prompt: _Growing) -> npt.NDArray[np.bool_]:
        lacks = ~np.array(self._groups[-1].there(prompt.tokens, prompt.namespace), bool)
        lacks[: prompt.first_chunk] = False
        return lacks

    def _store_rest(self, hold: Hold, tokens: TokenIds, namespace: bytes) -> int:
        has_first, is_whole = self._has_first.pop(_name(tokens, namespace), (None, True))
        if has_first is not None:
            num_tokens = self._store.finish_blocks(
                tokens, self._cache, hold.block_ids, namespace=namespace, has_first=has_first
            )
            if not is_whole:
                return num_tokens
        return hold.store(tokens, namespace)


def _name(tokens: TokenIds, namespace: bytes) -> tuple[bytes, bytes]:
    return tokens.tobytes(), namespace
