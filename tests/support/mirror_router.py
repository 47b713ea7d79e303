"""A router that knows nothing but messages: it reads them with plain msgpack and keeps which server holds which block.

It is strict where real ones are tolerant: what is stored twice, removed without being there, or follows a parent that
nobody holds is an error.
"""

import hashlib
import struct

import msgpack
from support.naive_pool import Key

FIELDS = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
]
REMOVED_FIELDS = ["block_hashes", "medium", "group_idx"]
KINDS = ("full_attention", "mla_attention")


class MirrorRouter:
    def __init__(self) -> None:
        self.held: dict[str, dict[int, tuple]] = {
            "GPU": {},
            "CPU": {},
        }  # by hash: (parent, tokens, lora name, extra keys)
        self.last_seq = -1
        self.num_clears = 0

    def take(self, seq: int, payload: bytes) -> None:
        assert seq == self.last_seq + 1
        self.last_seq = seq
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        ts, events, rank = msgpack.unpackb(payload)
        assert isinstance(ts, float) and rank == 0 and events
        for event in events:
            self.apply_event(event if isinstance(event, dict) else as_map(event))

    def apply_event(self, event: dict) -> None:
        if event["type"] == "AllBlocksCleared":
            assert event == {"type": "AllBlocksCleared"}
            self.num_clears += 1
            self.held = {"GPU": {}, "CPU": {}}
        elif event["type"] == "BlockRemoved":
            assert set(event) == {"type", *REMOVED_FIELDS} and event["block_hashes"] and event["group_idx"] == 0
            for block_hash in event["block_hashes"]:
                del self.held[event["medium"]][block_hash]
        else:
            self.store(**event)

    def store(
        self, type, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, group_idx,
        kv_cache_spec_kind, extra_keys=None,
    ) -> None:  # fmt: skip
        assert group_idx == 0 and kv_cache_spec_kind in KINDS
        assert type == "BlockStored" and lora_id is None and len(token_ids) == len(block_hashes) * block_size > 0
        assert extra_keys is None or len(extra_keys) == len(block_hashes)
        parent = parent_block_hash
        for i, block_hash in enumerate(block_hashes):
            assert block_hash not in self.held[medium]
            assert parent is None or any(parent in held for held in self.held.values())
            tokens = tuple(token_ids[i * block_size : (i + 1) * block_size])
            self.held[medium][block_hash] = (parent, tokens, lora_name, extra_keys and extra_keys[i])
            parent = block_hash


def as_map(event: list) -> dict:
    names = {"BlockStored": FIELDS, "BlockRemoved": REMOVED_FIELDS, "AllBlocksCleared": []}
    return {"type": event[0], **dict(zip(names[event[0]], event[1:], strict=False))}


def expected_hashes(namespace: bytes, path: tuple[int, ...], block_size: int) -> list[int]:
    """Return the hash of each block of a path, by the documented formula."""
    digest = hashlib.sha256(struct.pack("<qq", block_size, len(namespace)) + namespace).digest()
    hashes = []
    for start in range(0, len(path), block_size):
        digest = hashlib.sha256(digest + struct.pack(f"<{block_size}q", *path[start : start + block_size])).digest()
        hashes.append(struct.unpack(">Q", digest[-8:])[0])
    return hashes


def expected_block(key: Key, block_size: int, loras: dict[bytes, str]) -> tuple[int, tuple]:
    """The hash of the block that ends a path, and the facts that a router needs of it."""
    namespace, path = key
    *before, block_hash = expected_hashes(namespace, path, block_size)
    tokens = tuple(token % 2**32 for token in path[-block_size:])
    name = loras.get(namespace)
    keys = [name] if name else ([namespace.decode()] if namespace and not before else None)
    return block_hash, (before[-1] if before else None, tokens, name, keys)
