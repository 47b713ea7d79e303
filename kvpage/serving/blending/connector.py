"""BlendConnector: between the prompts of an engine and the segments that are kept for blending.

    a request waits ─► find its segments ─► all that the prefix tree does not have is reused, in one step
                       thread
    its prefill is done ─► K and V of the segments that were computed in full, and are not kept yet ─► keep
                           this thread, out of the blocks                                              thread

    to warm a segment that is not kept yet      [ segment | segment ]     the first is kept, and with it
                                                                          how far V of the second differs

Computed in full means: nothing before it was blended. So a kept segment is exact, and blended K and V are kept nowhere.
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
from kvpage.checks.wait_limit import WaitLimit, wait_for_one
from kvpage.serving.blending.blend_pass import BlendCounts
from kvpage.serving.blending.blended_prompt import BlendedPrompt
from kvpage.serving.blending.blender import Blender
from kvpage.serving.model.attention import row_dtype

GRACE = 1e-3  # seconds: segments in memory have come by then, so that their request is admitted a step earlier


@dataclass(slots=True)
class BlendStats:
    """Counters since the engine was made.

    Attributes:
        num_lookups: Prompts whose segments were looked up.
        num_lookup_tokens: The tokens of these segments.
        num_found_tokens: The tokens of the segments that were found.
        num_late: Lookups that their requests did not wait for.
        num_errors: Exceptions of the segments' cache.
        num_skipped_segments: Segments that were not kept because too much was on its way.
        num_blends: Prefills that reused segments.
        num_reused_tokens: Their tokens that kept the segment's K and V.
        num_recomputed_tokens: Their tokens that were computed again.
        num_kept_segments: Segments that were handed to be kept.
        num_kept_tokens: Their tokens.
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
    """Segments of a prompt that are kept, and spans that are to be kept."""

    reusable: list[Reuse]
    missing: list[Span]


class _Lookup(NamedTuple):
    future: "Future[_Found]"
    deadline: float


