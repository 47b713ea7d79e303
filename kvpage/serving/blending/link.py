"""BlendLink: between the requests of an engine and the segments that are kept for blending.

    a request waits ─► find its segments ─► what is not in the prefix tree anyway is reused, in one step
                       thread
    its prefill is done ─► K and V of the segments that were computed in full, and are not kept yet ─► keep
                           this thread, out of the blocks                                              thread

    to warm a segment that is not kept yet      [ segment | segment ]     the first is kept; how far V of the second
                                                                          differs is with it

Computed in full means: nothing before it was blended. So what is kept is exact, and what was blended is kept nowhere.
Whatever goes wrong, or takes longer than the deadline, is a prompt that is computed.
"""

import math
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvpage import ops
from kvpage.blend.segments import Reuse, SegmentCache, SegmentKV
from kvpage.blend.sensitivity import measure_sensitivity
from kvpage.blend.spans import Span
from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.started_pool import started_pool
from kvpage.serving.blending.blend_pass import BlendCounts
from kvpage.serving.model.attention import row_dtype
from kvpage.serving.requests import Request

GRACE = 1e-3  # seconds: what is in memory has come by then, and is admitted a step earlier


@dataclass(slots=True)
class BlendStats:
    """Counters since the engine was made.

    num_lookups, num_lookup_tokens, num_found_tokens: prompts whose segments were looked up, the segments' tokens, and
        those of the segments that there were. num_late: lookups that their requests did not wait for. num_errors:
        exceptions out of the source. num_blends, num_reused_tokens, num_recomputed_tokens: prefills that reused
        segments, their tokens that kept the segment's K and V, and those that were computed again. num_kept_segments,
        num_kept_tokens: segments that were handed to the source, and their tokens. num_skipped_segments: that were not,
        because too much was on its way.
    """

    num_lookups: int = 0
    num_lookup_tokens: int = 0
    num_found_tokens: int = 0
    num_late: int = 0
    num_errors: int = 0
    num_skipped_segments: int = 0
    num_blends: int = 0
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_kept_segments: int = 0
    num_kept_tokens: int = 0


class _Found(NamedTuple):
    """Segments of a prompt that are kept, and spans that had better be."""

    reusable: list[Reuse]
    wanted: list[Span]


class _Lookup(NamedTuple):
    future: "Future[_Found]"
    deadline: float


