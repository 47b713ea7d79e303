"""The format of sealed records, read by an opener of its own; and records that are mended by somebody without a key."""

import hmac
import random
from dataclasses import replace

import numpy as np
import pytest
from support.seeds import seed_of
from support.store_records import key, record, trailer

from kvpage.store import SealKeys
from kvpage.store.records.record import CHECKSUM_BYTES, CorruptRecord, RecordHead
from kvpage.store.sealed.sealed_record import FRAME_BYTES, GRAIN_BYTES, NOTE, SealNote
from kvpage.store.sealed.sealed_tier import SealedTier
from kvpage.store.tiers.memory_tier import MemoryTier
from kvpage.store.tiers.stretches import runs_of

ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
SECRET, TAG = b"A" * 32, 16
KEYS = SealKeys((("a", SECRET),))
LONG = FRAME_BYTES + GRAIN_BYTES + 100  # of a payload with a whole frame, a short one and a trail


def sealed(whole: bytes, cuts: list[int], runs_at: int = -1) -> bytes:
    """Return the sealed record of one that is written in pieces between the cuts, the numbered one from memory."""
    tier = MemoryTier(8 << 20, pin_memory=False)
    outer = SealedTier(tier, KEYS)
    writer = outer.create(key(0), len(whole))
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(whole)], strict=True)):
        part = whole[begin:end]
        if number == runs_at:
            writer.write_runs(runs_of(part), FRAME_BYTES, 1)
        else:
            writer.piece(begin, end)[:] = part
    assert outer.commit([writer]) == [True]
    (reader,) = tier.open([key(0)])
    with reader:
        return bytes(reader.piece(0, reader.num_bytes))


def opened(value: bytes) -> bytes:
    """Return the record within, by the words of the format alone."""
    head = RecordHead.unpack(value, len(value))
    _, salt, plain_bytes, lead_bytes = NOTE.unpack_from(head.meta)
    header, at = value[: head.payload_begin], head.payload_begin
    aes = ciphers.AESGCM(hmac.digest(SECRET, b"kvpage seal 2" + salt + head.key, "sha256"))
    left, frames = (plain_bytes - lead_bytes) // GRAIN_BYTES * GRAIN_BYTES, []
    sizes = [min(FRAME_BYTES, left - begin) for begin in range(0, left, FRAME_BYTES)]
    for number, size in [*enumerate(sizes, 1), (0, plain_bytes - left)]:
        frames.append(aes.decrypt(number.to_bytes(12, "little"), value[at : at + size + TAG], header))
        at += size + TAG
    assert not any(value[at:-CHECKSUM_BYTES])
    return frames[-1][:lead_bytes] + b"".join(frames[:-1]) + frames[-1][lead_bytes:]


def found(value: bytes) -> bytes | str:
    """Return the record within, or why it is none, by piece and into memory."""
    tier = MemoryTier(8 << 20, pin_memory=False)
    with tier.create(key(0), len(value)) as writer:
        writer.piece(0, len(value))[:] = value
        tier.commit([writer])
    results = []
    for is_piece in (True, False):
        (reader,) = SealedTier(tier, KEYS).open([key(0)])
        with reader:
            try:
                to = np.zeros(reader.num_bytes, np.uint8)
                if is_piece:
                    to[:] = reader.piece(0, len(to))
                else:
                    reader.read_runs(0, runs_of(to), FRAME_BYTES, 1)
                results.append(to.tobytes())
            except CorruptRecord as error:
                results.append(error.reason)
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("payload", [0, 1, GRAIN_BYTES, FRAME_BYTES, FRAME_BYTES + 5000, LONG + FRAME_BYTES])
def test_a_record_is_what_the_format_says_however_it_is_written(payload):
    whole = record(key(0), payload)
    for cuts, runs_at in [([], -1), ([], 0), ([128], 1), ([128, len(whole) - 16], 1), ([1, len(whole) - 5], 0)]:
        value = sealed(whole, cuts, runs_at)
        assert opened(value) == whole and found(value) == whole


def mended(value: bytes, **changes) -> bytes:
    """Return a sealed record with other fields in its head, and the digests and checksum that need no key."""
    head = RecordHead.unpack(value, len(value))
    payload = value[head.payload_begin : head.payload_end]
    to = replace(head, **changes).pack()
    digests = bytes(len(value) - head.payload_end - CHECKSUM_BYTES)
    return to + payload + digests + trailer(to + digests, b"")


