"""DiskWriter.write_runs: at every place of a slot, and when the disk does not take it."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from support.disk_faults import faulty, make
from support.store_records import get, key, put, write

from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier
from kvpage.store.disk.segment import HEADER_BYTES
from kvpage.store.tiers.memory_tier import MemoryTier
from kvpage.store.tiers.stretches import runs_of
from kvpage.store.tiers.tier import TierError, Writer

FIRST = SLOT_BYTES - HEADER_BYTES  # bytes in a record's first slot
DATA = np.random.default_rng(2).integers(0, 256, 10 * SLOT_BYTES, dtype=np.uint8).tobytes()
EDGES = (1, 127, FIRST - 1, FIRST, FIRST + 1, SLOT_BYTES, SLOT_BYTES + 1, 9000)


def begun(tier: DiskTier, data: bytes, num_before: int) -> Writer:
    """A writer of key 5 that has the first bytes."""
    writer = tier.create(key(5), len(data))
    assert writer is not None
    writer.piece(0, num_before)[:] = data[:num_before]
    return writer


def write_rest(writer: Writer, data: bytes, begin: int) -> bytes:
    return writer.write_runs(runs_of(memoryview(data)[begin:]), 1 << 20, 1)


@pytest.mark.parametrize("num_before", [0, *EDGES])
@pytest.mark.parametrize("num_in_runs", EDGES)
def test_every_place_in_a_slot(tmp_path: Path, num_before: int, num_in_runs: int) -> None:
    """What stands before, behind, and in the records around it stays as it was."""
    tier = make(tmp_path)
    around = {key(0): DATA[5:2000], key(1): DATA[9 : 3 * SLOT_BYTES], key(2): DATA[:5000]}
    assert put(tier, around) == [True] * 3
    tier.remove([key(1)])
    del around[key(1)]
    for num_behind in (0, 1, SLOT_BYTES):
        end = num_before + num_in_runs
        data = DATA[: end + num_behind]
        writer = tier.create(key(5), len(data))
        assert writer is not None
        write(writer, data, [0, num_before, end, len(data)], runs_at=1)
        assert tier.commit([writer]) == [True]
        assert get(tier, [key(5), *around]) == [data, *around.values()]
        tier.check()


@pytest.mark.parametrize("num_before", [0, 100, FIRST + 100])
def test_what_the_disk_refuses_can_be_repeated(tmp_path: Path, num_before: int) -> None:
    """The file system is full for the native writer, and has room again."""
    tier = make(tmp_path)
    writer = begun(tier, DATA, num_before)
    segment, full = writer.entry.space.segment, os.open("/dev/full", os.O_WRONLY)
    real, segment._fd = segment._fd, full
    with pytest.raises(TierError, match="No space left on device"):
        write_rest(writer, DATA, num_before)
    assert tier.stats().errors == 1
    segment._fd = real
    os.close(full)
    assert write_rest(writer, DATA, num_before) == xxhash.xxh3_128_digest(DATA[num_before:])
    assert tier.commit([writer]) == [True] and get(tier, [key(5)]) == [DATA]
    tier.check()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_after_an_error_it_can_be_given_up(tmp_path: Path, monkeypatch, error: int) -> None:
    """The former record of the key stays, and the room is free again."""
    tier = make(tmp_path)
    assert put(tier, {key(5): DATA[:9000]}) == [True]
    with begun(tier, DATA, 100) as writer:
        fails = faulty(monkeypatch, lambda name, arguments: name == "pwrite", error, half=True)
        with fails as fake, pytest.raises(TierError, match=os.strerror(error)):
            write_rest(writer, DATA, 100)
        assert fake.num_calls == 1, "the writes of runs cannot be made to fail"
    assert get(tier, [key(5)]) == [DATA[:9000]]
    tier.flush()
    tier.check()


def test_arguments(tmp_path: Path) -> None:
    """ValueError, and the writer is as it was."""
    tier = make(tmp_path)
    writer = begun(tier, DATA, 100)
    for begin, match in ((99, "must begin at 100 and end by"), (len(DATA), "runs must have bytes, got none")):
        with pytest.raises(ValueError, match=match):
            write_rest(writer, DATA, begin)
    with pytest.raises(ValueError, match="stretch_bytes must be positive, got 0"):
        writer.write_runs(runs_of(memoryview(DATA)[100:]), 0, 1)
    write_rest(writer, DATA, 100)
    assert tier.commit([writer]) == [True] and get(tier, [key(5)]) == [DATA]
    with pytest.raises(ValueError, match="must not be closed"):
        write_rest(writer, DATA, len(DATA) - 1)


def test_a_tier_that_takes_pieces_alone() -> None:
    writer = MemoryTier(1 << 20, pin_memory=False).create(key(0), 10)
    assert writer is not None and not writer.takes_runs
    with pytest.raises(NotImplementedError, match="takes pieces alone"):
        writer.write_runs(runs_of(memoryview(DATA)[:10]), 10, 1)
