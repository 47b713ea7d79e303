"""FaultTable: docs/notes/store_errors.md's tables of errors, made from what the tiers do.

    python tests/support/fault_table.py        prints them

Each error is put in place of a client's answer, and of the system's for the disk tier. Then the backend's answer for
that key is named by its kind. An error of the disk tier is broken if it is counted, and else absent.
"""

import errno
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from redis.connection import DefaultParser
from redis.exceptions import ConnectionError as RedisConnectionError
from support.store_records import get, key, put, record

from kvpage.store.disk import segment as disk_segment
from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier
from kvpage.store.remote.backend import Backend
from kvpage.store.remote.fault import Fault
from kvpage.store.remote.mooncake import MooncakeBackend
from kvpage.store.remote.options import RemoteOptions
from kvpage.store.remote.redis import RedisBackend
from kvpage.store.remote.remote_tier import RemoteTier
from kvpage.store.remote.s3 import S3Backend
from kvpage.store.tiers.tier import TierError

SICK, WELL = key(0), key(1)
KINDS = ("absent", "full", "forbidden", "busy", "broken")
Answers = tuple[str, str, str]  # to a look-up, a read and a write

S3_ERRORS = [
    ("NoSuchKey", 404), ("AccessDenied", 403), ("QuotaExceeded", 403), ("EntityTooLarge", 400),
    ("InvalidObjectState", 403), ("SlowDown", 503), ("InternalError", 500), ("TooManyRequests", 429),
    ("InvalidAccessKeyId", 403), ("SignatureDoesNotMatch", 403), ("ExpiredToken", 400), ("NoSuchBucket", 404),
    ("PermanentRedirect", 301),
]  # fmt: skip
REDIS_ERRORS = [
    "WRONGTYPE of another kind", "OOM command not allowed", "NOPERM no permission", "READONLY a replica",
    "MISCONF cannot save", "NOREPLICAS too few", "LOADING the dataset", "BUSY running a script", "TRYAGAIN",
    "ASK 1 a:1", "CLUSTERDOWN the hash slot", "MASTERDOWN no link", "NOAUTH no password", "WRONGPASS",
    "ERR unknown command",
]  # fmt: skip
MOONCAKE_CODES = [-703, -704, -712, -200, -600, -1700, -601, -705, -706, -707, -708, -714, -500, -800, -900, -1, -1010]
OF_WRITES = frozenset({
    "403 QuotaExceeded", "400 EntityTooLarge", "OOM", "READONLY", "MISCONF", "NOREPLICAS", "-200", "-600", "-1700",
})  # fmt: skip
OF_READS = frozenset({"404 NoSuchKey", "403 InvalidObjectState", "WRONGTYPE", "-703", "-704", "-707", "-712"})
DISK_ERRORS = [errno.EIO, errno.EACCES, errno.EROFS, errno.ESTALE, errno.ENOSPC, errno.EMFILE]


class S3Error(Exception):
    """As botocore's ClientError: the answer to a HEAD has no body, so that its code is the status."""

    def __init__(self, code: str, status: int, has_body: bool = True) -> None:
        super().__init__(code)
        code = code if has_body else str(status)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class S3Client:
    exceptions = types.SimpleNamespace(ClientError=S3Error)

    def __init__(self, error: Callable[[bool], Exception]) -> None:
        self._error = error

    def head_object(self, **_: object) -> None:
        raise self._error(False)

    def get_object(self, **_: object) -> None:
        raise self._error(True)

    put_object = get_object


class RedisPipeline:
    def __init__(self, error: Exception) -> None:
        self._error = error
        self._num_commands = 0

    def execute_command(self, *_: object) -> None:
        self._num_commands += 1

    def execute(self, raise_on_error: bool) -> list[object]:
        if isinstance(self._error, RedisConnectionError | OSError):
            raise self._error  # as redis-py does
        return [self._error] * self._num_commands


def s3_backend(error: Callable[[bool], Exception]) -> Backend:
    return S3Backend(S3Client(error), "bucket")


def redis_backend(error: Exception) -> Backend:
    pools = types.SimpleNamespace(disconnect=lambda **_: None)
    return RedisBackend(lambda: types.SimpleNamespace(pipeline=lambda **_: RedisPipeline(error), connection_pool=pools))


def mooncake_backend(code: int) -> Backend:
    store = types.SimpleNamespace(
        get_batch=lambda names: [b""] * len(names),
        is_exist=lambda name: code,
        batch_is_exist=lambda names: [code] * len(names),
        upsert_batch=lambda names, values: code,
        upsert=lambda name, value: code,
    )
    return MooncakeBackend(lambda: store)


def answers_of(backend: Backend) -> Answers:
    """Return the kinds of a backend's answers, all of which are errors."""
    calls: list[Callable[[], Sequence[object]]] = [
        lambda: backend.contains([SICK], None),
        lambda: backend.get([SICK], None),
        lambda: backend.put([(SICK, memoryview(b"value"))], None),
    ]
    return tuple(map(_kind, calls))  # type: ignore[return-value]


def _kind(call: Callable[[], Sequence[object]]) -> str:
    try:
        [answer] = call()
    except Fault as fault:
        return fault.kind
    except Exception:  # the tier takes any error of a call for the server's
        return "broken"
    return answer.kind if isinstance(answer, Fault) else "absent"


# --- the disk tier ---


