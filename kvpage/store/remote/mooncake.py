"""MooncakeBackend: records in the memory of a fleet of machines, over RDMA or TCP (Mooncake Store).

    mooncake://master:50051?segment_size=4GiB&protocol=rdma&device=mlx5_0

A process gives `segment_size` of its memory to the fleet, and finds the records of all processes. The master knows
the process that holds each record. All values pass through a buffer of `buffer_size`, which bounds the memory that a
foreign value can take. Mooncake evicts by itself. It cannot list its records, so `infos` raises an error.

Its Python binding answers a get with b"" both for a missing value and for a lost master. So if all answers are empty,
the backend asks whether the first value exists: that call fails without a master. FAULTS names the errors' kinds.
"""

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvpage.store.remote.backend import Backend
from kvpage.store.remote.fault import Fault, FaultKind
from kvpage.store.remote.options import RemoteOptions, num_bytes
from kvpage.store.remote.remote_tier import RemoteTier
from kvpage.store.tiers.tier import Key

PREFIX = "kvpage:"
DEFAULT_PORT = 50051
SEGMENT_SIZE, BUFFER_SIZE = "1GiB", "512MiB"
FAULTS: dict[FaultKind, frozenset[int]] = {  # error codes of Mooncake Store; all others are broken
    "absent": frozenset({-703, -704, -712}),  # not whole yet, not there, no longer there
    "full": frozenset({-200, -600, -1700}),  # no room in the fleet, none in the buffer, none for the tenant
    "forbidden": frozenset({-601}),  # another client's object
    "busy": frozenset({-500, -705, -706, -707, -708, -714, -800}),  # in use, or its holder is not reached
}
Store = Any  # MooncakeDistributedStore


class MooncakeBackend(Backend):
    """Records in a Mooncake Store. Thread-safe.

    connect: makes the client, on the first call; one for all threads. max_value_bytes: of one value.
    buffer_bytes: of all values that one call of the client returns.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        prefix: str = PREFIX,
        *,
        max_value_bytes: int = 256 << 20,
        buffer_bytes: int = 512 << 20,
    ) -> None:
        if not 0 < max_value_bytes <= buffer_bytes:
            raise ValueError(f"max_value_bytes must be within [1, {buffer_bytes}], got {max_value_bytes}")
        self._connect, self._prefix = connect, prefix
        self._max_keys = buffer_bytes // max_value_bytes
        self._changed = threading.Condition()
        self._store: Store | None = None
        self._num_calls = 0
        self._is_connecting = False
        self._is_closed = False

    def get(self, keys: Sequence[Key], timeout: float | None) -> Sequence[object]:
        names = list(dict.fromkeys(self._name(key) for key in keys))  # of a name given twice, the binding finds one
        values: list[bytes] = []
        with self._client() as store:
            for i in range(0, len(names), self._max_keys):
                values += store.get_batch(names[i : i + self._max_keys])
            if not any(values):
                _raise_if_failed("is_exist", store.is_exist(names[0]))
        value_of = dict(zip(names, values, strict=True))
        return [value_of[self._name(key)] or None for key in keys]

    def put(self, items: Sequence[tuple[Key, memoryview]], timeout: float | None) -> Sequence[bool | Fault]:
        """Store all values at once, or else one by one: the binding does not report which one failed."""
        names, values = [self._name(key) for key, _ in items], [value for _, value in items]
        with self._client() as store:
            if store.upsert_batch(names, values) == 0:
                return [True] * len(names)
            codes = [store.upsert(name, value) for name, value in zip(names, values, strict=True)]
        return [_fault("upsert", code) or code == 0 for code in codes]

    def contains(self, keys: Sequence[Key], timeout: float | None) -> Sequence[bool | Fault]:
        with self._client() as store:
            codes = store.batch_is_exist([self._name(key) for key in keys])
        return [_fault("is_exist", code) or code == 1 for code in codes]

    def remove(self, keys: Sequence[Key], timeout: float | None) -> int:
        """Remove values, even under Mooncake's lease of a recent read: readers have a copy."""
        with self._client() as store:
            codes = store.batch_remove([self._name(key) for key in keys], True)
        failed = [code for code in codes if code < 0 and code not in FAULTS["absent"]]
        if failed:
            _raise_if_failed("remove", failed[0], is_partial=len(failed) < len(codes))
        return sum(code == 0 for code in codes)

    def clear(self) -> None:
        with self._client() as store:
            _raise_if_failed("remove", store.remove_by_regex(f"^{re.escape(self._prefix)}[0-9a-f]{{64}}$", True))

    def close(self) -> None:
        """Wait for running calls, then close the client, which they use until they return."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._num_calls == 0)
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _name(self, key: Key) -> str:
        return self._prefix + key.hex()

    @contextmanager
    def _client(self) -> Iterator[Store]:
        with self._changed:
            if self._is_closed:
                raise OSError("closed")
            self._num_calls += 1
        try:
            yield self._connected()
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def _connected(self) -> Store:
        """Return the client. The first caller connects; if that fails, the next one tries."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_connecting)
            if self._store is not None:
                return self._store
            self._is_connecting = True
        store = None
        try:
            store = self._connect()
        finally:
            with self._changed:
                self._store, self._is_connecting = store, False
                self._changed.notify_all()
        return store