def spans(value: bytes) -> dict[str, tuple[int, int]]:
    """Return where the parts of a sealed record with a payload of LONG bytes are."""
    head = RecordHead.unpack(value, len(value))
    note = SealNote.of(head)
    at, parts = head.payload_begin, {}
    sizes = {"whole": FRAME_BYTES, "short": GRAIN_BYTES, "lead": note.lead_bytes, "trail": note.trail_bytes}
    for name, size in sizes.items():
        parts[name], at = (at, at + size), at + size
        if name != "lead":
            parts[f"tag after {name}"], at = (at, at + TAG), at + TAG
    assert note.body_bytes == FRAME_BYTES + GRAIN_BYTES and at <= head.payload_end
    return parts | {"digests": (head.payload_end, len(value) - CHECKSUM_BYTES)}


def test_a_flipped_bit_of_each_part_is_a_miss_whoever_mends_the_checksum():
    rng, value = random.Random(seed_of(1)), sealed(record(key(0), LONG), [192])
    assert mended(value) == value
    head = RecordHead.unpack(value, len(value))
    for begin, end in spans(value).values():
        for at in (begin, end - 1, rng.randrange(begin, end)):
            wrong = bytearray(value)
            wrong[at] ^= 1 << rng.randrange(8)
            to, table = wrong[: head.payload_begin], wrong[head.payload_end : -CHECKSUM_BYTES]
            wrong[-CHECKSUM_BYTES:] = trailer(bytes(to + table), b"")
            assert found(bytes(wrong)) == "seal"


def test_the_zeros_after_the_frames_are_zeros():
    """Frames may need less than the room that is kept for tags: nothing hides there."""
    value = sealed(record(key(0), 100), [])
    at = RecordHead.unpack(value, len(value)).payload_end - 1
    assert value[at] == 0 and found(value) == record(key(0), 100)
    assert found(value[:at] + b"\1" + value[at + 1 :]) == "seal"


def test_no_part_of_another_record_passes():
    """Not of the same key and length, whose salt is another one; nor frame 0 in the place of a frame."""
    ours, theirs = (sealed(record(key(0), LONG, seed), [192]) for seed in (1, 2))
    parts = spans(ours)
    for begin, end in (
        (parts["whole"][0], parts["tag after whole"][1]),
        (parts["short"][0], parts["tag after short"][1]),
        (parts["lead"][0], parts["tag after trail"][1]),
        (0, parts["whole"][0]),
    ):
        both = ours[:begin] + theirs[begin:end] + ours[end:]
        assert found(mended(both)) == "seal"


def note_of(value: bytes, magic: bytes | None = None, plain: int = 0, lead: int = 0) -> bytes:
    head = RecordHead.unpack(value, len(value))
    is_magic, salt, plain_bytes, lead_bytes = NOTE.unpack_from(head.meta)
    return NOTE.pack(magic or is_magic, salt, plain_bytes + plain, lead_bytes + lead) + head.meta[NOTE.size :]


def test_the_version_before_is_a_miss():
    """Its frames had other places: it is refused by its head, also where the seal could be mended."""
    value = sealed(record(key(0), 5000), [192])
    assert found(mended(value, meta=note_of(value, magic=b"kvpage-seal-1"))) == "damaged"


@pytest.mark.parametrize("lead", [-192, -1, 1, GRAIN_BYTES, FRAME_BYTES])
def test_a_lead_of_another_length_is_a_miss(lead):
    value = sealed(record(key(0), LONG), [192])
    assert found(mended(value, meta=note_of(value, lead=lead))) in ("seal", "damaged")


@pytest.mark.parametrize("num_cut", [1, CHECKSUM_BYTES, TAG, GRAIN_BYTES, FRAME_BYTES, FRAME_BYTES + TAG])
def test_a_cut_record_is_a_miss_also_with_a_head_of_its_length(num_cut):
    value = sealed(record(key(0), LONG), [192])
    assert found(value[:-num_cut]) == "damaged"
    head = RecordHead.unpack(value, len(value))
    plain_bytes = head.raw_bytes - num_cut
    note = replace(SealNote.of(head), plain_bytes=plain_bytes)
    to = note.head(key(0))
    begin = to.payload_begin
    digests = bytes(to.num_digest_bytes)
    cut = to.pack() + value[begin : begin + to.payload_bytes] + digests + trailer(to.pack() + digests, b"")
    assert found(cut) == "seal"
