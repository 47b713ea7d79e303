"""Bytes on the wire, by hand; hashes; what is merged and split; the window."""

import hashlib
import struct

import msgpack
import pytest
from support.mirror_router import expected_hashes

from kvpage import BlockPool, PrefixTree
from kvpage.observe.events import EventConfig
from kvpage.observe.events.block_events import BlockEvents
from kvpage.observe.events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    merge,
    pack,
    split,
    unpack,
)
from kvpage.observe.events.window import EventWindow
from kvpage.observe.tree_watch import TreeWatch

STORED = BlockStored([2**64 - 1, 5], None, [7, 300], 1, None, "GPU", None)
BATCH = EventBatch(1.5, [STORED, BlockRemoved([5], "CPU"), AllBlocksCleared()], 0)

TS = b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"  # a float64: 1.5
HASHES = b"\x92\xcf" + b"\xff" * 8 + b"\x05"  # two: an uint64 and a small integer
TOKENS = b"\x92\x07\xcd\x01\x2c"  # 7 and 300


def text(value: str) -> bytes:
    assert len(value) < 32
    return bytes([0xA0 + len(value)]) + value.encode()


def test_bytes_of_maps():
    stored = (
        b"\x88" + text("type") + text("BlockStored") + text("block_hashes") + HASHES
        + text("parent_block_hash") + b"\xc0"
        + text("token_ids") + TOKENS + text("block_size") + b"\x01" + text("lora_id") + b"\xc0"
        + text("medium") + text("GPU") + text("lora_name") + b"\xc0"
    )  # fmt: skip
    removed = b"\x83" + text("type") + text("BlockRemoved") + text("block_hashes") + b"\x91\x05"
    removed += text("medium") + text("CPU")
    cleared = b"\x81" + text("type") + text("AllBlocksCleared")
    assert pack(BATCH, "map") == b"\x93" + TS + b"\x93" + stored + removed + cleared + b"\x00"


def test_bytes_of_arrays():
    stored = b"\x98" + text("BlockStored") + HASHES + b"\xc0" + TOKENS + b"\x01\xc0" + text("GPU") + b"\xc0"
    removed = b"\x93" + text("BlockRemoved") + b"\x91\x05" + text("CPU")
    cleared = b"\x91" + text("AllBlocksCleared")
    assert pack(BATCH, "array") == b"\x93" + TS + b"\x93" + stored + removed + cleared + b"\x00"


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_extra_keys_come_last(encoding):
    stored = BlockStored([1, 2], 9, [3, 4], 1, None, "GPU", "adapter", [["adapter"], ["adapter"]])
    payload = pack(EventBatch(1.0, [stored], 3), encoding)
    _, (event,), rank = msgpack.unpackb(payload)
    fields = ["BlockStored", [1, 2], 9, [3, 4], 1, None, "GPU", "adapter", [["adapter"], ["adapter"]]]
    assert (list(event.values()) if encoding == "map" else event) == fields and rank == 3
    assert unpack(payload) == EventBatch(1.0, [stored], 3)


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_unpack_gives_what_was_packed(encoding):
    assert unpack(pack(BATCH, encoding)) == BATCH


def stored(block_hash: int, parent: int | None, keys: list | None = None) -> BlockStored:
    return BlockStored([block_hash], parent, [block_hash, 0], 2, None, "GPU", None, keys)


def test_merge_makes_chains_parents_first():
    alone = stored(50, 40)
    chain = [stored(1, None), stored(2, 1), stored(3, 2)]
    fork = [stored(4, 3), stored(5, 4), stored(6, 3)]
    expected = [
        BlockStored([1, 2, 3], None, [1, 0, 2, 0, 3, 0], 2, None, "GPU", None),
        BlockStored([4, 5], 3, [4, 0, 5, 0], 2, None, "GPU", None),
        BlockStored([6], 3, [6, 0], 2, None, "GPU", None),
    ]
    assert merge([*chain, *fork, alone]) == [*expected, alone]
    assert merge([fork[2], *fork[1::-1], *chain[::-1]])[0] == expected[0]
    assert {tuple(e.block_hashes) for e in merge([*fork[::-1], *chain[::-1]])} == {(1, 2, 3), (4, 5), (6,)}
    assert merge([]) == []


def test_split_undoes_merge():
    singles = [stored(1, None, [["salt"]]), stored(2, 1, [None]), stored(3, 2, [None])]
    (merged,) = merge(singles)
    assert merged.extra_keys == [["salt"], None, None]
    assert split(merged) == singles


