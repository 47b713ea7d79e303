"""Events of a cache, and their form on the wire: vLLM's schema, which KV-aware routers read.

    message   [topic, sequence number: 8 bytes, big-endian, payload]
    payload   msgpack of [ts, [event, ...], data_parallel_rank]
    event     {"type": "BlockStored", "block_hashes": [...], ...}      as a map
              ["BlockStored", [...], ...]                              as an array, fields in their order

Fields that hold their default are left out, in arrays at the end only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import msgpack

from kvpage.observe.events.config import Encoding

DEVICE = "GPU"  # the medium of the device tier, also where that is a CPU: its blocks need no transfer
HOST = "CPU"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks in a row, each the parent of the next, are in `medium` now.

    Attributes:
        block_hashes: Unsigned 64-bit numbers.
        parent_block_hash: The hash of the block before the first; None at a prompt's start.
        token_ids: Unsigned 32-bit numbers, block_size of them for each block.
        block_size: Tokens of a block.
        lora_id: Always None.
        medium: DEVICE or HOST.
        lora_name: The adapter that computed the blocks.
        extra_keys: Further keys that distinguish a block from others with the same tokens: a list or None for each
            block.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The blocks are not in `medium` any more. They may be in another."""

    block_hashes: list[int]
    medium: str | None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block is cached, in any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_TYPES: dict[str, type[Event]] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


class EventBatch(NamedTuple):
    """The changes of one step. ts: Seconds since the epoch."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def pack(batch: EventBatch, encoding: Encoding = "map") -> bytes:
    """Return the payload of a message."""
    encode = _as_map if encoding == "map" else _as_array
    payload: bytes = msgpack.packb([batch.ts, [encode(event) for event in batch.events], batch.data_parallel_rank])
    return payload


def unpack(payload: bytes) -> EventBatch:
    """Return the batch in a payload that `pack` has made, in either encoding."""
    ts, events, *rank = msgpack.unpackb(payload)
    return EventBatch(ts, [_event(event) for event in events], rank[0] if rank else None)


def split(event: BlockStored) -> list[BlockStored]:
    """Return an event for each block."""
    size, parents = event.block_size, [event.parent_block_hash, *event.block_hashes]
    return [
        BlockStored(
            [block_hash],
            parents[i],
            event.token_ids[i * size : (i + 1) * size],
            size,
            event.lora_id,
            event.medium,
            event.lora_name,
            event.extra_keys and event.extra_keys[i : i + 1],
        )
        for i, block_hash in enumerate(event.block_hashes)
    ]


def merge(events: Iterable[BlockStored]) -> list[BlockStored]:
    """Return as few events as possible that equal these of one block each, all of one medium.

    A parent always comes before its child.
    """
    blocks = {event.block_hashes[0]: (event.parent_block_hash, event) for event in events}
    return [_joined(chain) for chain in chains(blocks)]


def chains(blocks: Mapping[int, tuple[int | None, T]]) -> list[list[T]]:
    """Return blocks in rows in which each is the parent of the next. A row ends where several blocks go on from it.

    blocks: By hash, each with its parent's hash. A parent always comes before its child, also in another row.
    """
    children: dict[int | None, list[int]] = {}
    for block_hash, (parent, _) in blocks.items():
        children.setdefault(parent if parent in blocks else None, []).append(block_hash)
    rows, heads = [], children.get(None, [])[::-1]
    while heads:
        row = [heads.pop()]
        while len(after := children.get(row[-1], [])) == 1:
            row.append(after[0])
        heads += after[::-1]
        rows.append([blocks[block_hash][1] for block_hash in row])
    return rows


def _joined(chain: Sequence[BlockStored]) -> BlockStored:
    first = chain[0]
    return BlockStored(
        [event.block_hashes[0] for event in chain],
        first.parent_block_hash,
        [token for event in chain for token in event.token_ids],
        first.block_size,
        first.lora_id,
        first.medium,
        first.lora_name,
        first.extra_keys and [key for event in chain for key in event.extra_keys or [None]],
    )


def _as_map(event: Event) -> dict[str, Any]:
    named = {"type": type(event).__name__, **{field.name: getattr(event, field.name) for field in fields(event)}}
    if named.get("extra_keys", ()) is None:
        del named["extra_keys"]
    return named


def _as_array(event: Event) -> list[Any]:
    return list(_as_map(event).values())


def _event(wire: dict[str, Any] | list[Any]) -> Event:
    if isinstance(wire, dict):
        named = dict(wire)
        return _TYPES[named.pop("type")](**named)
    return _TYPES[wire[0]](*wire[1:])
