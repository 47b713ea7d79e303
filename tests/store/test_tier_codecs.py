"""Codecs by tier: memory stays raw, a slower tier's records are coded; hostile and unknown ones are misses."""

import pytest
import torch
from support.byte_stores import HEADER, data_of, key_of, room
from support.insides import entries_of, names_of, slab_of, stack_of
from support.store_kv import C, kv_of, make, same

from kvpage.store import ByteStore, ByteStoreConfig, KVStoreConfig, Placed
from kvpage.store.bytes.byte_jobs import ByteKeys
from kvpage.store.placement import place_tiers
from kvpage.store.records.record import BYTES_CODEC, CorruptRecord, RecordHead
from kvpage.store.records.record_io import EncodedPayload, recoded, write_record
from kvpage.store.tiers.memory_tier import MemoryTier

TOKENS = list(range(2 * C * 64))
SIZE = 1 << 16


def tiers_of(way: str | None, **second) -> list[Placed]:
    tiers = [MemoryTier(1 << 22, pin_memory=False, name=name) for name in ("fast", "slow")]
    return [Placed(tiers[0]), Placed(tiers[1], codec=way, **second)]


def slow_down(store, num_bytes: int = 64 << 20, seconds: float = 1.0) -> None:
    """Have the second tier's reads measured: so many bytes in so many seconds."""
    stack_of(store)._uses[1].note_hit(num_bytes, seconds)


def record_bytes(placed: Placed) -> int:
    return sum(info.num_bytes for info in placed.tier.infos())


@pytest.mark.parametrize("is_written_back", [False, True])
def test_a_tier_has_records_as_it_asks_and_each_gives_what_was_stored(is_written_back):
    placed = tiers_of("split", is_written_back=is_written_back)
    store, kv = make(tiers=placed, dtype=torch.bfloat16, chunk_size=C * 64), kv_of(TOKENS, dtype=torch.bfloat16)
    store.store(TOKENS, kv)
    store.flush()
    assert record_bytes(placed[0]) > kv.nbytes and record_bytes(placed[1]) < kv.nbytes / 1.3
    assert same(store.retrieve(TOKENS)[0], kv)
    placed[0].tier.clear()
    assert same(store.retrieve(TOKENS)[0], kv)
    assert record_bytes(placed[0]) == record_bytes(placed[1])  # a copy in a faster tier stays as it is
    assert same(store.retrieve(TOKENS)[0], kv)


def test_a_tier_may_be_raw_in_a_store_with_a_codec_and_floats_of_32_bits_always_are():
    placed = tiers_of("raw")
    store, kv = make(tiers=placed, dtype=torch.bfloat16, chunk_size=C * 64, codec="split"), kv_of(TOKENS).bfloat16()
    store.store(TOKENS, kv)
    assert record_bytes(placed[0]) < kv.nbytes / 1.3 < kv.nbytes < record_bytes(placed[1])
    placed, kv = tiers_of("split"), kv_of(TOKENS)
    make(tiers=placed, chunk_size=C * 64).store(TOKENS, kv)
    assert record_bytes(placed[0]) == record_bytes(placed[1]) > kv.nbytes


@pytest.mark.parametrize(
    "num_bytes, seconds, is_coded",
    [(64 << 20, 1.0, True), ((64 << 20) - 1, 1.0, False), (64 << 20, 0.001, False), (64 << 20, 0.0201, True)],
)
def test_auto_codes_where_reads_are_measured_and_slow(num_bytes, seconds, is_coded):
    placed = tiers_of("auto")
    store, kv = make(tiers=placed, dtype=torch.bfloat16, chunk_size=C * 64), kv_of(TOKENS, dtype=torch.bfloat16)
    slow_down(store, num_bytes, seconds)
    store.store(TOKENS, kv)
    assert (record_bytes(placed[1]) < kv.nbytes) == is_coded
    placed[0].tier.clear()
    assert same(store.retrieve(TOKENS)[0], kv)


