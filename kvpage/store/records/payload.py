"""Payloads of records: sources that write them, and sinks that take them.

Source   a chunk to be stored     fill(begin, buffer) ─► bytes and their digests
Sink     a chunk to be loaded     take(begin, piece)  ─► digests of the piece
"""

from collections.abc import Sequence
from typing import Protocol

from kvpage.store.records.record import Shape
from kvpage.store.tiers.stretches import Runs, copy_and_digest, digests_of, runs_of

ENCODED_STRETCH_BYTES = 1 << 20  # of payloads that a codec has written


class Source(Protocol):
    """A payload to be written. stretch_bytes: bytes of each of its stretches."""

    stretch_bytes: int

    @property
    def piece_ends(self) -> Sequence[int] | None:
        """The bytes at which pieces may end, ascending; None for each stretch's end."""

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        """Write the payload's stretches from the byte `begin` on into the buffer, and return their digests.

        streaming: write past the CPU's cache, since the bytes are not read soon.
        """

    def runs(self) -> Runs | None:
        """Return the memory of the whole payload, valid as long as the source.

        None if it is not in memory, or in runs so short that filling a buffer is better.
        """


class ShapedSource(Source, Protocol):
    """A chunk to be written. shape: of its payload."""

    shape: Shape


class Sink(Protocol):
    """A chunk to be loaded. stretch_bytes: bytes of each stretch of its payload."""

    stretch_bytes: int

    @property
    def piece_ends(self) -> Sequence[int] | None:
        """As of Source."""

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        """Take the wanted bytes of the stretches from the byte `begin` on, and return the stretches' digests.

        The bytes count only if the digests are right.
        """

    def runs(self) -> Runs | None:
        """Return the memory that takes the whole payload, valid as long as the sink.

        A run at address 0 stands for bytes that are not wanted. None if taking pieces is better.
        """


class EncodedPayload:
    """The output of a codec, as a source and a sink."""

    stretch_bytes = ENCODED_STRETCH_BYTES
    piece_ends = None

    def __init__(self, payload: memoryview) -> None:
        self.payload = payload

    def fill(self, begin: int, buffer: memoryview, num_threads: int, streaming: bool) -> bytes:
        data = self.payload[begin : begin + len(buffer)]
        return b"".join(
            copy_and_digest(buffer[at : at + self.stretch_bytes], data[at : at + self.stretch_bytes], streaming)
            for at in range(0, len(data), self.stretch_bytes)
        )

    def runs(self) -> Runs | None:
        return runs_of(self.payload)

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        digests = digests_of(piece, self.stretch_bytes, num_threads)
        self.payload[begin : begin + len(piece)] = piece
        return digests


class BytesSink:
    """Copies stretches into bytes; with None it only hashes them."""

    piece_ends = None

    def __init__(self, to: memoryview | None, stretch_bytes: int) -> None:
        self._to, self.stretch_bytes = to, stretch_bytes

    def runs(self) -> Runs | None:
        return None

    def take(self, begin: int, piece: memoryview, num_threads: int) -> bytes:
        if self._to is None:
            return digests_of(piece, self.stretch_bytes, num_threads)
        size = self.stretch_bytes
        runs = range(0, len(piece), size)
        return b"".join(copy_and_digest(self._to[at : at + size], piece[at : at + size]) for at in runs)
