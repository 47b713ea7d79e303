"""How near do records to and from the disk tier come to writing and reading as many bytes?

The bound is the operating system's page cache: one pwrite of a record's bytes into a preallocated file, one preadv into
one buffer of the record's size, measured in the same run, alternating with the tier. Storing is all that a record
takes: pieces are filled from memory (a copy), hashed with xxh3-128, written, and committed; retrieving is opening,
reading the pieces, hashing them and copying them out. Both sides run in one thread. What is retrieved is compared
before anything is timed. The disk itself is not in it: it writes later, at its own pace.

Beside it: opening a tier of 100 GiB (its headers alone are real, the files are sparse), and the calls that a small
record takes in a full tier. Targets: records of 32 MiB at 0.8 of the bound, opening under a second.
"""

import functools
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from kvpage.benchmarks.bench_store import speed_row
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import PATH, finish, parse
from kvpage.store.disk.disk_tier import SEGMENT_BYTES, SLOT_BYTES, DiskTier
from kvpage.store.disk.segment import HEADER_BYTES, Run, Segment

MIB = 1 << 20
RECORD_BYTES = (MIB // 4, 2 * MIB, 32 * MIB)
PIECES = (MIB // 4, MIB // 2, MIB)
COLUMNS = "{operation:<12} {MiB:>6.2f} {piece KiB:>9} {GB/s:>17.2f} {bound GB/s:>17.2f} {of bound:>17.2f}"
FULL_BYTES, FULL_RECORD = 100 << 30, 32 * MIB


def key(n: int) -> bytes:
    return hashlib.sha256(b"%d" % n).digest()


def store(tier: DiskTier, name: bytes, source: memoryview, piece_bytes: int) -> bytes:
    """Store a record and return the checksum of its bytes."""
    checksum = xxhash.xxh3_128()
    writer = tier.create(name, len(source))
    assert writer is not None
    with writer:
        for begin in range(0, len(source), piece_bytes):
            end = min(begin + piece_bytes, len(source))
            piece = writer.piece(begin, end)
            piece[:] = source[begin:end]
            checksum.update(piece)
        assert tier.commit([writer]) == [True]
    return checksum.digest()


def retrieve(tier: DiskTier, name: bytes, into: memoryview, piece_bytes: int) -> bytes:
    checksum = xxhash.xxh3_128()
    (reader,) = tier.open([name])
    assert reader is not None
    with reader:
        for begin in range(0, len(into), piece_bytes):
            end = min(begin + piece_bytes, len(into))
            piece = reader.piece(begin, end)
            checksum.update(piece)
            into[begin:end] = piece
    return checksum.digest()


def measure(path: Path, num_bytes: int, piece_bytes: int, rounds: int) -> list[Row]:
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8).data
    into, plain = np.zeros(num_bytes, np.uint8).data, np.zeros(num_bytes, np.uint8).data
    num_records = max(4 * 32 * MIB // num_bytes, 4)
    size = 2 * num_records * num_bytes
    tier = DiskTier([path / "tier"], size, segment_bytes=size)
    fd = os.open(path / "plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, num_records * num_bytes)
    calls: dict[str, Callable[[int], object]] = {  # each takes the number of a record
        "pwrite": lambda n: os.pwrite(fd, source, n * num_bytes),
        "store": lambda n: store(tier, key(n), source, piece_bytes),
        "preadv": lambda n: os.preadv(fd, [plain], n * num_bytes),
        "retrieve": lambda n: retrieve(tier, key(n), into, piece_bytes),
    }
    for n in range(num_records):  # every page is in the cache
        os.pwrite(fd, source, n * num_bytes)
        digest = store(tier, key(n), source, piece_bytes)
        assert retrieve(tier, key(n), into, piece_bytes) == digest and into == source, "not what was stored"
    store(tier, key(0), source, piece_bytes)
    turns = {name: map(call, itertools.cycle(range(num_records))) for name, call in calls.items()}
    taken = in_turns({name: functools.partial(next, turn) for name, turn in turns.items()}, rounds)
    tier.check()
    tier.close()
    os.close(fd)
    for file in (path / "plain", *(path / "tier").iterdir()):
        file.unlink()
    rows = [
        speed_row(name, num_bytes, taken[name], bound, taken[bound])
        for name, bound in (("store", "pwrite"), ("retrieve", "preadv"))
    ]
    return [{**row, "MiB": num_bytes / MIB, "piece KiB": piece_bytes // 1024} for row in rows]


def opening(path: Path, rounds: int) -> Row:
    """Measure the opening of segments that are full of large records, as their headers say; their bytes are holes."""
    num_slots, number = SEGMENT_BYTES // SLOT_BYTES, 0
    folder = path / "full"
    folder.mkdir()
    (folder / "lock").touch()
    real, os.posix_fallocate = os.posix_fallocate, lambda fd, offset, size: os.ftruncate(fd, offset + size)
    try:
        for file in range(FULL_BYTES // SEGMENT_BYTES):
            segment = Segment.create(folder / f"{file:04}.segment", SLOT_BYTES, num_slots)
            slot, count = 1, segment.slots_for(FULL_RECORD - HEADER_BYTES)
            while slot + count <= num_slots:
                number += 1
                segment.mark(Run(slot, count, number, FULL_RECORD - HEADER_BYTES, time.time(), key(number)))
                slot += count
            if slot < num_slots:
                segment.mark(Run(slot, num_slots - slot))
            segment.close()
    finally:
        os.posix_fallocate = real
    taken = []
    for _ in range(rounds):
        before = time.perf_counter()
        tier = DiskTier([folder], None)
        taken.append(time.perf_counter() - before)
        assert tier.stats().num_records == number
        tier.close()
    for left in folder.iterdir():
        left.unlink()
    return {"operation": "open 100 GiB", "records": number, "ms": Figure.of(taken, 1e3)}


def small_calls(path: Path, rounds: int) -> list[Row]:
    """Microseconds of each call, in a tier that is full: every create evicts."""
    tier = DiskTier([path / "small"], 64 * MIB)
    data = bytes(8000)
    num_records = 2 * 64 * MIB // (2 * SLOT_BYTES)
    times: dict[str, list[float]] = {"create": [], "fill and commit": [], "open and close": []}
    for number in range(num_records + 1000 * rounds):
        before = time.perf_counter()
        writer = tier.create(key(number), len(data))
        created = time.perf_counter()
        assert writer is not None
        with writer:
            writer.piece(0, len(data))[:] = data
            tier.commit([writer])
        committed = time.perf_counter()
        (reader,) = tier.open([key(number)])
        assert reader is not None
        reader.close()
        opened = time.perf_counter()
        if number >= num_records:
            for name, seconds in zip(times, (created - before, committed - created, opened - committed), strict=True):
                times[name].append(seconds)
    assert tier.stats().evicted > num_records // 2
    tier.close()
    return [{"operation": f"{name}, 8 KB", "us": Figure.of(seconds, 1e6)} for name, seconds in times.items()]


def each_result(path: Path, rounds: int) -> Iterator[Row]:
    for num_bytes, piece_bytes in itertools.product(RECORD_BYTES, PIECES):
        most = rounds * max(1, min(20, 32 * MIB // num_bytes))
        for row in measure(path, num_bytes, min(piece_bytes, num_bytes), most):
            yield row | {"piece KiB": piece_bytes // 1024}


def main() -> None:
    options = parse("store_disk", __doc__, rounds=15, path=PATH)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        moved = shown(COLUMNS, each_result(Path(folder), options.rounds))
        others = [*small_calls(Path(folder), options.rounds), opening(Path(folder), 5)]
    shown("{operation:<28} {us:>20.1f} {ms:>18.1f} {records:>8}", others)
    labels = {"xscale": "log", "xlabel": "record, MiB", "ylabel": "speed, in plain pwrites or preads", "lines": [0.8]}
    by = ("operation", "piece KiB")
    finish(options, lambda path: curves(path, moved, "MiB", ["of bound"], by, **labels), results=[*moved, *others])


if __name__ == "__main__":
    main()
