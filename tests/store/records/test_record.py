"""RecordHead byte by byte: what stands where, which lengths are the last that go, and what is refused."""

import dataclasses

import pytest

from kvpage.store.records.record import MAX_META_BYTES, CorruptRecord, RecordHead, is_bytes, is_sealed

KEY = bytes(range(32))
HEAD = RecordHead(KEY, b"me", "bfloat16", (3, 2, 5, 7, 11), 4620, 4000, 1000)
LONGEST_META = 65536


def number(value: int, num_bytes: int) -> bytes:
    return value.to_bytes(num_bytes, "little")


def test_where_each_field_stands():
    packed = HEAD.pack()
    head = b"kvpagerc" + number(2, 4) + number(2, 4) + KEY + number(4000, 8) + number(4620, 8) + b"bfloat16" + bytes(8)
    head += b"".join(number(size, 4) for size in (3, 2, 5, 7, 11))
    assert packed == head + number(1000, 8) + bytes(4) + b"me" + bytes(14)


@pytest.mark.parametrize("num_meta, begin", [(0, 128), (1, 128), (15, 128), (16, 128), (17, 192), (80, 192), (81, 256)])
def test_the_payload_begins_at_a_multiple_of_64(num_meta, begin):
    head = dataclasses.replace(HEAD, meta=b"m" * num_meta)
    assert head.payload_begin == len(head.pack()) == begin
    assert head.pack()[112:] == b"m" * num_meta + bytes(begin - 112 - num_meta)


@pytest.mark.parametrize(
    "payload_bytes, num_digests", [(0, 0), (1, 1), (999, 1), (1000, 1), (1001, 2), (2000, 2), (2001, 3)]
)
def test_a_digest_for_each_stretch_and_a_checksum_at_the_end(payload_bytes, num_digests):
    head = dataclasses.replace(HEAD, payload_bytes=payload_bytes)
    assert head.payload_end == 128 + payload_bytes
    assert head.num_bytes == head.payload_end + 16 * num_digests + 16


@pytest.mark.parametrize(
    "change, message",
    [
        ({"key": b"k" * 31}, "key must be 32 bytes, got 31"),
        ({"key": b"k" * 33}, "key must be 32 bytes, got 33"),
        ({"meta": b"m" * (LONGEST_META + 1)}, "meta must be at most 65536 bytes, got 65537"),
        ({"codec": ""}, "codec must be 1 to 16 ASCII characters, got ''"),
        ({"codec": "c" * 17}, "codec must be 1 to 16 ASCII characters"),
        ({"codec": "ö"}, "codec must be 1 to 16 ASCII characters, got 'ö'"),
        ({"codec": "a\0b"}, "codec must be 1 to 16 ASCII characters"),
        ({"stretch_bytes": 0}, "stretch_bytes must be positive, got 0"),
        ({"stretch_bytes": -1}, "stretch_bytes must be positive, got -1"),
    ],
)
def test_fields_that_no_record_has(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HEAD, **change)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"meta": b""},
        {"meta": b"m" * 16},
        {"meta": b"m" * LONGEST_META},
        {"codec": "c"},
        {"codec": "c" * 16},
        {"codec": "index"},
        {"stretch_bytes": 1, "payload_bytes": 3},
        {"payload_bytes": 0, "raw_bytes": 0},
    ],
)
def test_what_is_packed_comes_back(change):
    head = dataclasses.replace(HEAD, **change)
    packed = head.pack()
    assert RecordHead.unpack(packed, head.num_bytes) == head
    assert RecordHead.unpack(memoryview(packed + b"payload"), head.num_bytes) == head
    assert MAX_META_BYTES == LONGEST_META


def test_every_flipped_bit_of_a_header_is_refused_or_another_head():
    packed = HEAD.pack()
    num_refused = 0
    for bit in range(8 * len(packed)):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert RecordHead.unpack(bytes(flipped), HEAD.num_bytes) != HEAD, bit
        except CorruptRecord:
            num_refused += 1
    assert num_refused >= 8 * (8 + 4 + 4 + 14)  # at least all of magic, version, the meta's length and the padding


@pytest.mark.parametrize("num_bytes", [0, 111, 112, 127])
def test_records_shorter_than_any(num_bytes):
    for data in (HEAD.pack(), HEAD.pack()[:num_bytes]):
        with pytest.raises(CorruptRecord, match=f"a record has at least 128 bytes, got {num_bytes}"):
            RecordHead.unpack(data, num_bytes)


@pytest.mark.parametrize("num_there", [0, 1, 111])
def test_less_than_a_header_of_a_record_that_is_said_to_be_whole(num_there):
    with pytest.raises(CorruptRecord, match="a record has at least 128 bytes"):
        RecordHead.unpack(HEAD.pack()[:num_there], HEAD.num_bytes)


@pytest.mark.parametrize("num_more", [-1, 1, 64])
def test_a_record_of_another_length_than_its_head_says(num_more):
    with pytest.raises(CorruptRecord):
        RecordHead.unpack(HEAD.pack(), HEAD.num_bytes + num_more)


def test_meta_that_reaches_beyond_what_is_there():
    packed = HEAD.pack()
    for num_meta, message in ((17, "meta of 17 bytes does not fit"), (LONGEST_META + 1, "meta of 65537 bytes does")):
        changed = packed[:12] + number(num_meta, 4) + packed[16:]
        with pytest.raises(CorruptRecord, match=message):
            RecordHead.unpack(changed, HEAD.num_bytes)
    longest = dataclasses.replace(HEAD, meta=b"m" * LONGEST_META).pack()
    too_long = longest[:12] + number(LONGEST_META + 1, 4) + longest[16:] + bytes(64)
    with pytest.raises(CorruptRecord, match="meta of 65537 bytes does not fit"):
        RecordHead.unpack(too_long, HEAD.num_bytes)


@pytest.mark.parametrize("place, byte", [(0, b"K"), (8, b"\1"), (8, b"\3")])
def test_another_magic_or_version(place, byte):
    packed = HEAD.pack()
    with pytest.raises(CorruptRecord, match="magic and version must be b'kvpagerc' and 2, got"):
        RecordHead.unpack(packed[:place] + byte + packed[place + 1 :], HEAD.num_bytes)


@pytest.mark.parametrize("codec", [b"\xff" * 16, b"a\0b".ljust(16, b"\0"), bytes(16)])
def test_a_codec_that_is_no_name(codec):
    packed = HEAD.pack()
    with pytest.raises(CorruptRecord, match="codec"):
        RecordHead.unpack(packed[:64] + codec + packed[80:], HEAD.num_bytes)


@pytest.mark.parametrize("codec, expected", [("bytes", True), ("bytes:plain:u1", True), ("bytesx", False), ("", False)])
def test_which_codecs_are_of_records_of_bytes(codec, expected):
    assert is_bytes(codec) is expected


@pytest.mark.parametrize("codec, expected", [("sealed", True), ("sealed2", False), ("bytes", False)])
def test_which_records_are_sealed(codec, expected):
    packed = dataclasses.replace(HEAD, codec=codec).pack()
    assert is_sealed(packed) is expected
    assert not is_sealed(b"KVPAGERC" + packed[8:])


def test_an_error_says_its_message_alone():
    assert str(CorruptRecord("the checksum is wrong", "foreign")) == "the checksum is wrong"
