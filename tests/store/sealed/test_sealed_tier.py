"""Sealed records in tiers of every kind: rotation, lost keys, records in the place of others, and every wrong byte."""

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.seeds import seed_of
from support.store_engines import TOKENS as ENGINE_TOKENS
from support.store_engines import C as ENGINE_CHUNK
from support.store_engines import make_engine, tokens_of
from support.store_kv import KV, TOKENS, C, kv_of, make, same
from support.store_records import get, key, put, record, trailer
from support.store_states import found, state_of, store_and_states
from support.tier_life import TierLife

from kvpage.store import ByteStore, ByteStoreConfig, KVStore, KVStoreConfig, Placed, SealKeys, metadata_of
from kvpage.store.disk.disk_tier import DiskTier
from kvpage.store.disk.reader_writer import STAGING_BYTES, Buffers
from kvpage.store.disk.shared_disk import SharedDisk
from kvpage.store.inspection import verify
from kvpage.store.records.record import CorruptRecord, RecordHead, UnreadableRecord, is_sealed
from kvpage.store.records.record_io import BytesSink, copy_record, verify_record
from kvpage.store.remote.backend import Backend
from kvpage.store.remote.options import RemoteOptions
from kvpage.store.remote.remote_tier import RemoteTier
from kvpage.store.sealed.sealed_reader import SHORT_BYTES, SealedReader
from kvpage.store.sealed.sealed_record import FRAME_BYTES, GRAIN_BYTES, NOTE, SealNote
from kvpage.store.sealed.sealed_tier import SealedTier
from kvpage.store.tiers.memory_tier import MemoryTier
from kvpage.store.tiers.tier import Reader

pytest.importorskip("cryptography")
A, B = ("a", b"A" * 32), ("b", b"B" * 32)
KEYS = SealKeys((A,))
SIZES = [
    0,
    1,
    GRAIN_BYTES,
    FRAME_BYTES - 1,
    FRAME_BYTES,
    FRAME_BYTES + 1,
    2 * FRAME_BYTES + 400_000,
    5 * FRAME_BYTES + 7,
]


