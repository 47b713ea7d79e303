"""Inspection of a tier: its records, their wholeness, and freeing space. `kvpage store ls|stat|verify|gc URL`."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvpage.store.config import KVStoreConfig, TierURL
from kvpage.store.disk.disk_tier import DiskTier
from kvpage.store.disk.disk_view import DiskView
from kvpage.store.disk.lock import DiskOwner
from kvpage.store.placement import paths_of, place_tiers, sealed
from kvpage.store.records.keys import decode_meta
from kvpage.store.records.record import (
    INDEX_CODEC,
    SEALED_CODEC,
    STATE_CODEC,
    CorruptRecord,
    UnreadableRecord,
    is_bytes,
)
from kvpage.store.records.record_io import read_head, verify_record
from kvpage.store.sealed.sealed_tier import SealedTier
from kvpage.store.tiers.tier import Reader, RecordGone, RecordInfo, Tier, TierError


@dataclass(frozen=True, slots=True)
class RecordSummary:
    """One record of a tier.

    Attributes:
        key: hexadecimal.
        num_bytes: bytes of the record.
        model: the model's name, "(bytes)" for a record of a ByteStore, "(sealed)" for one whose keys the URL does not
            name; None if the head cannot be read.
        namespace: of its tokens; None if the head cannot be read.
        num_tokens: tokens of the chunk, or before a state; None for a record of bytes.
        codec: the payload's dtype and codec; "state" and "state-index" for states and the index of their positions.
        fmt: "vllm" or "huggingface".
        age: seconds since the last use; None if the tier does not know.
        tier: the tier's name.
    """

    key: str
    num_bytes: int
    model: str | None = None
    namespace: bytes | None = None
    num_tokens: int | None = None
    codec: str | None = None
    fmt: str | None = None
    age: float | None = None
    tier: str | None = None

    @property
    def is_readable(self) -> bool:
        """Return whether the head could be read."""
        return self.model is not None


def summaries(tier: Tier) -> Iterator[RecordSummary]:
    """Walk over summaries of all records, except records that disappear meanwhile. Raises TierError."""
    now = time.time()
    for info in tier.infos():
        for reader in tier.open([info.key]):
            if reader is not None:
                with reader, suppress(RecordGone):
                    yield _summary(info, reader, now, tier.name)


def _summary(info: RecordInfo, reader: Reader, now: float, tier: str) -> RecordSummary:
    age = None if info.last_used is None else now - info.last_used
    try:
        head, _ = read_head(reader)
        if is_bytes(head.codec) or head.codec == SEALED_CODEC:
            return RecordSummary(
                info.key.hex(), info.num_bytes, f"({head.codec})", b"", None, head.codec, "", age, tier
            )
        fields = decode_meta(head.meta)
        is_chunk = head.codec not in (STATE_CODEC, INDEX_CODEC)
        num_tokens = head.shape[3 if is_chunk and fields["fmt"] != "vllm" else 2]
    except (CorruptRecord, UnreadableRecord, ValueError, KeyError):
        return RecordSummary(info.key.hex(), info.num_bytes, age=age, tier=tier)
    model, namespace, fmt = fields["model_name"], fields["namespace"], fields["fmt"]
    return RecordSummary(info.key.hex(), info.num_bytes, model, namespace, num_tokens, head.codec, fmt, age, tier)


def view_tier(url: str) -> Tier:
    """Return the tier of a URL, to look into. A disk is read beside the process that has it open, see DiskView.

    Raises ValueError or OSError, with the reason, if it cannot be opened.
    """
    parsed = TierURL.parse(url)
    return sealed(parsed, lambda: DiskView(paths_of(parsed))) if parsed.scheme == "disk" else open_tier(url)


def owners_of(tier: Tier) -> tuple[DiskOwner, ...]:
    """Return the processes that have a tier's directories open, of a sealed tier, too; none for other tiers."""
    within = tier.within if isinstance(tier, SealedTier) else tier
    return within.owners if isinstance(within, DiskView) else ()


def open_tier(url: str) -> Tier:
    """Return the tier of a URL, for this process alone.

    A disk's directories are opened as they are: whatever size the URL names, nothing is made or deleted. Raises
    ValueError or OSError, with the reason, if the tier cannot be opened: a server may have it open.
    """
    parsed = TierURL.parse(url)
    if parsed.scheme == "disk":
        return sealed(parsed, lambda: DiskTier(paths_of(parsed), None))
    return place_tiers(KVStoreConfig(tiers=(url,)))[0].tier


def verify(tier: Tier, progress: Callable[[int], object] = lambda count: None) -> tuple[int, list[bytes]]:
    """Return the number of whole records, and the keys of broken ones. That reads every byte.

    Records that the tier's owner removes meanwhile are neither, nor are sealed ones whose key is not here.
    """
    num_whole, broken = 0, []
    for info in list(tier.infos()):
        for reader in tier.open([info.key]):
            if reader is not None:
                with reader, suppress(RecordGone, UnreadableRecord):
                    if is_whole(reader, info.key):
                        num_whole += 1
                    else:
                        broken.append(info.key)
        progress(1)
    return num_whole, broken


def is_whole(reader: Reader, key: bytes) -> bool:
    """Return whether it is the whole record of the key. Raises RecordGone; UnreadableRecord without its key."""
    try:
        verify_record(reader, key)
    except RecordGone:
        raise
    except (CorruptRecord, TierError):
        return False
    return True


def free(tier: Tier, num_bytes: int) -> int:
    """Remove the least recently used records until `num_bytes` are free; return the number of records."""
    infos = sorted(tier.infos(), key=lambda info: info.last_used or 0.0)
    keys, total = [], 0
    for info in infos:
        if total >= num_bytes:
            break
        keys.append(info.key)
        total += info.num_bytes
    return tier.remove(keys)


def remove_older(tier: Tier, seconds: float) -> int:
    """Remove records that were not used for so long; return their number. Records of unknown age stay."""
    limit = time.time() - seconds
    return tier.remove([info.key for info in tier.infos() if info.last_used is not None and info.last_used < limit])


def by_model(records: list[RecordSummary]) -> list[tuple[str, int, int, int]]:
    """Return (model, records, tokens, bytes) of each model, the largest first."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        count = counts.setdefault(record.model if record.model is not None else "(unreadable)", Counter())
        count.update(records=1, tokens=record.num_tokens or 0, bytes=record.num_bytes)
    rows = [(model, count["records"], count["tokens"], count["bytes"]) for model, count in counts.items()]
    return sorted(rows, key=lambda row: -row[3])