def test_urls_name_the_codec_and_a_disk_decides_by_itself(tmp_path):
    urls = ("memory://?size=1MiB", f"disk:{tmp_path}/a?size=1MiB&segment=1MiB",
            f"disk:{tmp_path}/b?size=1MiB&segment=1MiB&codec=split", "memory://?size=1MiB&codec=zstd")  # fmt: skip
    placed = place_tiers(KVStoreConfig(tiers=urls))
    assert [each.codec for each in placed] == [None, "auto", "split", "zstd"]
    for each in placed:
        each.tier.close()
    with pytest.raises(ValueError, match="codec of a tier must be one of auto, raw, zstd, split, got 'lz4'"):
        place_tiers(KVStoreConfig(tiers=("memory://?size=1MiB&codec=lz4",)))


def byte_store(placed: list[Placed], dtype: str | None = "bfloat16") -> ByteStore:
    return ByteStore(ByteStoreConfig(num_threads=1, dtype=dtype), HEADER, placed)


def test_records_of_bytes_are_coded_by_the_dtype_that_the_store_was_told():
    placed = tiers_of("split")
    numbers = torch.randn(SIZE // 2, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint8)
    data = {key_of(0): numbers.numpy().tobytes(), key_of(1): data_of(1, SIZE), key_of(2): data_of(2, SIZE - 1)}
    data[key_of(3)] = b"\x01"
    store, keys, values = byte_store(placed), list(data), list(data.values())
    assert all(store.put(keys, values)) and store.put([key_of(4)], [b""]) == [True]
    slow = {info.key: info.num_bytes for info in placed[1].tier.infos()}
    sizes = [slow[name] for name in names_of(store, keys)]
    assert sizes[0] < SIZE / 1.3 and SIZE < sizes[1] < 1.005 * SIZE + 512 and SIZE <= sizes[2] < SIZE + 512
    placed[0].tier.clear()
    rooms = [room(len(value)) for value in values]
    assert store.get_into(keys, rooms) == [True] * 4 and [bytes(each) for each in rooms] == values
    for other in (None, "float16"):  # another codec: a miss, counted, and the record stays for others
        elsewhere, to = byte_store([placed[1]], other), room(SIZE)
        assert elsewhere.get_into(keys[:1], [to]) == [False] and elsewhere.stats().refused == {"codec": 1}
    assert byte_store([placed[1]]).get_into(keys[:1], rooms[:1]) == [True]
    with pytest.raises(ValueError, match="dtype must be one of torch's"):
        byte_store(placed, "bf16")


def test_damage_of_a_coded_record_is_a_miss_at_every_byte_of_its_payload():
    placed = tiers_of("split")
    numbers = torch.randn(2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    data, tier = numbers.view(torch.uint8).numpy().tobytes(), placed[1].tier
    store = byte_store(placed[1:])
    (name,) = names_of(store, [key_of(0)])
    for at in range(0, 3000, 37):
        store.put([key_of(0)], [data], skip_existing=False)
        slab_of(tier)[entries_of(tier)[name].begin * 4096 + at] ^= 1 << (at % 8)
        to = room(len(data))
        if store.get_into([key_of(0)], [to]) == [True]:
            assert bytes(to) == data
        else:
            assert not tier.contains([name])[0]
    assert store.stats().refused["damaged"] > 60


@pytest.mark.parametrize("num_bytes", [SIZE // 2, 2 * SIZE])
def test_a_raw_record_of_another_length_is_not_recoded(num_bytes):
    """A record with right digests, as a broken writer makes it: a copy must not make it a good one."""
    kind = ByteKeys(b"meta", torch.bfloat16).kind(bytes(32), SIZE)
    payload = EncodedPayload(memoryview(bytearray(num_bytes)))
    head = RecordHead(kind.key, kind.meta, BYTES_CODEC, kind.shape, SIZE, num_bytes, payload.stretch_bytes)
    tier = MemoryTier(1 << 22, pin_memory=False)
    with tier.create(kind.key, head.num_bytes) as writer:
        write_record(writer, head, payload)
        assert tier.commit([writer]) == [True]
    (reader,) = tier.open([kind.key])
    with reader, pytest.raises(CorruptRecord, match="is not 65536 raw ones"):
        recoded(reader, kind, "split")


@pytest.mark.parametrize(
    ("url", "message"),
    [("memory://?size=1MiB&codec=zstd", "raw, split or auto"), ("memory://?size=1MiB&codec=split", "dtype must be")],
)
def test_a_codec_that_records_of_bytes_cannot_have_is_refused(url, message):
    with pytest.raises(ValueError, match=message):
        ByteStoreConfig(tiers=(url,))
