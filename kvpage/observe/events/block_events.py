"""BlockEvents: changes of a tree as events, in which a block has a hash that means the same in every process.

    hash of a block = SHA-256 over (hash of the block before it, or block size and namespace | its tokens)

All fields are little-endian, 64 bits a number. The namespace follows its length. The last 8 bytes are sent, as a
big-endian number.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.blocks.namespaces import WeightsName
from kvpage.observe.events.block_hashes import next_digest, root_digest, shown
from kvpage.observe.events.config import SpecKind
from kvpage.observe.events.schema import (
    DEVICE,
    GROUP,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    chains,
)
from kvpage.observe.tree_watch import ChangeKind, TreeChanges, before

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
    tokens: bytes  # uint32, in the machine's order
    namespace: bytes
    hash: int


class BlockEvents:
    """The hash of every cached block, about 0.5 KiB each. It needs all changes of one tree, in order."""

    def __init__(
        self,
        block_size: int,
        lora_names: Mapping[bytes, str] | None = None,
        spec_kind: SpecKind = "full_attention",
    ) -> None:
        self._block_size = block_size
        self._spec_kind = spec_kind
        self._lora_names = dict(lora_names or {})
        self._blocks: dict[str, dict[int, _Block]] = {DEVICE: {}, HOST: {}}

    def events(self, changes: TreeChanges) -> list[Event]:
        """Return the events for these changes, in their order. A restart begins with AllBlocksCleared."""
        events: list[Event] = []
        if changes.is_restart:
            self._blocks = {DEVICE: {}, HOST: {}}
            events.append(AllBlocksCleared())
        run = _Run(self, events)
        tokens, namespaces = _Tokens(changes.tokens), iter(changes.namespaces)
        for kind, block_id, value in changes.changes.tolist():
            if kind in _LEAVES:
                medium = _LEAVES[kind]
                run.add(False, medium, self._blocks[medium].pop(block_id))
                continue
            medium = _STORES[kind]
            is_copy = kind in _SOURCES
            block = self._blocks[_SOURCES[kind]][value] if is_copy else self._hashed(value, tokens, namespaces)
            self._blocks[medium][block_id] = block
            run.add(True, medium, block)
        run.end()
        return events

    def stored(self, row: list[_Block], medium: str) -> BlockStored:
        """Return the event for blocks of which each is the parent of the next."""
        parent, namespace = row[0].parent, row[0].namespace
        weights, caller = WeightsName.split(namespace)
        name = self._lora_names.get(caller, weights.adapter or None)
        keys: list[list[str] | None] | None = None
        if name is not None:
            keys = [[name] for _ in row]
        elif namespace:  # a salt goes into the first block's hash, and through it into all that follow
            keys = [None] * len(row)
            texts = [f"weights {weights.version}"] * bool(weights.version) + [_text(caller)] * bool(caller)
            keys[0] = texts if parent is None else None
        hashes = [block.hash for block in row]
        tokens = np.frombuffer(b"".join(block.tokens for block in row), np.uint32).tolist()
        size, kind = self._block_size, self._spec_kind
        return BlockStored(hashes, parent, tokens, size, None, medium, name, keys, GROUP, kind)

    def _hashed(self, value: int, tokens: "_Tokens", namespaces: Iterator[bytes]) -> _Block:
        reference = before(value)
        if reference is None:
            namespace = next(namespaces)
            digest, parent = root_digest(self._block_size, namespace), None
        else:
            is_on_device, block_id = reference
            block = self._blocks[DEVICE if is_on_device else HOST][block_id]
            digest, parent, namespace = block.digest, block.hash, block.namespace
        wide, narrow = tokens.next_block()
        digest = next_digest(digest, wide)
        return _Block(digest, parent, narrow, namespace, shown(digest))


class _Tokens:
    """The tokens of inserted blocks, block by block, as bytes. One conversion of all is cheaper than one for each."""

    def __init__(self, tokens: npt.NDArray[np.int32]) -> None:
        self._wide = tokens.astype("<i8").tobytes()
        self._narrow = tokens.tobytes()
        self._block_bytes = 4 * tokens.shape[1]
        self._begin = 0

    def next_block(self) -> tuple[bytes, bytes]:
        """Return the tokens as int64, to hash, and as uint32, to send. Ids below zero are content, not tokens."""
        begin, end = self._begin, self._begin + self._block_bytes
        self._begin = end
        return self._wide[2 * begin : 2 * end], self._narrow[begin:end]


class _Run:
    """Neighbouring changes of one kind and medium, which are sent together."""

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
            rows = chains({block.hash: (block.parent, block) for block in blocks})
            self._events += [self._owner.stored(row, medium) for row in rows]
        else:
            self._events.append(BlockRemoved([block.hash for block in blocks], medium, GROUP))
        self._kind, self._blocks = None, []


def _text(namespace: bytes) -> str:
    try:
        return namespace.decode()
    except UnicodeDecodeError:
        return f"0x{namespace.hex()}"