class Values(Backend):
    """A server, whose values anybody may change."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def get(self, keys, timeout):
        return [self.values.get(name) for name in keys]

    def put(self, items, timeout):
        self.values |= {name: bytes(value) for name, value in items}
        return [True] * len(items)

    def contains(self, keys, timeout):
        return [name in self.values for name in keys]

    def remove(self, keys, timeout):
        return sum(self.values.pop(name, None) is not None for name in keys)


def remote(values: Values, keys: SealKeys = KEYS, **options) -> SealedTier:
    return SealedTier(RemoteTier(values, options=RemoteOptions(**options)), keys)


def tier_of(kind: str, path) -> SealedTier:
    if kind == "disk":
        return SealedTier(DiskTier([path], 64 << 20, segment_bytes=16 << 20), KEYS)
    if kind == "memory":
        return SealedTier(MemoryTier(64 << 20, pin_memory=False), KEYS)
    return remote(Values(), mac_key=b"m" * 32 if kind == "remote with a MAC" else None)


@pytest.mark.parametrize("kind", ["memory", "disk", "remote", "remote with a MAC"])
def test_what_goes_in_comes_out(kind, tmp_path):
    if "MAC" in kind:
        pytest.importorskip("blake3")
    tier = tier_of(kind, tmp_path)
    data = {key(i): record(key(i), size, seed=i) for i, size in enumerate(SIZES)}
    assert put(tier, data) == [True] * len(data)
    assert tier.contains([*data, b"n" * 32]) == [True] * len(data) + [False]
    assert get(tier, [*data, b"n" * 32]) == [*data.values(), None]
    for name, whole in data.items():
        (reader,) = tier.open([name])
        with reader:
            verify_record(reader, name)
            for begin, end in [(0, 0), (0, 1), (5, len(whole)), (len(whole) - 17, len(whole)), (100, 140)]:
                assert bytes(reader.piece(begin, end)) == whole[begin:end]
            with pytest.raises(ValueError, match="piece"):
                reader.piece(1, len(whole) + 1)
        with pytest.raises(ValueError, match="open"):
            reader.piece(0, 1)
    assert tier.remove([key(0)]) == 1 and tier.contains([key(0)]) == [False]
    tier.close()


def test_pieces_of_every_place(tmp_path):
    tier, rng = tier_of("disk", tmp_path), random.Random(seed_of(1))
    whole = record(key(0), 4 * FRAME_BYTES + 12345)
    put(tier, {key(0): whole})
    (reader,) = tier.open([key(0)])
    for _ in range(200):
        begin = rng.randrange(len(whole))
        end = min(len(whole), begin + rng.choice((0, 1, 1000, 1 << 17, FRAME_BYTES)))
        assert bytes(reader.piece(begin, end)) == whole[begin:end]
        if rng.random() < 0.1:
            reader.release_piece()
    reader.close()
    tier.close()


class Counted(Reader):
    """A record in memory, and the pieces that were asked for."""

    def __init__(self, data: bytes) -> None:
        self.num_bytes, self.asked = len(data), []
        self._data = data

    def piece(self, begin, end):
        self.asked.append((begin, end))
        return memoryview(self._data)[begin:end]

    def close(self):
        pass


@pytest.mark.parametrize("size", [1, FRAME_BYTES, 2 * FRAME_BYTES, 3 * FRAME_BYTES])
def test_a_short_record_is_read_in_one_call(size):
    values, whole = Values(), record(key(0), size)
    put(remote(values), {key(0): whole})
    inner = Counted(values.values[key(0)])
    with SealedReader(inner, key(0), KEYS, Buffers(STAGING_BYTES), lambda name: None) as reader:
        assert bytes(reader.piece(0, len(whole))) == whole
        assert (inner.asked == [(0, inner.num_bytes)]) == (inner.num_bytes <= SHORT_BYTES)
        reader.release_piece()
        inner.asked.clear()
        assert bytes(reader.piece(len(whole) - 5, len(whole))) == whole[-5:]
        assert all(end - begin <= FRAME_BYTES + 16 for begin, end in inner.asked)  # its memory was given back


class SealedLife(TierLife):
    def stored_bytes(self, data: bytes) -> int:
        return SealNote("a", bytes(32), len(data), 1).head(bytes(32)).num_bytes


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_life_beside_a_dict(kind, tmp_path):
    def checked() -> SealedTier:
        disk = kind == "disk"
        tier = DiskTier([tmp_path], 1 << 20, segment_bytes=1 << 18) if disk else MemoryTier(1 << 20, pin_memory=False)
        sealed = SealedTier(tier, KEYS)
        sealed.check = tier.check  # what the life calls after each step
        return sealed

    life = SealedLife(seed_of(2), checked, 40000, may_reopen=kind == "disk")
    life.live(200)
    assert life.figures["read"] > 0


@pytest.mark.parametrize("codec", ["raw", "split"])
@pytest.mark.parametrize("chunk_size", [C, 64])
def test_a_store_gives_what_it_was_given(tmp_path, codec, chunk_size):
    tokens, name = list(range(2 * chunk_size + 1)), tmp_path / "keys"
    name.write_text(f"a {A[1].hex()}")
    url = f"disk:{tmp_path}/kv?size=64MiB&seal_key_file={name}"
    kv = torch.randn(6, 2, len(tokens), 16, 128).to(torch.bfloat16)
    for is_new in (True, False):
        with make(dtype=torch.bfloat16, chunk_size=chunk_size, codec=codec) as plain:
            config, metadata = replace(plain.config, tiers=(url,)), plain.metadata
        with type(plain)(config, metadata) as store:
            if is_new:
                store.store(tokens, kv)
            assert torch.equal(store.retrieve(tokens, return_tuple=False)[0], kv)
            assert store.stats().refused == {}
    stored = b"".join(path.read_bytes() for path in (tmp_path / "kv").glob("*.segment"))
    assert kv[0, 0, 0, 0].view(torch.uint8).numpy().tobytes()[:64] not in stored and b"model_name" not in stored


def test_bytes_come_from_and_into_memory_of_every_cut(tmp_path):
    size = 3 * FRAME_BYTES + 100
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    with ByteStore(ByteStoreConfig(num_threads=1), {"m": 1}, [tier_of("disk", tmp_path)]) as store:
        assert store.put([b"k"], [source]) == [True]
        for cuts in ([], [FRAME_BYTES], [FRAME_BYTES, 3 * FRAME_BYTES], [1, 5000, FRAME_BYTES + 7]):
            pieces = np.split(np.zeros(size, np.uint8), cuts)
            assert store.get_into([b"k"], [pieces]) == [True]
            assert np.array_equal(np.concatenate(pieces), source)
            assert store.put([b"k"], [np.split(source, cuts)], skip_existing=False) == [True]
            back = np.zeros(size, np.uint8)
            assert store.get_into([b"k"], [back]) == [True] and np.array_equal(back, source)


def test_processes_that_read_alone_need_the_keys(tmp_path):
    tier = tier_of("disk", tmp_path)
    put(tier, {key(0): record(key(0))})
    view = SealedTier(SharedDisk([tmp_path]), KEYS)
    assert view.is_read_only and get(view, [key(0)]) == [record(key(0))]
    stranger = SealedTier(SharedDisk([tmp_path]), SealKeys((B,)))
    (reader,) = stranger.open([key(0)])
    with reader, pytest.raises(UnreadableRecord, match="key a, which is not here"):
        _ = reader.num_bytes
    for each in (view, stranger, tier):
        each.close()


def test_a_rotation_loses_nothing():
    values = Values()
    before, during = remote(values, SealKeys((A,))), remote(values, SealKeys((B, A)))
    put(before, {key(0): record(key(0))})
    put(during, {key(1): record(key(1))})
    after = remote(values, SealKeys((B,)))
    assert get(during, [key(0), key(1)]) == [record(key(0)), record(key(1))]
    assert get(after, [key(1)]) == [record(key(1))]
    (reader,) = after.open([key(0)])
    with reader, pytest.raises(UnreadableRecord):
        reader.piece(0, 1)


def stored_with(values: Values, keys: SealKeys, **config):
    """Return a store over a server's values."""
    return make(tiers=[remote(values, keys)], **config)


