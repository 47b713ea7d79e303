"""RecordSummary: one record of a tier, by the fields of its head."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvpage.store.records.keys import decode_meta
from kvpage.store.records.record import BYTES_CODEC, INDEX_CODEC, STATE_CODEC, CorruptRecord
from kvpage.store.records.record_io import read_head
from kvpage.store.tiers.tier import Reader, RecordGone, RecordInfo, Tier


@dataclass(frozen=True, slots=True)
class RecordSummary:
    """One record of a tier.

    Attributes:
        key: hexadecimal.
        num_bytes: bytes of the record.
        model: the model's name, "(bytes)" for a record of a ByteStore; None if the head cannot be read.
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
        if head.codec == BYTES_CODEC:
            return RecordSummary(info.key.hex(), info.num_bytes, "(bytes)", b"", None, head.codec, "", age, tier)
        fields = decode_meta(head.meta)
        is_chunk = head.codec not in (STATE_CODEC, INDEX_CODEC)
        num_tokens = head.shape[3 if is_chunk and fields["fmt"] != "vllm" else 2]
    except (CorruptRecord, ValueError, KeyError):
        return RecordSummary(info.key.hex(), info.num_bytes, age=age, tier=tier)
    model, namespace, fmt = fields["model_name"], fields["namespace"], fields["fmt"]
    return RecordSummary(info.key.hex(), info.num_bytes, model, namespace, num_tokens, head.codec, fmt, age, tier)
