"""KVPageTier: the class that vLLM loads. Import it from kvpage.integrations.vllm, which checks vLLM first.

lookup           ─► Lookups ─► store.later.contains     a batch a step
submit_load      ─► Jobs    ─► store.later.get_into     each chunk for itself
submit_store     ─► Jobs    ─► store.later.put
get_finished_jobs ◄─ Jobs                               failed chunks are misses for their requests
touch            ─► Touches ─► store.later.touch        a batch a step
take_events      ◄─ BlockEvents ◄─ store.follow         chunks that came or left

A key in the store is vLLM's key after a prefix. Another prefix makes all chunks of before unfindable.
"""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvpage.checks.started_pool import begun
from kvpage.integrations.vllm.block_events import BlockEvents
from kvpage.integrations.vllm.chunk_rows import ChunkRows
from kvpage.integrations.vllm.config import StoreTierConfig
from kvpage.integrations.vllm.identity.engine_facts import (
    device_kind,
    engine_config,
    facts_of,
    is_dummy,
    torch_dtype,
    warn_of_random_keys,
)
from kvpage.integrations.vllm.identity.header import header_of
from kvpage.integrations.vllm.identity.weights import weights_name
from kvpage.integrations.vllm.interface import vllm_version
from kvpage.integrations.vllm.jobs import FinishedJob, Jobs
from kvpage.integrations.vllm.lookups import LOGGER, Lookups, RequestLog
from kvpage.integrations.vllm.metrics import MetricsWriter, StatsReader, TierCounts, definitions
from kvpage.integrations.vllm.touches import Touches
from kvpage.store import ByteStore
from kvpage.store.doors.vllm_prompt import PERSISTENT

logger = logging.getLogger(LOGGER)

STATS_SECONDS = 1.0