def test_a_lost_key_is_a_miss_that_is_counted_and_stored_anew():
    values = Values()
    with stored_with(values, SealKeys((A,))) as store:
        store.store(TOKENS, KV)
    there = dict(values.values)
    with stored_with(values, SealKeys((B,))) as store:
        assert store.retrieve(TOKENS)[0] == () and store.stats().refused["key"] >= 1
        assert values.values == there and store.stats().corrupt_records == 0  # others may have the key
        store.store(TOKENS, KV)
        assert same(store.retrieve(TOKENS[:C])[0], KV[:, :, :C])
    with stored_with(values, SealKeys((A, B))) as store:
        assert same(store.retrieve(TOKENS)[0], KV)


def test_a_store_without_keys_leaves_sealed_records_alone():
    values = Values()
    with stored_with(values, KEYS) as store:
        store.store(TOKENS, KV)
    there = dict(values.values)
    with make(tiers=[RemoteTier(values)]) as store:
        assert store.retrieve(TOKENS)[0] == () and store.stats().refused == {"key": 1}
    assert all(map(is_sealed, there.values()))


def test_a_plain_record_is_refused_where_records_are_sealed():
    values = Values()
    with make(tiers=[RemoteTier(values)]) as store:
        store.store(TOKENS, KV)
    with stored_with(values, KEYS) as store:
        assert store.retrieve(TOKENS)[0] == ()
        assert store.stats().refused == {"plain": 1} and store.stats().corrupt_records == 1
        store.store(TOKENS, KV, skip_existing=False)
        assert same(store.retrieve(TOKENS)[0], KV)


def renamed(value: bytes, name: bytes) -> bytes:
    """Return a record with another key in its header, and the checksum that anybody can compute."""
    head = replace(RecordHead.unpack(value, len(value)), key=name)
    payload = value[head.payload_begin : head.payload_end]
    return head.pack() + payload + trailer(head.pack(), payload, head.stretch_bytes)


@pytest.mark.parametrize("is_renamed", [False, True])
@pytest.mark.parametrize("case", ["another position", "another namespace"])
def test_a_record_in_the_place_of_another_is_a_miss(case, is_renamed):
    values, other = Values(), b"other" if case == "another namespace" else b""
    with stored_with(values, KEYS) as store:
        store.store(TOKENS, KV)
        store.store(TOKENS, kv_of(TOKENS, namespace=other), namespace=b"other")
        names, others = store.keys_of(TOKENS), store.keys_of(TOKENS, other)
        to, source = names[0], others[0] if other else names[1]
        values.values[to] = renamed(values.values[source], to) if is_renamed else values.values[source]
        assert store.retrieve(TOKENS)[0] == () and store.lookup(TOKENS) == 0
        refused = store.stats().refused  # without a new name, the server's tier has noticed already
        assert refused == ({"seal": 1} if is_renamed else {})


