"""RedisBackend: one key a record, in Redis or Valkey, alone, with Sentinel, or as a cluster.

    redis://user:password@host:6379/0?ttl=86400            rediss:// with TLS, unix:///path
    redis+cluster://host:7000,host:7001                    rediss+cluster:// with TLS
    redis+sentinel://host:26379,host:26380/mymaster/0      rediss+sentinel:// with TLS

The password is the server's; sentinels are asked without one. The key is a prefix and the record's key in hexadecimal.
Values are read by GETRANGE, in one round trip like GET. It returns no more bytes than a record may have, whatever
another client has stored.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvpage.store.remote.backend import Backend
from kvpage.store.remote.fault import Fault, FaultKind, raise_if_none
from kvpage.store.remote.options import MIN_RECORD_BYTES, RemoteOptions, integer
from kvpage.store.remote.redis_client import Client, connector, disconnect, interrupt, redis
from kvpage.store.remote.remote_tier import RemoteTier
from kvpage.store.tiers.tier import Key, RecordInfo

PREFIX = "kvpage:"
LIST_COUNT = 1000  # keys a round trip of a listing
FAULTS: dict[FaultKind, tuple[type[Exception], ...]] = {  # all others are broken
    "full": (redis.exceptions.OutOfMemoryError,),
    "forbidden": (redis.exceptions.NoPermissionError, redis.exceptions.ReadOnlyError),
    "busy": (
        redis.exceptions.AskError,  # and its MovedError, after the client's own tries
        redis.exceptions.BusyLoadingError,
        redis.exceptions.ClusterDownError,  # and its MasterDownError
        redis.exceptions.TryAgainError,
    ),
}
FAULTS_OF_CODES: dict[str, FaultKind] = {  # that redis-py has no class for
    "BUSY": "busy",  # with a script
    "MISCONF": "forbidden",  # writes, while nothing can be saved
    "NOREPLICAS": "forbidden",  # likewise
    "WRONGTYPE": "absent",  # another client's value
}


class RedisBackend(Backend):
    """Records in Redis. Thread-safe.

    connect: makes a client of redis-py; each concurrent call has one of its own. max_value_bytes: of a value that is
    fetched whole; of a longer one, one byte more is fetched. ttl: seconds until a value expires; None for never.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        prefix: str = PREFIX,
        *,
        max_value_bytes: int = 256 << 20,
        ttl: int | None = None,
    ) -> None:
        if max_value_bytes < 1:
            raise ValueError(f"max_value_bytes must be positive, got {max_value_bytes}")
        if ttl is not None and ttl < 1:
            raise ValueError(f"ttl must be positive, got {ttl}")
        self._connect, self._prefix = connect, prefix.encode()
        self._max_value_bytes, self._ttl = max_value_bytes, ttl
        self._lock = threading.Lock()
        self._idle: list[Client] = []
        self._busy: dict[int, Client] = {}  # by thread
        self._given_up: set[int] = set()  # threads of those
        self._is_closed = False

    def get(self, keys: Sequence[Key], timeout: float | None) -> Sequence[object]:
        end = self._max_value_bytes
        answers = self._answers([("GETRANGE", self._name(key), 0, end) for key in keys])
        return [_value(answer) for answer in answers]

    def put(self, items: Sequence[tuple[Key, memoryview]], timeout: float | None) -> Sequence[bool | Fault]:
        life = () if self._ttl is None else ("EX", self._ttl)
        answers = self._answers([("SET", self._name(k), v, *life) for k, v in items])
        return [answer if isinstance(answer, Fault) else answer is True for answer in answers]

    def contains(self, keys: Sequence[Key], timeout: float | None) -> Sequence[bool | Fault]:
        """Return for each key whether a value is there whose length a record can have.

        STRLEN finds the lengths, so that a store replaces values that cannot be records. EXISTS would find them there.
        """
        lengths = self._answers([("STRLEN", self._name(key)) for key in keys])
        return [n if isinstance(n, Fault) else self._may_be_record(n) for n in lengths]

    def remove(self, keys: Sequence[Key], timeout: float | None) -> int:
        return self._remove([self._name(key) for key in keys])

    def infos(self) -> Iterator[RecordInfo]:
        for names in self._listed():
            lengths = self._answers([("STRLEN", name) for name in names])
            raise_if_none(lengths)
            for name, num_bytes in zip(names, lengths, strict=True):
                if isinstance(num_bytes, int) and num_bytes > 0:
                    yield RecordInfo(bytes.fromhex(name.removeprefix(self._prefix).decode()), num_bytes)

    def clear(self) -> None:
        """Remove all keys with the prefix that have the name of a record."""
        for names in self._listed():
            self._remove(names)

    def give_up(self, thread_id: int) -> None:
        with self._lock:
            client = self._busy.get(thread_id)
            if client is not None:
                self._given_up.add(thread_id)
        if client is not None:
            interrupt(client)

    def close(self) -> None:
        with self._lock:
            idle, busy = list(self._idle), list(self._busy.values())
            self._is_closed = True
            self._idle.clear()
            self._busy.clear()
        for client in idle:
            disconnect(client)
        for client in busy:
            interrupt(client)

    def _name(self, key: Key) -> bytes:
        return self._prefix + key.hex().encode()

    def _may_be_record(self, length: object) -> bool:
        return isinstance(length, int) and MIN_RECORD_BYTES <= length <= self._max_value_bytes

    def _remove(self, names: Sequence[bytes]) -> int:
        answers = self._answers([("UNLINK", name) for name in names])
        if faults := [answer for answer in answers if isinstance(answer, Fault)]:
            raise Fault(faults[0].kind, str(faults[0]), is_partial=len(faults) < len(answers))
        return sum(answer == 1 for answer in answers)

    def _listed(self) -> Iterator[list[bytes]]:
        """Yield names of records, at most LIST_COUNT at a time. All are found first, since callers need the client."""
        glob = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"?" * 64
        pattern = re.compile(re.escape(self._prefix) + rb"[0-9a-f]{64}")
        with self._client() as client:
            names = sorted({name for name in client.scan_iter(glob, LIST_COUNT) if pattern.fullmatch(name)})
        yield from (names[i : i + LIST_COUNT] for i in range(0, len(names), LIST_COUNT))

    def _answers(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands in one round trip and return the answers, a Fault for each command that has none."""
        with self._client() as client:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            try:
                answers: list[Any] = pipeline.execute(raise_on_error=False)
            except redis.RedisError as error:
                raise _fault(error) from error
        if len(answers) != len(commands):
            raise redis.RedisError(f"{len(commands)} commands were sent, got {len(answers)} answers")
        return [_fault(answer) if isinstance(answer, Exception) else answer for answer in answers]

    @contextmanager
    def _client(self) -> Iterator[Client]:
        thread_id = threading.get_ident()
        with self._lock:
            client = self._idle.pop() if self._idle else None
        client = client or self._connect()
        with self._lock:
            self._busy[thread_id] = client
        try:
            yield client
        except BaseException:
            disconnect(client)  # unread answers may be on their way
            raise
        finally:
            with self._lock:
                stays = self._busy.pop(thread_id, None) is not None and not self._is_closed
                stays = stays and thread_id not in self._given_up
                self._given_up.discard(thread_id)
                if stays:
                    self._idle.append(client)
            if not stays:
                disconnect(client)


def from_url(url: str) -> RemoteTier:
    """Return the tier of a URL, not connected yet. Raises ValueError for a bad URL.

    Options: ttl in seconds, prefix, the options of `RemoteOptions.take`, and of TLS (see `redis_client`).
    """
    parts = urlsplit(url)
    options, rest = RemoteOptions.take(dict(parse_qsl(parts.query, keep_blank_values=True)))
    ttl, prefix = rest.pop("ttl", None), rest.pop("prefix", PREFIX)
    backend = RedisBackend(
        connector(parts, rest),
        prefix,
        max_value_bytes=options.max_value_bytes,
        ttl=None if ttl is None else integer("ttl", ttl),
    )
    return RemoteTier(backend, "redis", options)


def _value(answer: object) -> object:
    """Return the value; None for an empty one, GETRANGE's answer for a missing key; a Fault.

    A value of another type becomes b"", which is not a record, so that it is removed.
    """
    if isinstance(answer, Fault):
        return b"" if answer.kind == "absent" else answer
    return answer if isinstance(answer, bytes | memoryview) and len(answer) else None


def _fault(error: Exception) -> Fault:
    """Return the fault that an error of redis-py means."""
    code = str(error).partition(" ")[0]
    kind: FaultKind = next((kind for kind, classes in FAULTS.items() if isinstance(error, classes)), "broken")
    if isinstance(error, redis.ResponseError):
        kind = FAULTS_OF_CODES.get(code, kind)
    return Fault(kind, f"{type(error).__name__}: {error}")
