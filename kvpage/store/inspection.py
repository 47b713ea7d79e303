"""Looking into a store: what lies there, whether it is whole, and making room. `kvpage store ls|stat|verify|gc URL`."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from kvpage.store.config import KVStoreConfig, TierURL
from kvpage.store.disk.disk_tier import DiskTier
from kvpage.store.disk.disk_view import DiskView
from kvpage.store.placement import paths_of, place_tiers
from kvpage.store.records.record import CorruptRecord
from kvpage.store.records.record_io import verify_record
from kvpage.store.records.summary import RecordSummary, summaries
from kvpage.store.tiers.tier import Reader, RecordGone, Tier, TierError

__all__ = [
    "RecordSummary",
    "by_model",
    "free",
    "is_whole",
    "open_tier",
    "remove_older",
    "summaries",
    "verify",
    "view_tier",
]


def view_tier(url: str) -> Tier:
    """The one tier of a URL, to look into: of a disk beside the process that has it open, if there is one, and without
    changing anything (see DiskView). ValueError or OSError, with the reason, if it cannot be opened.
    """
    parsed = TierURL.parse(url)
    return DiskView(paths_of(parsed)) if parsed.scheme == "disk" else open_tier(url)


def open_tier(url: str) -> Tier:
    """The one tier of a URL, for oneself. ValueError or OSError, with the reason, if it cannot be opened: a server may
    have it.

    Of a disk the directories are opened as they are: whatever size the URL names, nothing is made or deleted.
    """
    parsed = TierURL.parse(url)
    if parsed.scheme == "disk":
        return DiskTier(paths_of(parsed), None)
    return place_tiers(KVStoreConfig(tiers=(url,)))[0].tier


def verify(tier: Tier, progress: Callable[[int], object] = lambda count: None) -> tuple[int, list[bytes]]:
    """How many records are whole, and the keys of those that are not. Reads every byte. What is removed by the tier's
    owner meanwhile is neither.
    """
    num_whole, broken = 0, []
    for info in list(tier.infos()):
        for reader in tier.open([info.key]):
            if reader is not None:
                with reader, suppress(RecordGone):
                    if is_whole(reader, info.key):
                        num_whole += 1
                    else:
                        broken.append(info.key)
        progress(1)
    return num_whole, broken


def is_whole(reader: Reader, key: bytes) -> bool:
    """Whether it is the record of the key, to its last byte, and can be read. RecordGone."""
    try:
        verify_record(reader, key)
    except RecordGone:
        raise
    except (CorruptRecord, TierError):
        return False
    return True


def free(tier: Tier, num_bytes: int) -> int:
    """Removes the records that were not used for the longest time until so many bytes are gone; how many records."""
    infos = sorted(tier.infos(), key=lambda info: info.last_used or 0.0)
    keys, total = [], 0
    for info in infos:
        if total >= num_bytes:
            break
        keys.append(info.key)
        total += info.num_bytes
    return tier.remove(keys)


def remove_older(tier: Tier, seconds: float) -> int:
    """Removes records that were not used for so long; how many. Those whose age nobody knows stay."""
    limit = time.time() - seconds
    return tier.remove([info.key for info in tier.infos() if info.last_used is not None and info.last_used < limit])


def by_model(records: list[RecordSummary]) -> list[tuple[str, int, int, int]]:
    """(model, records, tokens, bytes) of each, the largest first."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        count = counts.setdefault(record.model if record.model is not None else "(unreadable)", Counter())
        count.update(records=1, tokens=record.num_tokens or 0, bytes=record.num_bytes)
    rows = [(model, count["records"], count["tokens"], count["bytes"]) for model, count in counts.items()]
    return sorted(rows, key=lambda row: -row[3])
