"""ByteStore: records of bytes by key, over tiers, for engines that keep K and V in memory of their own.

    put(keys, buffers)        ─► names ─► which are missing? ─► records ─► every tier
    get_into(keys, buffers)   ─► names ─► the first tier that has each ─► verified, copied into the buffers
                                                      ▲
                                                      └── a corrupt record, a tier in trouble: that key is a miss

Every read gives nothing, or exactly the bytes that were put under that key and header. A tier's trouble is a miss,
never an exception.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvpage.checks.interrupts import HeldInterrupts, made_or_undone
from kvpage.checks.started_pool import started_pool
from kvpage.store.bytes.byte_jobs import Buffer, ByteJobs, ByteKeys, Job
from kvpage.store.bytes.byte_records import ByteRecords
from kvpage.store.bytes.events import ByteEvents, Follow, Listener
from kvpage.store.bytes.header import Header, encode_header
from kvpage.store.config import ByteStoreConfig
from kvpage.store.placement import placed_tiers
from kvpage.store.records.codec import as_dtype
from kvpage.store.stack.call_gate import CallGate, gated
from kvpage.store.stack.placed import Placed
from kvpage.store.stack.tier_feed import TierFeed
from kvpage.store.stats import ByteStoreStats, byte_stats
from kvpage.store.tiered_store import TieredStore
from kvpage.store.tiers.tier import Tier

MIN_READERS = NUM_LOOKERS = 2


class ByteStore(TieredStore, ByteRecords):
    """Records of bytes by key, in the tiers of a `KVStore`, and with its promises. Thread-safe.

    `close` it, or use it in `with`. A forked process needs a store of its own: in it, every call but `close` raises
    RuntimeError.

    Keys and buffers are as of ByteRecords.

    Args:
        config: tiers and threads.
        header: all facts besides the key that the bytes depend on, such as model, layout and version. Names and
            values, or bytes that you encoded. Stores of another header in the same tiers do not see these records.
        tiers: tiers that are made already, in place of the configuration's.

    Raises:
        ValueError, TypeError, ImportError, OSError: a tier cannot be made, or the header is wrong.
    """

    def __init__(self, config: ByteStoreConfig, header: Header, tiers: Sequence[Tier | Placed] | None = None) -> None:
        if not isinstance(config, ByteStoreConfig):
            raise TypeError(f"config must be a ByteStoreConfig, got {type(config).__name__}")
        keys = ByteKeys(encode_header(header), None if config.dtype is None else as_dtype(config.dtype))
        super().__init__(placed_tiers(config, tiers), config.num_threads, are_given=tiers is not None)
        self.config = config
        self._feed = TierFeed(self._tiers.tiers)
        self._events = ByteEvents(self._feed)
        self._jobs = ByteJobs(self._tiers, keys, self._events)
        num_readers = max(config.num_threads or torch.get_num_threads(), MIN_READERS)
        self.later = Later(self._jobs, self.gate, num_readers)
        """The same calls, which return futures."""

    @gated
    def contains(self, keys: Sequence[bytes], deadline: float | None = None) -> list[bool]:
        """Return for each of the `keys` whether some tier has its record by the `deadline`, or had it a moment ago.

        That is not a use. A key may come several times. A key that was not looked up in time, in seconds or None,
        counts as missing.
        """
        return self._jobs.contains(keys, deadline)()

    @gated
    def touch(self, keys: Sequence[bytes], deadline: float | None = None) -> list[bool]:
        """Return for each of the `keys` whether a tier has noted a use by the `deadline`, in seconds or None; nothing
        is read.

        Others are evicted first then. Memory and disk note uses.
        """
        return self._jobs.touch(keys, deadline)()

    def follow(self, listener: Listener) -> Follow:
        """Tell the listener which records come into the tiers from now on, and leave them.

        It is called in a thread of its own, with no lock held. So it may call the store. There `flush` does not wait
        for events, and `close` raises RuntimeError. The events of a tier come in the order in which they happen;
        `flush` waits until they were told. An error that the listener raises is logged. Memory and disk tell
        everything, remote tiers and `disk-view` nothing.

        Up to 65,536 events wait for listeners. Further events are lost, and `stats` counts them.
        After a loss, ask `contains` for what you know.

        Args:
            listener: called with the events, at least one.

        Returns:
            The listening. Close it to end it.

        Raises:
            TypeError: the listener cannot be called.
        """
        if not callable(listener):
            raise TypeError(f"listener must be callable, got {type(listener).__name__}")
        return made_or_undone(lambda: self._follow(listener), Follow.close)

    def stats(self) -> ByteStoreStats:
        """Return counters and the state of each tier, also of a closed store."""
        self.gate.check()
        names, stack = [placed.tier.name for placed in self._tiers.tiers], self._tiers
        lost, refused = self._feed.num_lost, stack.refused
        return byte_stats(names, stack.stats(), stack.uses(), stack.counts, lost, refused)

    @gated
    def _follow(self, listener: Listener) -> Follow:
        return self._events.follow(listener)

    def _check_closable(self) -> None:
        if self._feed.is_telling_here:
            raise RuntimeError("close must not be called by a listener of the store, which close waits for")

    def _flush_parts(self) -> None:
        self._feed.flush()

    def _close_parts(self) -> None:
        self.later.close()
        self._feed.close()


class Later:
    """The calls of a `ByteStore`, each of which returns a future at once. Thread-safe; made by the store.

        contains, touch ─► two threads, in any order
        get_into        ─► several threads, in any order
        put, remove     ─► one thread, in the order of the calls

    Arguments are checked before the return. A deadline counts from the call. `close` of the store waits for all calls.

    Args:
        jobs: makes the calls.
        gate: counts them as under way.
        num_readers: threads for reads.
    """

    def __init__(self, jobs: ByteJobs, gate: CallGate, num_readers: int) -> None:
        self._jobs, self._gate = jobs, gate
        self._num_threads = {"looks": NUM_LOOKERS, "reads": num_readers, "writes": 1}
        self._lock = threading.Lock()
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def contains(self, keys: Sequence[bytes], deadline: float | None = None) -> "Future[list[bool]]":
        """Return a future of `ByteStore.contains(keys, deadline)`."""
        return self._start("looks", self._jobs.contains(keys, deadline))

    def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        skip_existing: bool = True,
        deadline: float | None = None,
    ) -> "Future[list[bool]]":
        """Return a future of `ByteStore.put(keys, buffers, skip_existing, deadline)`.

        The buffers must not change until it is done.
        """
        return self._start("writes", self._jobs.put(keys, buffers, skip_existing, deadline))

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], deadline: float | None = None
    ) -> "Future[list[bool]]":
        """Return a future of `ByteStore.get_into(keys, buffers, deadline)`.

        The buffers are written until it is done.
        """
        return self._start("reads", self._jobs.get_into(keys, buffers, deadline))

    def remove(self, keys: Sequence[bytes], deadline: float | None = None) -> "Future[list[bool]]":
        """Return a future of `ByteStore.remove(keys, deadline)`."""
        return self._start("writes", self._jobs.remove(keys, deadline))

    def close(self) -> None:
        """End the threads. The store calls it when no call is under way."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)  # it may be a thread of theirs that closes the store

    def touch(self, keys: Sequence[bytes], deadline: float | None = None) -> "Future[list[bool]]":
        """Return a future of `ByteStore.touch(keys, deadline)`. It waits for no put or read."""
        return self._start("looks", self._jobs.touch(keys, deadline))

    def _start(self, lane: str, job: Job) -> "Future[list[bool]]":
        with HeldInterrupts():
            self._gate.enter()
            try:
                future = self._pool(lane).submit(job)
            except BaseException:
                self._gate.leave()
                raise
            future.add_done_callback(lambda _: self._gate.leave())
        return future

    def _pool(self, lane: str) -> ThreadPoolExecutor:
        """Return the lane's threads. They are started when they are needed: many stores need none."""
        with self._lock:
            if lane not in self._pools:
                self._pools[lane] = started_pool(self._num_threads[lane], f"kvpage-{lane}")
            return self._pools[lane]
