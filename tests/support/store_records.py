"""Records and keys for tests of tiers, and the faults found in them."""

import hashlib
import random

import numpy as np
import xxhash

from kvpage.store.records.record import CorruptRecord, RecordHead
from kvpage.store.tiers.stretches import runs_of
from kvpage.store.tiers.tier import Reader, Tier, Writer

META = b"who wrote it"
STRETCH = 1 << 20  # of the payloads of records: one digest, 16 bytes, for most


def key(i: int) -> bytes:
    return hashlib.sha256(b"%d" % i).digest()


def record(name: bytes, payload_bytes: int = 1000, seed: int = 0) -> bytes:
    """A whole record, right to the last byte."""
    payload = random.Random(seed).randbytes(payload_bytes)
    shape = (1, 2, 1, 1, payload_bytes // 4)
    head = RecordHead(name, META, "bfloat16", shape, payload_bytes, payload_bytes, STRETCH)
    return head.pack() + payload + trailer(head.pack(), payload)


def trailer(head: bytes, payload: bytes, stretch: int = STRETCH) -> bytes:
    """Digests and checksum, by the package xxhash."""
    runs = [payload[at : at + stretch] for at in range(0, len(payload), stretch)]
    digests = b"".join(map(xxhash.xxh3_128_digest, runs))
    return digests + xxhash.xxh3_128_digest(head + digests)


def is_record(data: bytes | None, name: bytes) -> bool:
    """Return whether it is a whole one of `record`, of any length."""
    if data is None or data[16:48] != name:
        return False
    try:
        head = RecordHead.unpack(data, len(data))
    except CorruptRecord:
        return False
    payload = data[head.payload_begin : head.payload_end]
    return data[head.payload_end :] == trailer(data[: head.payload_begin], payload)


def put(tier: Tier, records: dict[bytes, bytes], timeout: float | None = None) -> list[bool]:
    """Each in three pieces, of which the last may be a run, all in one commit."""
    writers = []
    for name, data in records.items():
        writer = tier.create(name, len(data))
        assert writer is not None
        cuts = [0, len(data) // 3, len(data) // 3 + 1, len(data)]
        write(writer, data, cuts, runs_at=2 if name[0] % 2 else None)
        writers.append(writer)
    return tier.commit(writers, timeout)


def write(writer: Writer, data: bytes, cuts: list[int], runs_at: int | None = None) -> None:
    """A record in pieces, the one of number `runs_at` in runs, from its place in memory, if the writer takes any."""
    for number, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        if number == runs_at and writer.takes_runs and begin < end:
            middle = (begin + end) // 2
            runs = np.concatenate([runs_of(memoryview(data)[begin:middle]), runs_of(memoryview(data)[middle:end])])
            assert writer.write_runs(runs, end - begin, 1) in (None, xxhash.xxh3_128_digest(data[begin:end]))
        else:
            writer.piece(begin, end)[:] = data[begin:end]


def get(tier: Tier, names: list[bytes], timeout: float | None = None) -> list[bytes | None]:
    readers = tier.open(names, timeout)
    return [None if reader is None else read(reader) for reader in readers]


def read(reader: Reader) -> bytes:
    with reader:
        middle = reader.num_bytes // 2
        return bytes(reader.piece(0, middle)) + bytes(reader.piece(middle, reader.num_bytes))