def test_frames_are_bound_to_their_places():
    values = Values()
    tier, whole = remote(values), record(key(0), 2 * FRAME_BYTES)
    put(tier, {key(0): whole})
    head = RecordHead.unpack(values.values[key(0)], len(values.values[key(0)]))
    first, size = head.payload_begin, FRAME_BYTES + 16
    swapped = bytearray(values.values[key(0)])
    swapped[first : first + size], swapped[first + size : first + 2 * size] = (
        swapped[first + size : first + 2 * size],
        swapped[first : first + size],
    )
    values.values[key(0)] = renamed(bytes(swapped), key(0))
    (reader,) = tier.open([key(0)])
    with reader, pytest.raises(CorruptRecord, match="seal"):
        verify_record(reader, key(0))


def test_the_same_record_twice_shares_no_salt_and_no_bytes():
    values = Values()
    tier, whole, sealed = remote(values), record(key(0), 5000), []
    for _ in range(2):
        put(tier, {key(0): whole})
        sealed.append(values.values[key(0)])
    heads = [RecordHead.unpack(value, len(value)) for value in sealed]
    assert len({SealNote.of(head).salt for head in heads}) == 2
    payloads = [value[head.payload_begin : head.payload_end] for value, head in zip(sealed, heads, strict=True)]
    same_bytes = sum(a == b for a, b in zip(*payloads, strict=True))
    assert same_bytes < len(payloads[0]) / 50  # one in 256 by chance


def read_whole(tier: SealedTier, name: bytes) -> bytes | None:
    (reader,) = tier.open([name])
    if reader is None:
        return None
    with reader:
        return bytes(reader.piece(0, reader.num_bytes))


@pytest.mark.parametrize("is_resealed", [False, True], ids=["as it is", "with right digests"])
def test_no_wrong_byte_and_no_cut_goes_unnoticed(is_resealed):
    """As records' own fuzz: random bits, cuts and lengths, also by somebody who mends the digests."""
    values, rng = Values(), random.Random(seed_of(3))
    tier, whole = remote(values), record(key(0), 2000)
    put(tier, {key(0): whole})
    right = values.values[key(0)]
    for number in range(len(right) if not is_resealed else 600):
        wrong = bytearray(right)
        at = number if not is_resealed else rng.randrange(16, len(right))
        wrong[at] ^= 1 << rng.randrange(8)
        if rng.random() < 0.1:
            wrong = wrong[: rng.randrange(len(wrong))]
        values.values[key(0)] = bytes(wrong)
        if is_resealed:
            try:
                values.values[key(0)] = renamed(bytes(wrong), key(0))
            except CorruptRecord:
                continue
            if values.values[key(0)] == renamed(right, key(0)):  # the digests alone were wrong
                continue
        with contextlib.suppress(CorruptRecord, UnreadableRecord):
            assert read_whole(tier, key(0)) is None
    values.values[key(0)] = right
    assert read_whole(tier, key(0)) == whole


@pytest.mark.parametrize("plain_bytes", [0, 1, 2**31, 2**62, 2**64 - 1])
@pytest.mark.parametrize("lead_bytes", [0, 1, FRAME_BYTES + 1, 2**32 - 1])
def test_no_length_in_a_note_is_believed(plain_bytes, lead_bytes):
    values = Values()
    tier = remote(values)
    put(tier, {key(0): record(key(0))})
    value = values.values[key(0)]
    head = RecordHead.unpack(value, len(value))
    magic, salt, *_ = NOTE.unpack_from(head.meta)
    meta = NOTE.pack(magic, salt, plain_bytes, lead_bytes) + head.meta[NOTE.size :]
    changed = replace(head, meta=meta, raw_bytes=plain_bytes)
    payload = value[head.payload_begin : head.payload_end]
    values.values[key(0)] = changed.pack() + payload + trailer(changed.pack(), payload, head.stretch_bytes)
    (reader,) = tier.open([key(0)])
    with reader, pytest.raises(CorruptRecord):
        reader.piece(0, 1)


def test_sealed_records_are_neither_whole_nor_broken_without_the_keys():
    """Their proof is the seal: who cannot read leaves them alone."""
    tier = MemoryTier(8 << 20, pin_memory=False)
    put(SealedTier(tier, KEYS), {key(i): record(key(i), size) for i, size in enumerate(SIZES)})
    for number in range(len(SIZES)):
        (reader,) = tier.open([key(number)])
        with reader, tier.create(bytes(32), reader.num_bytes) as writer:
            with pytest.raises(UnreadableRecord, match="sealed"):
                verify_record(reader, key(number))
            with pytest.raises(UnreadableRecord, match="sealed"):
                copy_record(reader, writer, key(number))
    assert verify(tier) == (0, []) and tier.stats().num_records == len(SIZES)
    assert BytesSink(None, 1).runs() is None