class KVPageTier(SecondaryTierManager):  # type: ignore[misc, unused-ignore]  # vLLM has no types for mypy
    """A secondary tier over a ByteStore. vLLM makes it, and calls it in its scheduler's thread.

    No call waits for the store but `drain_jobs` and `shutdown`, each as long as loads and stores may take together.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Make it, as vLLM does.

        Args:
            offloading_spec: vLLM's settings.
            primary_kv_view: vLLM's host memory, [chunks, bytes of a chunk].
            tier_type: vLLM's name of the tier.
            backpressure_detector: vLLM's, which skips stores while they are slow; None for none.
            settings: The fields of StoreTierConfig.

        Raises:
            ValueError, TypeError: A setting is unknown or wrong.
            OSError, ImportError: A place of the store cannot be opened.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config, rows = StoreTierConfig.from_dict(settings), ChunkRows(primary_kv_view)
        self.locality = Locality(config.locality) if config.locality else None
        whole, offloading = engine_config(), offloading_spec.config
        is_persistent = self._is_persistent(config, whole)
        weights = weights_name(offloading.model.name, config.weights, whole) if is_persistent else "of one process"
        header = header_of(offloading, facts_of(whole), weights, rows.num_bytes, vllm_version(), device_kind())
        warn_of_random_keys(whole)
        rank, dtype = f"dp{offloading.parallel.data_parallel_index}", torch_dtype(offloading.model.dtype)
        self._store = ByteStore(config.of_store(rank, dtype), header)
        self._prefix = PERSISTENT if is_persistent else secrets.token_bytes(len(PERSISTENT))
        self._forgets, self._drain_seconds = config.on_reset == "forget", config.load_patience + config.store_patience
        later, patience = self._store.later, config.lookup_patience
        self._lookups = Lookups(lambda keys: begun(lambda: later.contains(keys, deadline=patience)), patience)
        self._touches = Touches(lambda keys: begun(lambda: later.touch(keys, deadline=patience)))
        is_telling = self._tells_events(config, offloading_spec)
        self._events = BlockEvents(self._store, config.tiers, self._prefix) if is_telling else None
        max_pending = config.pending_bytes(rows.num_chunks * rows.num_bytes)
        self._jobs = Jobs(self._store, rows, config.load_patience, config.store_patience, max_pending)
        self._writer, self._stats, self._told_at = MetricsWriter(), StatsReader(self._store.stats), 0.0
        self._num_failed: Counter[str] = Counter()
        num_tokens = offloading.cache.tokens_per_hash * offloading.cache.blocks_per_chunk
        self._request_log = RequestLog(num_tokens, self._store.refused) if config.log_requests else None
        logger.info("kvpage keeps chunks of %d bytes over %d places", rows.num_bytes, len(config.tiers))

    # --- look-ups ---

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return HIT, MISS, or RETRY while the store has not answered. While a load hangs, everything is a MISS."""
        if self._jobs.is_stuck:
            return LookupResult.MISS
        answer = self._lookups.ask(self._prefix + bytes(key), req_context.req_id)
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        """Return that chunks are stored as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the request, and tell of it if the settings ask for it."""
        if self._request_log is not None:
            self._request_log.tell(req_context.req_id, self._lookups.asked(req_context.req_id))
        self._lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Ask the store for the step's lookups, and tell it which chunks the step has used."""
        self._lookups.send()
        self._touches.send()

    def touch(self, keys: Any, req_context: Any) -> None:
        """Note that a request uses chunks which it need not load."""
        self._touches.add(self._prefix + bytes(key) for key in keys)

    # --- jobs ---

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store chunks."""
        self._jobs.submit_store(job_metadata.job_id, *self._chunks(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load chunks."""
        self._jobs.submit_load(job_metadata.job_id, *self._chunks(job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that are over."""
        return [self._result(job) for job in self._jobs.finished()]

    def drain_jobs(self) -> None:
        """Wait until no job is under way. vLLM calls it where it resets its caches, as for new weights, and only there.

        Raises:
            TimeoutError: Jobs are still under way. vLLM's rows belong to them.
        """
        if self._forgets:
            self._forget()
        self._jobs.drain(self._drain_seconds)

    def shutdown(self) -> None:
        """Wait for the jobs, and close the store.

        Raises:
            TimeoutError: Jobs are still under way, or a place cannot be closed. vLLM keeps its memory then.
        """
        self._jobs.drain(self._drain_seconds)
        self._stats.close()
        closing = threading.Thread(target=self._close, name="kvpage-close", daemon=True)
        closing.start()
        closing.join(self._drain_seconds)
        if closing.is_alive():
            raise TimeoutError(f"the store must close within {self._drain_seconds:g} s: a place hangs")

    def _close(self) -> None:
        if self._events is not None:
            self._events.close()
        self._store.close()

    def _forget(self) -> None:
        """Let nothing be found any more that was stored before."""
        logger.info("vLLM resets its caches: chunks of before are not found any more")
        self._prefix = secrets.token_bytes(len(PERSISTENT))
        if self._events is not None:
            self._events.renew(self._prefix)

    def _chunks(self, job_metadata: Any) -> tuple[list[bytes], list[int]]:
        """Return keys and rows of a job's chunks."""
        keys = [self._prefix + bytes(key) for key in job_metadata.keys]
        return keys, [int(chunk_id) for chunk_id in job_metadata.chunk_ids]

    def _result(self, job: FinishedJob) -> Any:
        """Return a job's outcome as vLLM takes it, after the look-ups have learnt it."""
        failed = job.failed
        if job.is_load:
            self._lookups.mark_failed(failed)
        else:
            self._lookups.mark_stored(job.done)
            if self._events is not None:
                self._events.stored(job.done)
        kind = "dropped_stores" if job.is_dropped else "failed_loads" if job.is_load else "failed_stores"
        self._num_failed[kind] += len(failed)
        return JobResult(
            job_id=job.job_id,
            success=not failed,
            successful_keys=[key[len(PERSISTENT) :] for key in job.done] if job.is_load and failed else None,
            transfer_time=job.seconds,
            transfer_bytes=job.num_bytes,
        )

    # --- settings ---

    @staticmethod
    def _is_persistent(config: StoreTierConfig, whole: Any) -> bool:
        """Return whether other processes may find chunks that this one stores."""
        if config.weights is not None or not config.persistent:
            return config.persistent
        if whole is not None and is_dummy(whole):
            logger.warning("load_format dummy: weights are not the folder's. Nothing that is stored outlives vLLM")
        return whole is not None and not is_dummy(whole)

    # --- events ---

    def take_events(self) -> Iterable[Any]:
        """Return vLLM's events of chunks that came into the store, or left its last place."""
        changes = self._events.take() if self._events is not None else []
        return [OffloadingEvent(keys, self.medium, is_removed, self.locality) for is_removed, keys in changes]

    @staticmethod
    def _tells_events(config: StoreTierConfig, offloading_spec: Any) -> bool:
        is_on = config.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        if config.enable_kv_events and not is_on:
            logger.warning("enable_kv_events tells nothing: vLLM publishes no events, its kv_events_config is off")
        return bool(is_on)

    # --- metrics ---

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's definitions of the tier's metrics."""
        return definitions(OffloadingCounterMetadata, OffloadingGaugeMetadata)

    def get_stats(self) -> Any:
        """Return the metrics, at most once a second; None in between, and while they are read."""
        stats, now = self._stats.take(), time.monotonic()
        if stats is not None:
            return self._writer.write(OffloadingConnectorStats(), self.counts(), stats)
        if now - self._told_at >= STATS_SECONDS:
            self._told_at = now
            self._stats.begin()
        return None

    def counts(self) -> TierCounts:
        """Return the tier's counters."""
        num_lost = self._events.num_lost if self._events is not None else 0
        return TierCounts(**self._num_failed, unanswered_lookups=self._lookups.num_given_up, lost_events=num_lost)