def from_url(url: str) -> RemoteTier:
    """Return the tier of a URL, not connected yet. Raises ValueError for a bad URL, ImportError without mooncake.

    Options: segment_size, buffer_size, protocol (tcp, rdma), device, local (this host's address, as others reach it),
    metadata, prefix, and the options of `RemoteOptions.take`.
    """
    parts = urlsplit(url)
    options, rest = RemoteOptions.take(dict(parse_qsl(parts.query, keep_blank_values=True)))
    if parts.scheme != "mooncake" or not parts.hostname:
        raise ValueError(f"a mooncake URL must be mooncake://master:port, got {url!r}")
    segment_bytes = num_bytes("segment_size", rest.pop("segment_size", SEGMENT_SIZE))
    buffer_bytes = num_bytes("buffer_size", rest.pop("buffer_size", BUFFER_SIZE))
    settings = {
        "local_hostname": rest.pop("local", "127.0.0.1" if parts.hostname == "127.0.0.1" else socket.gethostname()),
        "metadata_server": rest.pop("metadata", "P2PHANDSHAKE"),
        "global_segment_size": segment_bytes,
        "local_buffer_size": buffer_bytes,
        "protocol": rest.pop("protocol", "tcp"),
        "rdma_devices": rest.pop("device", ""),
        "master_server_addr": f"{parts.hostname}:{parts.port or DEFAULT_PORT}",
    }
    prefix = rest.pop("prefix", PREFIX)
    if settings["protocol"] not in ("tcp", "rdma"):
        raise ValueError(f"protocol must be tcp or rdma, got {settings['protocol']!r}")
    if rest:
        raise ValueError(f"options must be known, got {', '.join(sorted(rest))}")
    client = _client_class()
    backend = MooncakeBackend(
        lambda: _connect(client(), settings), prefix, max_value_bytes=options.max_value_bytes, buffer_bytes=buffer_bytes
    )
    return RemoteTier(backend, "mooncake", options)


def _client_class() -> Callable[[], Store]:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:  # the package, or a library that it needs
        raise ImportError(
            f"the mooncake tier needs mooncake: pip install 'kvpage[mooncake]', libibverbs1, librdmacm1 ({error})"
        ) from error
    client: Callable[[], Store] = MooncakeDistributedStore
    return client


def _connect(store: Store, settings: dict[str, Any]) -> Store:
    _raise_if_failed("setup", store.setup(**settings))
    return store


def _raise_if_failed(call: str, code: int, is_partial: bool = False) -> None:
    if fault := _fault(call, code, is_partial):
        raise fault


def _fault(call: str, code: int, is_partial: bool = False) -> Fault | None:
    """Return the fault that an error code reports; None for the code of a success."""
    if code >= 0:
        return None
    kind: FaultKind = next((kind for kind, codes in FAULTS.items() if code in codes), "broken")
    return Fault(kind, f"{call} failed with Mooncake's error {code}", is_partial=is_partial)