def events_of(namespace: bytes, tokens: list[int], block_size: int = 2, loras=None) -> BlockStored:
    pool = BlockPool(8)
    tree = PrefixTree(pool, block_size)
    made = BlockEvents(block_size, loras)
    watch, events = TreeWatch(tree), []
    watch.listeners.append(lambda changes: events.append(made.events(changes)))
    watch.poll()
    tree.release(tree.insert(tokens, pool.allocate(len(tokens) // block_size), namespace))
    watch.poll()
    assert events[0] == [AllBlocksCleared()]
    (event,) = events[1]
    return event


def test_hashes_are_a_chain_over_tokens_size_and_namespace():
    root = hashlib.sha256(struct.pack("<qq", 2, 4) + b"salt").digest()
    first = hashlib.sha256(root + struct.pack("<qq", 1, -2)).digest()
    second = hashlib.sha256(first + struct.pack("<qq", 3, 4)).digest()
    hashes = [int.from_bytes(digest[24:], "big") for digest in (first, second)]
    event = events_of(b"salt", [1, -2, 3, 4])
    assert event == BlockStored(
        hashes, None, [1, 2**32 - 2, 3, 4], 2, None, "GPU", None, [["salt"], None], 0, "full_attention"
    )
    assert hashes == expected_hashes(b"salt", (1, -2, 3, 4), 2)
    others = [events_of(b"", [1, -2, 3, 4]), events_of(b"salt", [1, -2, 3, 4], 4), events_of(b"salt", [0, -2, 3, 4])]
    known = {*hashes}
    for other in others:
        assert known.isdisjoint(other.block_hashes)
        known.update(other.block_hashes)


def test_namespaces_on_the_wire():
    assert events_of(b"", [1, 2]).extra_keys is None
    assert events_of(b"\xff\x01", [1, 2]).extra_keys == [["0xff01"]]
    event = events_of(b"ns", [1, 2, 3, 4], loras={b"ns": "my-lora"})
    assert (event.lora_name, event.extra_keys) == ("my-lora", [["my-lora"], ["my-lora"]])


def window_with(num_batches: int, size: int) -> tuple[EventWindow, list[bytes]]:
    window, payloads = EventWindow(size, "map"), []
    for seq in range(num_batches):
        payloads.append(pack(EventBatch(float(seq), [stored(seq + 1, seq or None)], 0)))
        window.add(seq, payloads[-1])
    return window, payloads


@pytest.mark.parametrize("num_batches", [0, 1, 2, 3, 4, 9])
def test_window(num_batches):
    window, payloads = window_with(num_batches, 3)
    oldest = max(num_batches - 3, 0)
    for start in range(num_batches + 2):
        batches = list(window.since(start))
        if start < oldest:
            seq, payload = batches.pop(0)
            assert seq == oldest - 1
            cleared, whole = unpack(payload).events
            assert cleared == AllBlocksCleared() and whole.block_hashes == list(range(1, oldest + 1))
            assert unpack(payload).ts == float(seq)
        assert batches == [(seq, payloads[seq]) for seq in range(max(start, oldest), num_batches)]


def test_a_window_of_none_still_knows_what_is_cached():
    window, _ = window_with(3, 0)
    ((seq, payload),) = window.since(0)
    assert seq == 2 and unpack(payload).events[1].block_hashes == [1, 2, 3]
    window.add(3, pack(EventBatch(3.0, [BlockRemoved([3, 2], "GPU")])))
    ((seq, payload),) = window.since(3)
    assert seq == 3 and unpack(payload).events[1].block_hashes == [1]
    window.add(4, pack(EventBatch(4.0, [AllBlocksCleared()])))
    ((seq, payload),) = window.since(0)
    assert seq == 4 and unpack(payload).events == [AllBlocksCleared()]


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("endpoint", "5557", "endpoint must name a transport, as in tcp://127.0.0.1:5557, got '5557'"),
        ("replay_endpoint", "", "replay_endpoint must name a transport, or be None, got ''"),
        ("window", -1, "window must be an integer of at least 0, got -1"),
        ("window", True, "window must be an integer of at least 0, got True"),
        ("high_water_mark", 0, "high_water_mark must be an integer of at least 1, got 0"),
        ("data_parallel_rank", -1, "data_parallel_rank must be an integer of at least 0, got -1"),
        ("encoding", "json", 'encoding must be "map" or "array", got \'json\''),
    ],
)
def test_config_refuses(field, value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        EventConfig(**{field: value})


def test_config_stays_on_this_machine_unless_told_otherwise():
    assert EventConfig().endpoint.startswith("tcp://127.0.0.1:") and EventConfig().replay_endpoint is None
