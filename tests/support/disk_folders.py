"""Disk tiers of small segments, for tests."""

from pathlib import Path

from support.store_records import is_record

from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier

SEGMENT_BYTES = 32 * SLOT_BYTES


def make(path: Path, capacity: int = 4 * SEGMENT_BYTES, **fields) -> DiskTier:
    return DiskTier([path], capacity, segment_bytes=SEGMENT_BYTES, **fields)


def is_right(name: bytes, data: bytes | None) -> bool:
    """Check a record as every reader does: the key in the header, and the checksum."""
    return is_record(data, name)
