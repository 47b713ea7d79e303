"""Connectors: from the serving loop to a store of chunks, to segments that are kept for blending, to both or to none.

a request waits ─► ask ─► it is held while something is on its way ─► it is scheduled, or forgotten
its prefill is done ─► keep, while its blocks are as they were computed ─► save, when they can be found
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvpage.blend.config import BlendConfig
from kvpage.checks.wait_limit import WaitLimit
from kvpage.serving.blending.blend_pass import BlendCounts
from kvpage.serving.blending.blender import Blender
from kvpage.serving.blending.connector import BlendConnector
from kvpage.serving.loop.batch.batch import Portion
from kvpage.serving.loop.moves.loads.turns import Turns
from kvpage.serving.loop.moves.written_layers import Growth
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.store_connector import StoreConnector


class Connectors(Turns):
    """Both may be None. All methods are for the engine's thread."""

    def __init__(self) -> None:
        self.store: StoreConnector | None = None
        self.blend: BlendConnector | None = None
        self._num_queued: int | None = None  # when the queue was last read

    @property
    def blender(self) -> Blender | None:
        """The object that blends a batch's items; None without blending."""
        return None if self.blend is None else self.blend.blender

    def blend_config(self) -> BlendConfig | None:
        """Return how the engine blends; None if it does not."""
        return None if self.blend is None else self.blend.blender.config

    def connect_store(self, store: StoreConnector) -> None:
        """Ask a store from now on."""
        self.store = store

    def connect_blend(self, blend: BlendConnector) -> None:
        """Look up and keep segments from now on."""
        self.blend, self._num_queued = blend, None

    # --- waiting requests --------------------------------------------------------------------------------------------

    def ask(self, waiting: Sequence[Request], num_queued: int | None = None) -> None:
        """Go on with everything under way, and ask for all that the waiting requests can use.

        num_queued: how often requests were queued so far. Segments are looked up only where that has changed; so a step
            costs nothing for requests that wait long. A store is asked for the first of them. None reads the queue.
        """
        is_new = num_queued is None or num_queued != self._num_queued
        self._num_queued = num_queued
        if self.store:
            self.store.ask(request for request in waiting if not request.scores_prompt)
        if self.blend:
            prompts = (request.blending for request in waiting if request.blending is not None)
            self.blend.ask(prompts if is_new else ())

    def holds(self, request: Request) -> bool:
        """Whether the request does better to wait."""
        if self.store and self.store.loads.holds(request):
            return True
        return bool(self.blend and request.blending is not None and self.blend.holds(request.blending))

    def has_blocks(self, request: Request) -> bool:
        """Whether the store's load has taken blocks for all of its tokens."""
        return self.store is not None and self.store.loads.has_blocks(request)

    def begin(self, request: Request, num_spare: int) -> bool:
        """Ask the store for a request whose turn has come, or load it; return whether it is to wait."""
        return self.store is not None and not request.scores_prompt and self.store.loads.begin(request, num_spare)

    def hand_over(self, request: Request) -> None:
        """Give back the blocks of its load. It is admitted now."""
        if self.store:
            self.store.loads.hand_over(request)

    def wait(self, limit: WaitLimit | None = None) -> None:
        """Wait until something has come, or is late; no longer than the limit."""
        if self.blend and self.blend.is_busy:
            self.blend.wait(limit)
        elif self.store:
            self.store.wait(limit)

    def reclaim(self) -> bool:
        """Wait for blocks of the store's transfers, so that they can be evicted; False if there are none."""
        return self.store is not None and self.store.reclaim()

    # --- computed requests -------------------------------------------------------------------------------------------

    def note_blended(self, requests: Sequence[Request], counts: Sequence[BlendCounts]) -> None:
        """Note that the prefills of some of these requests reused segments. counts: of each request."""
        for request, count in zip(requests, counts, strict=True):
            if self.blend and request.blending is not None and request.reuse:
                self.blend.note_blended(request.blending, count)

    def keep(self, requests: Iterable[Request]) -> None:
        """Keep the segments of prefills that are written, and not committed yet."""
        for request in _prefilled(requests):
            if self.blend and request.blending is not None:
                self.blend.keep(request.blending)

    def begin_step(self, portions: Sequence[Portion]) -> Callable[[int], object] | None:
        """Begin to store the first layers of chunks that a step completes, if the store takes a few layers at a time.

        Returns a function to be called with each layer that is written; None if nobody wants to know. `end_step` must
        follow, however the step ends.
        """
        if self.store is None or not self.store.save_portions or not portions:
            return None
        # What is computed again after tokens were generated was stored at first.
        fresh = (portion for portion in portions if not (portion.is_last and portion.request.num_generated))
        unblended = (portion for portion in fresh if portion.request.blending is None)
        written = self.store.begin_step(map(_growth, unblended))
        return None if written is None else written.note

    def end_step(self) -> None:
        """End what `begin_step` has begun."""
        if self.store is not None:
            self.store.end_step()

    def save(self, requests: Iterable[Request], portions: Iterable[Portion]) -> None:
        """Store prefills that are committed, and chunks of others that a portion has completed, if that is wanted."""
        if self.store is None:
            return
        for request in _prefilled(requests):
            self.store.save(_first_tokens(request, request.num_tokens), request.namespace)
        for request, start, end in portions if self.store.save_portions else ():
            if end < request.num_tokens:
                self.store.save_portion(_first_tokens(request, end), start, request.namespace)

    def save_generated(self, request: Request) -> None:
        """Store the tokens of a request that has finished, if it has its blocks still. Its state is a checkpoint."""
        if self.store and self.store.save_generated and request.num_computed:
            self.store.save(_first_tokens(request, request.num_computed), request.namespace)

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note how long computing takes: loading is compared with it."""
        if self.store and self.store.rule:
            self.store.rule.saw_prefill(num_tokens, seconds)

    # --- ends --------------------------------------------------------------------------------------------------------

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.hand_over(request)
        if self.blend and request.blending is not None:
            self.blend.forget(request.blending)

    def forget_kept(self) -> None:
        """Forget the segments that are kept, if their cache can do that."""
        if self.blend:
            self.blend.forget_kept()

    def drain(self) -> None:
        """Wait for all that is on its way. Whatever interrupts it, it may be called again."""
        for connector in self._all():
            connector.drain()

    def close(self) -> None:
        """Wait for all that is on its way, and let go of both."""
        for connector in self._all():
            connector.close()
        self.store = self.blend = None

    def _all(self) -> Sequence[StoreConnector | BlendConnector]:
        return [connector for connector in (self.store, self.blend) if connector]


def _prefilled(requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.num_generated == 0]


def _first_tokens(request: Request, num_tokens: int) -> npt.NDArray[np.int32]:
    """Return the first num_tokens tokens of the request, without the repetition of a segment that is being warmed."""
    copy_at = None if request.blending is None else request.blending.copy_at
    return request.tokens[:num_tokens][:copy_at]


def _growth(portion: Portion) -> Growth:
    request, end = portion.request, portion.end
    return Growth(request.seq_id, request.tokens[:end], portion.start, portion.is_last, request.namespace)
