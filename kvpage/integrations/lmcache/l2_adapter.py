"""KVPageL2Adapter: kvpage's tiers as an L2 adapter of LMCache's server: its chunks in memory, on disk, in Redis, S3.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvpage.integrations.lmcache.l2_adapter",
        "class_name": "KVPageL2Adapter", "adapter_params": {"tiers": ["disk:///var/kv?size=1TiB"], "weights": "m@1"}}'

    submit ─► ByteStore.later ─► a thread of the store ─► result, event ─► LMCache asks for the result, once

LMCache's key of a chunk names tokens, model, rank, group and salt. It does not name the weights, so `weights` must.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any

from lmcache import __version__
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvpage.checks.started_pool import begun
from kvpage.store import ByteStore, ByteStoreConfig
from kvpage.store.bytes.header import Value

logger = logging.getLogger(__name__)
FORMAT = 1
"""Of the records that this adapter writes. Another number finds none of them."""


@dataclass(frozen=True, slots=True)
class L2AdapterSettings:
    """The `adapter_params` in LMCache's JSON. They check themselves.

    Attributes:
        tiers: URLs of tiers, the fastest first, as ByteStoreConfig takes them.
        weights: A name for the weights and for all that changes what they compute, such as "model@revision".
        num_threads: Threads for the records of a call; None for torch's number.
        deadline: Seconds of a call on a tier whose URL names none; None for no limit.
        dtype: Of K and V, such as "bfloat16", for tiers with a codec; None for none.

    Raises:
        ValueError: A field breaks a rule.
        TypeError: A field is of another type.
    """

    tiers: tuple[str, ...]
    weights: str
    num_threads: int | None = None
    deadline: float | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", self.store_config().tiers)
        if not isinstance(self.weights, str):
            raise TypeError(f"weights must be text, got {type(self.weights).__name__}")
        if not self.weights:
            raise ValueError("weights must name the weights, got ''")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "L2AdapterSettings":
        """Return the settings in `values`, by the names of the fields.

        Raises:
            ValueError: A key is not a field, `tiers` or `weights` is missing, or a field breaks a rule.
            TypeError: A field is of another type.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"adapter_params must be among {', '.join(known)}, got {', '.join(unknown)}")
        missing = [name for name in ("tiers", "weights") if name not in values]
        if missing:
            raise ValueError(f"adapter_params must have {' and '.join(missing)}, got only {sorted(values)}")
        return cls(**values)

    def store_config(self) -> ByteStoreConfig:
        """Return the configuration of the store."""
        return ByteStoreConfig(self.tiers, self.num_threads, self.deadline, self.dtype)


