"""BlockEvents: what a tree has cached and given up, as events: block ids become hashes that mean the same elsewhere.

    hash of a block = SHA-256 over (hash of the block before it, or block size and namespace | its tokens)

All fields are little-endian, 64 bits a number, the namespace with its length before it. The last 8 bytes go out, as a
big-endian number: the same prompt has the same hashes in every process.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kvpage.events.schema import DEVICE, HOST, AllBlocksCleared, BlockRemoved, BlockStored, Event, merge
from kvpage.tree_watch import ChangeKind, TreeChanges, before

_STORES = {
    ChangeKind.INSERTED: DEVICE,
    ChangeKind.INSERTED_HOST: HOST,
    ChangeKind.PROMOTED: DEVICE,
    ChangeKind.WRITTEN: HOST,
}
_SOURCES = {ChangeKind.PROMOTED: HOST, ChangeKind.WRITTEN: DEVICE}
_LEAVES = {ChangeKind.LEFT_DEVICE: DEVICE, ChangeKind.LEFT_HOST: HOST}


class _Block(NamedTuple):
    """A cached block, in one tier or both."""

    digest: bytes
    parent: int | None
    tokens: bytes  # uint32
    namespace: bytes
    hash: int


class BlockEvents:
    """Keeps the hash of every cached block, about 0.5 KiB each. Fed with all changes of one tree, in order."""

    def __init__(self, block_size: int, lora_names: Mapping[bytes, str] | None = None) -> None:
        self._block_size = block_size
        self._lora_names = dict(lora_names or {})
        self._blocks: dict[str, dict[int, _Block]] = {DEVICE: {}, HOST: {}}

    def events(self, changes: TreeChanges) -> list[Event]:
        """What the changes mean, in their order. A restart begins with AllBlocksCleared."""
        events: list[Event] = []
        if changes.is_restart:
            self._blocks = {DEVICE: {}, HOST: {}}
            events.append(AllBlocksCleared())
        run = _Run(self, events)
        tokens, namespaces = iter(changes.tokens), iter(changes.namespaces)
        for kind, block_id, value in changes.changes.tolist():
            if kind in _LEAVES:
                medium = _LEAVES[kind]
                run.add(False, medium, self._blocks[medium].pop(block_id))
                continue
            medium = _STORES[kind]
            if kind in _SOURCES:
                block = self._blocks[_SOURCES[kind]][value]
            else:
                block = self._hashed(value, next(tokens), namespaces)
            self._blocks[medium][block_id] = block
            run.add(True, medium, block)
        run.end()
        return events

    def stored(self, block: _Block, medium: str) -> BlockStored:
        name = self._lora_names.get(block.namespace)
        keys: list[list[str] | None] | None = None
        if name is not None:
            keys = [[name]]
        elif block.namespace:  # a salt goes into the first block's hash, and through it into all that follow
            keys = [[_text(block.namespace)] if block.parent is None else None]
        tokens = np.frombuffer(block.tokens, np.uint32).tolist()
        return BlockStored([block.hash], block.parent, tokens, self._block_size, None, medium, name, keys)

    def _hashed(self, value: int, tokens: np.ndarray, namespaces: Iterator[bytes]) -> _Block:
        reference = before(value)
        if reference is None:
            namespace = next(namespaces)
            digest, parent = _root(self._block_size, namespace), None
        else:
            is_on_device, block_id = reference
            block = self._blocks[DEVICE if is_on_device else HOST][block_id]
            digest, parent, namespace = block.digest, block.hash, block.namespace
        digest = hashlib.sha256(digest + tokens.astype("<i8").tobytes()).digest()
        # Ids below zero stand for content that is no token; unsigned, as routers read tokens.
        return _Block(digest, parent, tokens.tobytes(), namespace, int.from_bytes(digest[-8:], "big"))


class _Run:
    """Neighbouring changes of one kind and medium, which go out together."""

    def __init__(self, owner: BlockEvents, events: list[Event]) -> None:
        self._owner = owner
        self._events = events
        self._kind: tuple[bool, str] | None = None
        self._blocks: list[_Block] = []

    def add(self, is_stored: bool, medium: str, block: _Block) -> None:
        if self._kind != (is_stored, medium):
            self.end()
            self._kind = is_stored, medium
        self._blocks.append(block)

    def end(self) -> None:
        if self._kind is None:
            return
        (is_stored, medium), blocks = self._kind, self._blocks
        if is_stored:
            self._events += merge(self._owner.stored(block, medium) for block in blocks)
        else:
            self._events.append(BlockRemoved([block.hash for block in blocks], medium))
        self._kind, self._blocks = None, []


def _root(block_size: int, namespace: bytes) -> bytes:
    numbers = block_size.to_bytes(8, "little") + len(namespace).to_bytes(8, "little")
    return hashlib.sha256(numbers + namespace).digest()


def _text(namespace: bytes) -> str:
    try:
        return namespace.decode()
    except UnicodeDecodeError:
        return namespace.hex()