class BlendLink:
    """Finds and keeps segments for one engine. All methods are for the engine's thread; the source is called in one
    other.

    dtype: of the model, in which segments are kept where the cache quantises. deadline: seconds that a request waits
        for its segments. max_bytes: of K and V on their way to the source; a segment that is longer goes alone.
    """

    def __init__(
        self,
        source: SegmentCache,
        cache: CacheEngine,
        manager: BlockManager,
        dtype: torch.dtype,
        deadline: float,
        max_bytes: int,
    ) -> None:
        self.source = source
        self.stats = BlendStats()
        self._cache, self._manager, self._deadline = cache, manager, deadline
        self._max_bytes = max_bytes
        self._dtype = row_dtype(dtype, cache.layout)
        self._lookups: dict[Request, _Lookup] = {}
        self._keeps: dict[Future[None], int] = {}  # bytes
        self._thread = started_pool(1, "kvpage-blend")

    @property
    def is_busy(self) -> bool:
        """A request waits for its segments."""
        return bool(self._lookups)

    def wants_each(self, segments: Iterable[tuple[np.ndarray, bool]], namespace: bytes) -> list[bool]:
        """Whether the source would keep each of these, computed standalone; True where asking raises. segments: tokens,
        and whether their sensitivity will be known."""
        asked = [self._thread.submit(self.source.wants, tokens, True, known, namespace) for tokens, known in segments]
        failed = [future.exception() is not None for future in asked]
        self.stats.num_errors += sum(failed)
        return [has_failed or future.result() for has_failed, future in zip(failed, asked, strict=True)]

    def ask(self, waiting: Iterable[Request]) -> None:
        """Takes what was found, and has the segments of the waiting requests looked up."""
        self._poll()
        for request in waiting:
            if request.spans and request.reusable is None and request not in self._lookups:
                if self._manager.is_swapped(request.seq_id):
                    continue
                self._start(request)
        wait([lookup.future for lookup in self._lookups.values()], timeout=GRACE)
        self._poll()

    def holds(self, request: Request) -> bool:
        """Whether the request had better wait for its segments."""
        return request in self._lookups

    def wait(self) -> None:
        """Until a lookup is done, or late."""
        if self._lookups:
            first = min(lookup.deadline for lookup in self._lookups.values())
            futures = [lookup.future for lookup in self._lookups.values()]
            wait(futures, timeout=max(first - time.monotonic(), 0.0), return_when="FIRST_COMPLETED")

    def blended(self, request: Request, counts: BlendCounts) -> None:
        """The prefill of the request reused segments."""
        request.num_reused_tokens, request.num_recomputed_tokens = counts
        self.stats.num_blends += 1
        self.stats.num_reused_tokens += counts.num_reused
        self.stats.num_recomputed_tokens += counts.num_recomputed

    def keep(self, request: Request) -> None:
        """Keeps what the request's prefill has computed in full; called when it is written, before it is committed."""
        end = request.reuse[0].start if request.reuse else request.num_prompt_tokens
        for span in request.wanted_spans:
            if span.end <= end and self._has_room(request, span):
                tokens, segment = request.tokens[slice(*span)].copy(), self._segment(request, span)
                future = self._thread.submit(self.source.keep, tokens, segment, request.namespace)
                self._keeps[future] = self._num_bytes(span)
                self.stats.num_kept_segments += 1
                self.stats.num_kept_tokens += len(tokens)
        request.wanted_spans, request.reusable = [], []

    def _has_room(self, request: Request, span: Span) -> bool:
        """Whether a segment can be handed to the source; for one that is to be warmed, waits until it can."""
        most = self._max_bytes - self._num_bytes(span)
        self._poll_keeps()
        while request.is_warming and self._keeps and sum(self._keeps.values()) > most:
            wait(self._keeps, return_when="FIRST_COMPLETED")
            self._poll_keeps()
        has_room = not self._keeps or sum(self._keeps.values()) <= most
        self.stats.num_skipped_segments += not has_room
        return has_room

    def forget(self, request: Request) -> None:
        """The request has ended."""
        lookup = self._lookups.pop(request, None)
        if lookup:
            lookup.future.cancel()

    def forget_kept(self) -> None:
        """Empties a source that has `clear`; called when nothing is under way. A store keeps what it has."""
        clear = getattr(self.source, "clear", None)
        if clear is not None:
            clear()

    def drain(self) -> None:
        """Until everything that is under way is done."""
        wait([lookup.future for lookup in self._lookups.values()])
        wait(self._keeps)
        self._poll()

    def close(self) -> None:
        """Drains, and ends the thread. What is kept stays the source's."""
        self.drain()
        self._thread.shutdown()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        prompt, namespace, spans, reuses = request.prompt.copy(), request.namespace, request.spans, request.is_blend
        is_measured = request.copy_at is not None
        match = self._manager.tree.match(prompt, namespace)
        num_cached = match.num_tokens
        self._manager.tree.release(match)

        def find() -> _Found:
            reusable, wanted = [], []
            for span in spans:
                tokens = prompt[slice(*span)]
                segment = self.source.find(tokens, namespace) if reuses and span.end > num_cached else None
                if segment is not None:
                    reusable.append(Reuse(segment, 0, span.start, segment.num_tokens))
                elif self.source.wants(tokens, span.start == 0, is_measured, namespace):
                    wanted.append(span)
            return _Found(reusable, wanted)

        self._lookups[request] = _Lookup(self._thread.submit(find), time.monotonic() + self._deadline)
        self.stats.num_lookups += 1
        self.stats.num_lookup_tokens += sum(end - start for start, end in spans)

    @uninterrupted
    def _poll(self) -> None:
        now = time.monotonic()
        for request, lookup in [*self._lookups.items()]:
            if lookup.future.done():
                self._take(request, lookup.future)
            elif now >= lookup.deadline:
                self.stats.num_late += 1
                request.reusable, request.wanted_spans = [], []
                del self._lookups[request]
        self._poll_keeps()

    def _poll_keeps(self) -> None:
        for future in [future for future in self._keeps if future.done()]:
            del self._keeps[future]
            self.stats.num_errors += future.exception() is not None

    def _take(self, request: Request, future: "Future[_Found]") -> None:
        del self._lookups[request]
        if future.exception() is not None:
            self.stats.num_errors += 1
            request.reusable, request.wanted_spans = [], []
            return
        request.reusable, request.wanted_spans = future.result()
        self.stats.num_found_tokens += sum(one.num_tokens for one in request.reusable)

    def _segment(self, request: Request, span: Span) -> SegmentKV:
        """K and V of the span out of the request's blocks: a copy on the host."""
        shape = self._shape(span)
        num_layers = shape[0]
        key, value = (torch.empty(shape, dtype=self._dtype, device=self._cache.device) for _ in range(2))
        table = torch.from_numpy(self._manager.block_ids(request.seq_id))[None].to(self._cache.device)
        for index in range(num_layers):
            self._gather(index, table, span.start, key[index], value[index])
        sensitivity = None if request.copy_at is None else self._sensitivity(table, request.copy_at, value)
        positions = torch.from_numpy(np.arange(*span, dtype=np.int64))
        return SegmentKV(key.cpu(), value.cpu(), positions, span.start == 0, sensitivity)

    def _shape(self, span: Span) -> tuple[int, int, int, int]:
        """Of the segment's K, and of its V."""
        layout = self._cache.layout
        return len(self._cache.gpu_cache), span.end - span.start, layout.num_kv_heads, layout.head_size

    def _num_bytes(self, span: Span) -> int:
        return 2 * math.prod(self._shape(span)) * self._dtype.itemsize

    def _sensitivity(self, table: torch.Tensor, copy_at: int, alone: torch.Tensor) -> torch.Tensor | None:
        """alone: V of the segment, [layers, num_tokens, kv heads, size]. None where it is no number."""
        key, behind = torch.empty_like(alone[0]), torch.empty_like(alone[0])
        pairs = ((alone[index], self._gather(index, table, copy_at, key, behind)) for index in range(len(alone)))
        return measure_sensitivity(pairs)

    def _gather(
        self, index: int, table: torch.Tensor, start: int, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """K and V of a layer's tokens from `start` on, into what is given; V."""
        scales, layout = self._cache.kv_scales, self._cache.layout
        scale = scales[index] if scales else None
        ops.gather_cache(self._cache.gpu_cache[index], table, [len(key)], layout, [start], (key, value), scale)
        return value
