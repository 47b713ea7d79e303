"""Events of a cache, and their form on the wire: vLLM's schema, which KV-aware routers read.

    message   [topic, sequence number: 8 bytes, big-endian, payload]
    payload   msgpack of [ts, [event, ...], data_parallel_rank]
    event     {"type": "BlockStored", "block_hashes": [...], ...}      as a map
              ["BlockStored", [...], ...]                              as an array, fields in their order

Fields that hold their default are left out, in arrays at the end only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import msgpack

from kvpage.observe.events.config import Encoding

DEVICE = "GPU"  # the medium of the device tier, also where that is a CPU: its blocks need no transfer
HOST = "CPU"
GROUP = 0  # the index of the only group: a block holds every layer
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks in a row, each the parent of the next, are in `medium` now. All fields of vLLM 0.33, in its order.

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
        group_idx: The group of layers. kvpage has one, 0: a block holds every layer.
        kv_cache_spec_kind: The group's kind of cache. Routers skip kinds by which no prefix is found.
        kv_cache_spec_sliding_window: Always None: a cached prefix is found whole, also where attention has a window.
        locality: "LOCAL" or "REMOTE", seen from the publisher; None says nothing.
        ownership: The name of a second tier that has the blocks; None says nothing.
        session_id: The session that stored the blocks; None says nothing.
        lookahead_token_ids: Tokens after each block that count in its hash. Always None here: none count.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The blocks are not in `medium` any more. They may be in another. It has the fields of BlockStored."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block is cached, in any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_TYPES: dict[str, type[Event]] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
_FIELDS = {kind: [(field.name, field.default) for field in fields(kind)] for kind in _TYPES.values()}


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
        replace(
            event,
            block_hashes=[block_hash],
            parent_block_hash=parents[i],
            token_ids=event.token_ids[i * size : (i + 1) * size],
            extra_keys=event.extra_keys and event.extra_keys[i : i + 1],
            lookahead_token_ids=event.lookahead_token_ids and event.lookahead_token_ids[i : i + 1],
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
    return replace(
        first,
        block_hashes=[event.block_hashes[0] for event in chain],
        token_ids=[token for event in chain for token in event.token_ids],
        extra_keys=first.extra_keys and [key for event in chain for key in event.extra_keys or [None]],
        lookahead_token_ids=first.lookahead_token_ids
        and [tokens for event in chain for tokens in event.lookahead_token_ids or [[]]],
    )


def _as_map(event: Event) -> dict[str, Any]:
    named: dict[str, Any] = {"type": type(event).__name__}
    for name, default in _FIELDS[type(event)]:
        value = getattr(event, name)
        if default is MISSING or value is not default:
            named[name] = value
    return named


def _as_array(event: Event) -> list[Any]:
    values: list[Any] = [type(event).__name__]
    num_sent = 1
    for name, default in _FIELDS[type(event)]:
        values.append(getattr(event, name))
        if default is MISSING or values[-1] is not default:
            num_sent = len(values)
    return values[:num_sent]


def _event(wire: dict[str, Any] | list[Any]) -> Event:
    if isinstance(wire, dict):
        named = dict(wire)
        return _TYPES[named.pop("type")](**named)
    return _TYPES[wire[0]](*wire[1:])
