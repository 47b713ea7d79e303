"""S3Backend: one object for each record, in S3 or a server with its protocol: a large, cold tier.

    s3://bucket/some/prefix?endpoint_url=https://host:9000&region=eu-central-1

The object's name is the prefix, "/" and the record's key in hexadecimal. Credentials come from where boto3 looks for
them, never from the URL. S3 has batches of removals only, so several objects are requested at once.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from kvpage.store.remote.backend import Backend
from kvpage.store.remote.options import MIN_RECORD_BYTES, RemoteOptions, integer
from kvpage.store.remote.remote_tier import RemoteTier
from kvpage.store.tiers.tier import Key, RecordInfo

T = TypeVar("T")
K = TypeVar("K")
MAX_REMOVED = 1000  # objects a removal, by the protocol
CONNECT_SECONDS, READ_SECONDS = 5, 20  # of abandoned threads: a call's own deadline is the tier's
MISSING = frozenset({"404", "NoSuchKey", "NotFound"})


class S3Backend(Backend):
    """Records in a bucket. client: of boto3. max_value_bytes: of an object to fetch. num_threads: of one call."""

    def __init__(
        self,
        client: Any,
        bucket: str,
        prefix: str = "kvpage",
        *,
        max_value_bytes: int = 256 << 20,
        num_threads: int = 8,
    ) -> None:
        if max_value_bytes < 1:
            raise ValueError(f"max_value_bytes must be positive, got {max_value_bytes}")
        if num_threads < 1:
            raise ValueError(f"num_threads must be positive, got {num_threads}")
        self._client, self._bucket, self._prefix = client, bucket, prefix.strip("/") + "/"
        self._max_value_bytes, self._num_threads = max_value_bytes, num_threads

    def get(self, keys: Sequence[Key], timeout: float | None) -> Sequence[object]:
        return self._each(self._get, keys, timeout)

    def put(self, items: Sequence[tuple[Key, memoryview]], timeout: float | None) -> Sequence[bool]:
        return self._each(self._put, items, timeout)

    def contains(self, keys: Sequence[Key], timeout: float | None) -> Sequence[bool]:
        """Compare lengths, too: an object that cannot be a record counts as missing, so that it is replaced."""
        return self._each(self._contains, keys, timeout)

    def remove(self, keys: Sequence[Key], timeout: float | None) -> int:
        """Remove objects. S3 does not report which were there, so they are counted before."""
        there = self._each(lambda key: self._length(key) is not None, keys, timeout)
        self._remove([self._name(key) for key in keys])
        return sum(there)

    def infos(self) -> Iterator[RecordInfo]:
        pattern = re.compile(re.escape(self._prefix) + "[0-9a-f]{64}")
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        for page in pages:
            for item in page.get("Contents", ()):
                if pattern.fullmatch(item["Key"]):
                    yield RecordInfo(bytes.fromhex(item["Key"].removeprefix(self._prefix)), item["Size"])

    def clear(self) -> None:
        """Remove the objects under the prefix that are named like records."""
        self._remove([self._name(info.key) for info in self.infos()])

    def close(self) -> None:
        self._client.close()

    def _name(self, key: Key) -> str:
        return self._prefix + key.hex()

    def _get(self, key: Key) -> object:
        """Return the object; b"", which is not a record, if it is too long; None if it is missing."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
        except self._client.exceptions.ClientError as error:
            if _is_missing(error):
                return None
            raise
        with answer["Body"] as body:
            return b"" if answer["ContentLength"] > self._max_value_bytes else body.read()

    def _put(self, item: tuple[Key, memoryview]) -> bool:
        self._client.put_object(Bucket=self._bucket, Key=self._name(item[0]), Body=bytes(item[1]))
        return True

    def _contains(self, key: Key) -> bool:
        length = self._length(key)
        return length is not None and MIN_RECORD_BYTES <= length <= self._max_value_bytes

    def _length(self, key: Key) -> int | None:
        try:
            length: int = self._client.head_object(Bucket=self._bucket, Key=self._name(key))["ContentLength"]
            return length
        except self._client.exceptions.ClientError as error:
            if _is_missing(error):
                return None
            raise

    def _remove(self, names: Sequence[str]) -> None:
        for i in range(0, len(names), MAX_REMOVED):
            objects = [{"Key": name} for name in names[i : i + MAX_REMOVED]]
            answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            if failed := answer.get("Errors"):
                raise OSError(f"{len(failed)} objects were not removed: {failed[0].get('Code')}")

    def _each(self, function: Callable[[K], T], items: Sequence[K], timeout: float | None) -> list[T]:
        """Call the function for each item on a few threads, which stop once time is up or a call has failed."""
        end = None if timeout is None else monotonic() + timeout
        results: dict[int, T] = {}
        errors: list[Exception] = []
        left = iter(range(len(items)))  # next() of it is atomic

        def work() -> None:
            for i in left:
                if errors or (end is not None and monotonic() > end):
                    return
                try:
                    results[i] = function(items[i])
                except Exception as error:  # raised below, where it belongs
                    errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self._num_threads, len(items)) - 1)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if len(results) < len(items):
            raise TimeoutError(f"{len(results)} of {len(items)} objects within {timeout} s")
        return [results[i] for i in range(len(items))]


def from_url(url: str) -> RemoteTier:
    """Return the tier of a URL (above), which is not connected yet.

    Options: endpoint_url, region, num_threads, and those of `RemoteOptions.take`. Raises ValueError for another URL.
    """
    parts = urlsplit(url)
    options, rest = RemoteOptions.take(dict(parse_qsl(parts.query, keep_blank_values=True)))
    if parts.scheme != "s3" or not parts.hostname or "@" in parts.netloc:
        raise ValueError(f"an s3 URL must be s3://bucket/prefix, got {parts.scheme}://{parts.hostname or ''}")
    endpoint, region = rest.pop("endpoint_url", None), rest.pop("region", None)
    num_threads = integer("num_threads", rest.pop("num_threads", "8"))
    if rest:
        raise ValueError(f"options must be known, got {', '.join(sorted(rest))}")
    backend = S3Backend(
        _client(endpoint, region, options.max_calls * num_threads),
        parts.netloc,
        unquote(parts.path).strip("/") or "kvpage",
        max_value_bytes=options.max_value_bytes,
        num_threads=num_threads,
    )
    return RemoteTier(backend, "s3", options)


def _client(endpoint: str | None, region: str | None, num_connections: int) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ImportError("the s3 tier needs the package boto3: pip install 'kvpage[s3]'") from error
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"total_max_attempts": 1},  # a miss is cheaper than waiting
        max_pool_connections=num_connections,
        request_checksum_calculation="when_required",  # a record has its own
        response_checksum_validation="when_required",
    )
    return boto3.session.Session().client("s3", endpoint_url=endpoint, region_name=region, config=config)


def _is_missing(error: Any) -> bool:
    """Return whether a ClientError of botocore reports a missing object."""
    return error.response["Error"]["Code"] in MISSING