class _Results:
    """Results of tasks of one kind, each given once, and the event that tells of new ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = create_event_notifier()
        self._done: dict[int, Any] = {}

    @property
    def fd(self) -> int:
        return int(self._event.fileno())

    def add(self, task_id: int, result: Any) -> None:
        with self._lock:
            self._done[task_id] = result
        self._event.notify()

    def take(self, task_id: int) -> Any:
        """Return a task's result; None if it is not there yet."""
        with self._lock:
            return self._done.pop(task_id, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        self._event.close()


class KVPageL2Adapter(L2AdapterInterface):  # type: ignore[misc, unused-ignore]  # LMCache has no types for mypy
    """LMCache's chunks as records of a ByteStore: a load gives exactly what was stored, or is a miss. Thread-safe.

    Nothing is locked between a look-up and a load: a chunk that is evicted in between is a miss.

    Args:
        settings: LMCache's `adapter_params`: see L2AdapterSettings.
        l1_memory_desc: LMCache's host memory. Not used: each task names its memory.

    Raises:
        ValueError, TypeError: A setting breaks a rule.
        OSError, ImportError: A tier cannot be opened.
    """

    def __init__(self, settings: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        checked = L2AdapterSettings.from_dict(settings)
        header: dict[str, Value] = {"engine": f"lmcache {__version__}", "format": FORMAT, "weights": checked.weights}
        header["dtype"] = checked.dtype or ""  # two models of the same weights may have chunks of the same size
        self._store = ByteStore(checked.store_config(), header)
        self._stores, self._lookups, self._loads = _Results(), _Results(), _Results()
        self._lock, self._num_tasks = threading.Lock(), 0

    def get_store_event_fd(self) -> int:
        """Return the event of stores that are over."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the event of look-ups that are over."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """Return the event of loads that are over."""
        return self._loads.fd

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begin to store chunks. Their memory may not change until the task is over."""
        chunks = {_name(key): (key, item) for key, item in zip(keys, objects, strict=True)}
        buffers = [item.byte_array for _, item in chunks.values()]
        task_id = self._new_task()

        def end(flags: list[bool]) -> None:
            sizes = {
                key: item.get_size() for (key, item), is_kept in zip(chunks.values(), flags, strict=True) if is_kept
            }
            self._stores.add(task_id, L2StoreResult(all(flags), sum(sizes.values())))  # first: a listener may raise
            if sizes:
                self._notify_keys_stored(list(sizes), list(sizes.values()))

        self._follow(begun(lambda: self._store.later.put(list(chunks), buffers)), len(buffers), end)
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of stores that are over, each once."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any) -> int:
        """Begin to look chunks up."""
        task_id, names = self._new_task(), [_name(key) for key in keys]
        future = begun(lambda: self._store.later.contains(names))
        self._follow(future, len(names), lambda flags: self._lookups.add(task_id, _bitmap(flags)))
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return which chunks are there, once; None until that is known."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Do nothing: nothing is locked."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begin to load chunks into memory, which belongs to the task until it is over."""
        task_id, names, memory = self._new_task(), [_name(key) for key in keys], list(objects)
        buffers = [item.byte_array for item in memory]

        def end(flags: list[bool]) -> None:
            memory.clear()
            self._loads.add(task_id, _bitmap(flags))
            self._notify_keys_accessed([key for key, is_loaded in zip(keys, flags, strict=True) if is_loaded])

        self._follow(begun(lambda: self._store.later.get_into(names, buffers)), len(names), end)
        return task_id

    def query_load_result(self, task_id: int) -> Any:
        """Return which chunks were loaded, once; None until that is known."""
        return self._loads.take(task_id)

    def delete(self, keys: Sequence[Any]) -> None:
        """Remove chunks. LMCache's count of bytes does not learn how many they were."""
        flags = self._store.remove([_name(key) for key in keys])
        gone = [key for key, is_gone in zip(keys, flags, strict=True) if is_gone]
        if gone:
            self._notify_keys_deleted(gone, [0] * len(gone))

    def report_status(self) -> dict[str, Any]:
        """Return that it works, the names of the tiers, and how many records were refused."""
        stats = self._store.stats()
        names = [tier.name for tier in stats.tiers]
        return {"is_healthy": True, "type": type(self).__name__, "tiers": names, "refused": dict(stats.refused)}

    def close(self) -> None:
        """Wait for the tasks, and close the tiers and the events."""
        self._store.close()
        for results in (self._stores, self._lookups, self._loads):
            results.close()

    def _new_task(self) -> int:
        with self._lock:
            self._num_tasks += 1
            return self._num_tasks

    def _follow(self, future: "Future[list[bool]]", num_keys: int, end: Callable[[list[bool]], None]) -> None:
        """Call `end` with a flag for each key when the call is over: none is set where it failed."""

        def over(ended: "Future[list[bool]]") -> None:
            error = None if ended.cancelled() else ended.exception()
            if error is not None:
                logger.error("a task of the store failed; its chunks count as missing", exc_info=error)
            end([False] * num_keys if ended.cancelled() or error is not None else ended.result())

        future.add_done_callback(over)


def _name(key: Any) -> bytes:
    """Return the bytes of an ObjectKey; another one has others."""
    parts = [key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash.hex()]
    return json.dumps(parts).encode()


def _bitmap(flags: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(flags))
    for index, flag in enumerate(flags):
        if flag:
            bitmap.set(index)
    return bitmap