@contextmanager
def broken_system(error: int) -> Iterator[None]:
    """All reads and writes of segments fail."""

    def fail(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    names = {name: getattr(os, name) for name in dir(os)} | {"preadv": fail, "pwrite": fail}
    with mock.patch.object(disk_segment, "os", types.SimpleNamespace(**names)):
        yield


def disk(error: int, folder: Path) -> Answers:
    """Return the kinds of the answers to one key after another."""
    tier = DiskTier([folder], 64 * SLOT_BYTES, segment_bytes=64 * SLOT_BYTES, retry_seconds=0)
    put(tier, {SICK: record(SICK), WELL: record(WELL)})
    try:
        with broken_system(error):
            look_up = "there" if tier.contains([SICK]) == [True] else "absent"
            read = _disk_kind(tier, lambda: get(tier, [SICK])[0])
            write = _disk_kind(tier, lambda: put(tier, {SICK: record(SICK)})[0])
        if get(tier, [SICK, WELL]) != [record(SICK), record(WELL)]:
            raise AssertionError("a record was lost")
        return look_up, read, write
    finally:
        tier.close()


def _disk_kind(tier: DiskTier, call: Callable[[], object]) -> str:
    before = tier.stats().errors
    with suppress(TierError):
        call()
    return "broken" if tier.stats().errors > before else "absent"


def disk_misses(folder: Path) -> dict[str, Answers]:
    """Return the kinds where no call of the system fails."""
    tier = DiskTier([folder], 64 * SLOT_BYTES, segment_bytes=64 * SLOT_BYTES, retry_seconds=0)
    put(tier, {SICK: record(SICK, 40 * SLOT_BYTES)})
    with tier.open([SICK])[0]:
        write = "full" if tier.create(WELL, 40 * SLOT_BYTES) is None else "there"
    [path] = folder.glob("*.segment")
    path.write_bytes(path.read_bytes().replace(SICK, WELL))  # its header is not the record's any more
    look_up = "there" if tier.contains([SICK]) == [True] else "absent"
    read = _disk_kind(tier, lambda: get(tier, [SICK])[0])
    if tier.contains([SICK]) == [True]:
        raise AssertionError("the record must be dropped")
    tier.close()
    return {"another header in its slots": (look_up, read, "-"), "all records in use": ("-", "-", write)}


# --- the tables ---


def rows_of(tier: str, answers: dict[str, Answers]) -> Iterator[str]:
    """Yield a row for each way to answer, with all errors that are answered so."""
    answers = {error: _possible(error, kinds) for error, kinds in answers.items()}
    for kinds in sorted(set(answers.values()), key=lambda kinds: [_rank(kind) for kind in (kinds[2], *kinds)]):
        errors = ", ".join(f"`{error}`" for error, found in answers.items() if found == kinds)
        yield f"| {tier} | {errors} | {' | '.join(kinds)} |\n"


def _possible(error: str, kinds: Answers) -> Answers:
    """Return the kinds of the calls that a server can answer with the error, and "-" for the others."""
    look_up, read, write = kinds
    return ("-", "-", write) if error in OF_WRITES else (look_up, read, "-") if error in OF_READS else kinds


def _rank(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else -1


def errors_table() -> str:
    """Return the table of errors by tier."""
    table = "| Tier | Error | Look-up | Read | Write |\n|---|---|---|---|---|\n"
    s3_answers = {
        f"{status} {code}": answers_of(s3_backend(lambda has_body, at=(code, status): S3Error(*at, has_body)))  # type: ignore[misc]
        for code, status in S3_ERRORS
    }
    s3_answers["no connection"] = answers_of(s3_backend(lambda has_body: ConnectionResetError("reset")))
    table += "".join(rows_of("s3", s3_answers))
    parse = DefaultParser.parse_error
    redis_answers = {text.split(" ")[0]: answers_of(redis_backend(parse(text))) for text in REDIS_ERRORS}
    redis_answers["no connection"] = answers_of(redis_backend(ConnectionResetError("reset")))
    table += "".join(rows_of("redis", redis_answers))
    table += "".join(rows_of("mooncake", {str(code): answers_of(mooncake_backend(code)) for code in MOONCAKE_CODES}))
    with tempfile.TemporaryDirectory() as folder:
        answers = {errno.errorcode[number]: disk(number, Path(folder, str(number))) for number in DISK_ERRORS}
        answers |= disk_misses(Path(folder, "misses"))
    return table + "".join(rows_of("disk", answers))


class _Server(Backend):
    """Has a fault of one kind for all keys but WELL."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def contains(self, keys: Sequence[bytes], timeout: float | None) -> list[bool | Fault]:
        return [True if one == WELL else self._fault for one in keys]

    get = put = remove = contains  # type: ignore[assignment]


def kinds_table() -> str:
    """Return the table of what a kind does to a tier."""
    table = (
        "| Kind | The key | Other keys | Counted | Three calls in a row without an answer |\n|---|---|---|---|---|\n"
    )
    return table + "".join(f"| {kind} | {' | '.join(_effects(kind))} |\n" for kind in KINDS)


def _effects(kind: str) -> tuple[str, str, str, str]:
    def tier() -> RemoteTier:
        return RemoteTier(_Server(Fault(kind, kind)), options=RemoteOptions(cooldown=3600))  # type: ignore[arg-type]

    both = tier()
    sick, well = both.contains([SICK, WELL])
    counted = "yes" if both.stats().errors else "no"
    one, several = (_is_left_alone(tier(), keys) for keys in ([SICK] * 3, [key(n) for n in (5, 6, 7)]))
    opens = {(True, True): "open the breaker", (False, True): "open it, unless all ask for the same keys"}
    return "found" if sick else "a miss", "found" if well else "a miss", counted, opens.get((one, several), "do not")


def _is_left_alone(tier: RemoteTier, keys: Sequence[bytes]) -> bool:
    """Return whether the tier is not asked any more after a call for each of the keys."""
    for one in [*keys, WELL]:
        try:
            tier.contains([one])
            is_answered = True
        except TierError:
            is_answered = False
    return not is_answered


if __name__ == "__main__":
    print(kinds_table() + "\n" + errors_table(), end="")