def test_a_writer_is_whole_and_its_tiers_own(tmp_path):
    tier, other = remote(Values()), remote(Values())
    data = record(key(0), 100)
    writer = tier.create(key(0), len(data))
    writer.piece(0, 10)[:] = data[:10]
    for call in (lambda: tier.commit([writer]), lambda: other.commit([writer]), lambda: writer.piece(11, 12)):
        with pytest.raises(ValueError):
            call()
    writer.piece(10, len(data))[:] = data[10:]
    assert tier.commit([writer]) == [True] and get(tier, [key(0)]) == [data]
    with pytest.raises(ValueError):
        writer.piece(0, 1)
    with pytest.raises(ValueError, match="num_bytes"):
        tier.create(key(0), 0)
    assert tier.create(key(0), 1 << 40) is None


@pytest.mark.parametrize("is_missing", [False, True], ids=["with the key", "with a lost key"])
@pytest.mark.parametrize("codec", ["raw", "split"])
def test_blocks_are_loaded_at_once_and_by_layer(tmp_path, codec, is_missing):
    """A lost key is a miss for every way to load, never an error."""
    source, num_tokens = make_engine(seed=1, cache_dtype="bf16"), len(ENGINE_TOKENS)
    table = list(range(8))
    config = KVStoreConfig(ENGINE_CHUNK, codec=codec, num_threads=2)
    with KVStore(config, metadata_of(source, "m"), [tier_of("disk", tmp_path)]) as store:
        assert store.store_blocks(ENGINE_TOKENS, source, table) == num_tokens
    keys, expected = SealKeys((B,)) if is_missing else KEYS, 0 if is_missing else num_tokens
    tier = SealedTier(DiskTier([tmp_path], 64 << 20, segment_bytes=16 << 20), keys)
    with KVStore(config, metadata_of(source, "m"), [tier]) as store:
        for way in ("at once", "by layer", "pinned"):
            target = make_engine(seed=2, cache_dtype="bf16")
            if way == "at once":
                assert store.load_blocks(ENGINE_TOKENS, target, table) == expected
            elif way == "by layer":
                with store.load_layers(ENGINE_TOKENS, target, table) as load:
                    assert load.result(60) == expected
            else:
                with store.pin(ENGINE_TOKENS):
                    assert store.load_blocks(ENGINE_TOKENS, target, table) == expected
            if expected:
                same_rows = tokens_of(target, table, 0, num_tokens).view(torch.uint8)
                assert torch.equal(same_rows, tokens_of(source, table, 0, num_tokens).view(torch.uint8))
        assert (store.stats().refused.get("key", 0) > 0) == is_missing and store.stats().corrupt_records == 0


def test_states_and_their_index_are_sealed_too():
    values = Values()
    store, states = store_and_states(tiers=[remote(values)])
    with store:
        assert states.put(TOKENS, state_of(TOKENS))
        assert found(states, TOKENS) and states.positions(TOKENS) == [len(TOKENS)]
    assert all(map(is_sealed, values.values.values())) and len(values.values) > 1
    store, states = store_and_states(tiers=[remote(values, SealKeys((B,)))])
    with store:
        assert not found(states, TOKENS) and states.positions(TOKENS) == []
        assert states.put(TOKENS, state_of(TOKENS)) and found(states, TOKENS)


def test_promotion_and_writing_back_pass_by_memory(tmp_path):
    """Memory has the plain record, the disk the sealed one."""
    memory, disk = MemoryTier(4 << 20, pin_memory=False), tier_of("disk", tmp_path)
    with make(tiers=[Placed(memory), Placed(disk, is_written_back=True)]) as store:
        store.store(TOKENS, KV)
        store.flush()
        memory.clear()
        assert same(store.retrieve(TOKENS)[0], KV) and store.stats().promoted_chunks == 3
        memory.clear()
        assert store.prefetch(TOKENS) == len(TOKENS) and memory.stats().num_records == 3
        disk._keys = SealKeys((B,))
        memory.clear()
        assert store.prefetch(TOKENS) == 0 and store.retrieve(TOKENS)[0] == ()