class BlendConnector:
    """Finds and keeps segments for one engine. All methods are for the engine's thread; `source` is called in another.

    blender: blends batch items that reuse segments. dtype: the model's, for segments of a cache that
        quantises.

    Of the blender's config it uses: deadline, the seconds that a request waits for its segments; max_bytes, of K and V
    on their way to the source. A longer segment goes alone.
    """

    def __init__(
        self, blender: Blender, source: SegmentCache, cache: CacheEngine, manager: BlockManager, dtype: torch.dtype
    ) -> None:
        self.blender = blender
        self.source = source
        self.stats = BlendStats()
        self._cache, self._manager = cache, manager
        self._deadline, self._max_bytes = blender.config.deadline, blender.config.max_bytes
        self._dtype = row_dtype(dtype, cache.layout)
        self._lookups: dict[BlendedPrompt, _Lookup] = {}
        self._keeps: dict[Future[None], int] = {}  # bytes
        self._thread = started_pool(1, "kvpage-blend")

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its segments."""
        return bool(self._lookups)

    def wants_each(self, segments: Iterable[tuple[np.ndarray, bool]], namespace: bytes) -> list[bool]:
        """Return whether the source would keep each of these, computed standalone; True where asking raises.

        segments: tokens, and whether their sensitivity will be known.
        """
        asked = [self._thread.submit(self.source.wants, tokens, True, known, namespace) for tokens, known in segments]
        failed = [future.exception() is not None for future in asked]
        self.stats.num_errors += sum(failed)
        return [has_failed or future.result() for has_failed, future in zip(failed, asked, strict=True)]

    def ask(self, waiting: Iterable[BlendedPrompt]) -> None:
        """Take the segments that were found, and look up those of the waiting prompts."""
        self._poll()
        for prompt in waiting:
            is_asked = prompt.reusable is not None or prompt in self._lookups
            if not is_asked and not self._manager.is_swapped(prompt.seq_id):
                self._start(prompt)
        wait([lookup.future for lookup in self._lookups.values()], timeout=GRACE)
        self._poll()

    def holds(self, prompt: BlendedPrompt) -> bool:
        """Whether the prompt's segments are on their way."""
        return prompt in self._lookups

    def wait(self, limit: WaitLimit | None = None) -> None:
        """Wait until a lookup is done, or late; no longer than the limit."""
        if self._lookups:
            futures = [lookup.future for lookup in self._lookups.values()]
            wait_for_one(futures, min(lookup.deadline for lookup in self._lookups.values()), limit)

    def note_blended(self, prompt: BlendedPrompt, counts: BlendCounts) -> None:
        """Note that the prefill of the prompt reused segments."""
        prompt.count(*counts)
        self.stats.num_blends += 1
        self.stats.num_reused_tokens += counts.num_reused
        self.stats.num_recomputed_tokens += counts.num_recomputed

    def keep(self, prompt: BlendedPrompt) -> None:
        """Keep the segments that the prompt's prefill has computed in full: it is written, and not committed yet."""
        for span in prompt.wanted_spans:
            if span.end <= prompt.num_exact_tokens and self._has_room(prompt, span):
                tokens, segment = prompt.tokens[slice(*span)].copy(), self._segment(prompt, span)
                future = self._thread.submit(self.source.keep, tokens, segment, prompt.namespace)
                self._keeps[future] = self._num_bytes(span)
                self.stats.num_kept_segments += 1
                self.stats.num_kept_tokens += len(tokens)
        prompt.set_found([], [])

    def _has_room(self, prompt: BlendedPrompt, span: Span) -> bool:
        """Return whether a segment can be handed to the source; wait until it can for one that is to be warmed."""
        most = self._max_bytes - self._num_bytes(span)
        self._poll_keeps()
        while prompt.is_warming and self._keeps and sum(self._keeps.values()) > most:
            wait(self._keeps, return_when="FIRST_COMPLETED")
            self._poll_keeps()
        has_room = not self._keeps or sum(self._keeps.values()) <= most
        self.stats.num_skipped_segments += not has_room
        return has_room

    def rehearse(self) -> SegmentKV:
        """Ask for the kernels that copy a segment out of the blocks, and measure it. Return the copy of a block."""
        span = Span(0, self._cache.layout.block_size)
        return self._copied(torch.zeros(1, dtype=torch.int32), span, span.start)

    def forget(self, prompt: BlendedPrompt) -> None:
        """Forget a prompt whose request has ended."""
        lookup = self._lookups.pop(prompt, None)
        if lookup:
            lookup.future.cancel()

    def forget_kept(self) -> None:
        """Empty a source that has `clear`; called when nothing is under way. A store keeps its segments."""
        clear = getattr(self.source, "clear", None)
        if clear is not None:
            clear()

    def drain(self) -> None:
        """Wait until everything that is under way is done."""
        wait([lookup.future for lookup in self._lookups.values()])
        wait(self._keeps)
        self._poll()

    def close(self) -> None:
        """Drain, and end the thread. Kept segments stay with the source."""
        self.drain()
        self._thread.shutdown()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _start(self, prompt: BlendedPrompt) -> None:
        spans, namespace, may_reuse = prompt.spans, prompt.namespace, prompt.may_reuse
        is_measured = prompt.copy_at is not None
        match = self._manager.tree.match(prompt.tokens, namespace, is_hit=False)
        num_cached = match.num_tokens
        self._manager.tree.release(match)

        def find() -> _Found:
            reusable, missing = [], []
            for span in spans:
                tokens = prompt.tokens[slice(*span)]
                segment = self.source.find(tokens, namespace) if may_reuse and span.end > num_cached else None
                if segment is not None:
                    reusable.append(Reuse(segment, 0, span.start, segment.num_tokens))
                elif self.source.wants(tokens, span.start == 0, is_measured, namespace):
                    missing.append(span)
            return _Found(reusable, missing)

        self._lookups[prompt] = _Lookup(self._thread.submit(find), time.monotonic() + self._deadline)
        self.stats.num_lookups += 1
        self.stats.num_lookup_tokens += sum(end - start for start, end in spans)

    @uninterrupted
    def _poll(self) -> None:
        now = time.monotonic()
        for prompt, lookup in [*self._lookups.items()]:
            if lookup.future.done():
                self._take(prompt, lookup.future)
            elif now >= lookup.deadline:
                self.stats.num_late += 1
                prompt.set_found([], [])
                del self._lookups[prompt]
        self._poll_keeps()

    def _poll_keeps(self) -> None:
        for future in [future for future in self._keeps if future.done()]:
            del self._keeps[future]
            self.stats.num_errors += future.exception() is not None

    def _take(self, prompt: BlendedPrompt, future: "Future[_Found]") -> None:
        del self._lookups[prompt]
        failed = future.exception() is not None
        self.stats.num_errors += failed
        segments = _Found([], []) if failed else future.result()
        prompt.set_found(*segments)
        self.stats.num_found_tokens += sum(reuse.num_tokens for reuse in segments.reusable)

    def _segment(self, prompt: BlendedPrompt, span: Span) -> SegmentKV:
        """Copy K and V of the span out of the prompt's blocks to the host."""
        return self._copied(torch.from_numpy(self._manager.block_ids(prompt.seq_id)), span, prompt.copy_at)

    def _copied(self, block_ids: torch.Tensor, span: Span, copy_at: int | None) -> SegmentKV:
        """Do the same for a sequence of these blocks, int32, in host memory. copy_at: see BlendedPrompt."""
        table = block_ids[None].to(self._cache.device)
        key, value = (torch.empty(self._shape(span), dtype=self._dtype, device=self._cache.device) for _ in range(2))
        for index in range(len(key)):
            self._gather(index, table, span.start, key[index], value[index])
        sensitivity = None if copy_at is None else self._sensitivity(table, copy_at, value)
        positions = torch.from_numpy(np.arange(*span, dtype=np.int64))
        return SegmentKV(key.cpu(), value.cpu(), positions, span.start == 0, sensitivity)

    def _shape(self, span: Span) -> tuple[int, int, int, int]:
        """Return the shape of the segment's K, which is that of its V: [layers, tokens, kv heads, size]."""
        layout = self._cache.layout
        return len(self._cache.gpu_cache), span.end - span.start, layout.num_kv_heads, layout.head_size

    def _num_bytes(self, span: Span) -> int:
        return 2 * math.prod(self._shape(span)) * self._dtype.itemsize

    def _sensitivity(self, table: torch.Tensor, copy_at: int, alone: torch.Tensor) -> torch.Tensor | None:
        """Return how far V of the repeated segment differs; None where it is no number.

        alone: V of the first, [layers, num_tokens, kv heads, size].
        """
        key, repeated = torch.empty_like(alone[0]), torch.empty_like(alone[0])
        pairs = ((alone[index], self._gather(index, table, copy_at, key, repeated)) for index in range(len(alone)))
        return measure_sensitivity(pairs)

    def _gather(
        self, index: int, table: torch.Tensor, start: int, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write K and V of a layer's tokens from `start` on into these tensors; return V."""
        ops.gather_cache(self._cache.bound_caches[index], table, [len(key)], None, [start], (key, value))
        return value
