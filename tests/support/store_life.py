"""StoreLife: a KVStore over a memory tier beside the set of the chunks that were stored.

With room for all of them exactly these are there, bit for bit. With little room some of them are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.life import Life, Operation
from support.store_kv import FMTS, C, kv_of, make, narrow, same

from kvpage.store.tiers.memory_tier import MemoryTier

Chunk = tuple[bytes, tuple[int, ...]]  # a namespace and all tokens up to the end of a chunk
MOST_PINS = 3


@dataclass(frozen=True, slots=True)
class StoreWorld:
    fmt: str
    has_room: bool  # for all chunks

    def life(self, seed: int) -> "StoreLife":
        return StoreLife(seed, self.fmt, self.has_room)


WORLDS = [StoreWorld(fmt, has_room) for fmt in FMTS for has_room in (True, False)]


@dataclass(slots=True)
class Pinned:
    """holds: nothing of it was removed since. What is put anew need not fit beside what other pins keep."""

    pin: Any
    tokens: list[int]
    name: bytes
    holds: bool = True


class StoreLife(Life):
    def __init__(self, seed: int, fmt: str, has_room: bool) -> None:
        super().__init__(seed)
        self.fmt, self.has_room = fmt, has_room
        self.store = make(fmt, tiers=[MemoryTier(8 << 20 if has_room else 16 << 10, pin_memory=False)])
        self.there: set[Chunk] = set()
        self.pins: list[Pinned] = []

    def operations(self) -> dict[Operation, float]:
        return {
            self.put: 4, self.get: 4, self.look: 1, self.pin: 1, self.unpin: 1, self.remove: 1, self.clear: 0.2,
        }  # fmt: skip

    def some(self) -> tuple[list[int], bytes]:
        tokens = [int(self.rng.random() < 0.05) for _ in range(self.rng.randrange(5 * C))]
        return tokens, self.rng.choice((b"", b"other"))

    def ends(self, tokens: list[int]) -> list[int]:
        return [min(begin + C, len(tokens)) for begin in range(0, len(tokens), C)]

    def chunks(self, tokens: list[int], name: bytes) -> list[Chunk]:
        return [(name, tuple(tokens[:end])) for end in self.ends(tokens)]

    def num_there(self, tokens: list[int], name: bytes, skip: int = 0) -> int:
        """Return where the tokens that can be read end, if the first ones are not asked for."""
        found = 0
        for chunk in self.chunks(tokens, name):
            if chunk not in self.there and len(chunk[1]) > skip // C * C:
                break
            found = len(chunk[1])
        return found

    def is_as_expected(self, count: int, most: int) -> bool:
        return count == most if self.has_room else count <= most

    # --- operations ---

    def put(self) -> None:
        """What the caller's tensor holds after the call is nobody's business."""
        tokens, name = self.some()
        skip = self.rng.choice((0, self.rng.randint(0, len(tokens) // C) * C))
        mask = np.arange(len(tokens)) >= skip
        kv = narrow(kv_of(tokens, self.fmt, namespace=name), self.fmt, skip, len(tokens))
        has_mask, blocks = skip or self.rng.random() < 0.5, self.rng.random() < 0.5
        handle = self.store.store(tokens, kv, mask if has_mask else None, blocking=blocks, namespace=name)
        new = {chunk for chunk in self.chunks(tokens, name) if len(chunk[1]) > skip} - self.there
        kv.fill_(float("nan"))
        stored = handle.result()
        assert stored == len(new) if self.has_room else stored >= 0
        self.there |= new
        self.figures["stored"] += stored

    def get(self) -> None:
        tokens, name = self.some()
        skip = self.rng.choice((0, self.rng.randint(0, len(tokens))))
        mask = torch.arange(len(tokens)) >= skip
        found, has = self.store.retrieve(tokens, mask if skip else None, namespace=name)
        count = int(has.sum())
        assert self.is_as_expected(count, max(self.num_there(tokens, name, skip) - skip, 0))
        assert has.tolist() == [skip <= index < skip + count for index in range(len(tokens))]
        assert same(found, narrow(kv_of(tokens, self.fmt, namespace=name), self.fmt, skip, skip + count))
        self.figures["read"] += count

    def look(self) -> None:
        tokens, name = self.some()
        assert self.is_as_expected(self.store.lookup(tokens, name), self.num_there(tokens, name))

    def pin(self) -> None:
        tokens, name = self.some()
        if len(self.pins) < MOST_PINS:
            pin = self.store.pin(tokens, name)
            assert self.is_as_expected(pin.num_tokens, self.num_there(tokens, name))
            self.pins.append(Pinned(pin, tokens[: pin.num_tokens], name))
            self.figures["pinned"] += pin.num_tokens

    def unpin(self) -> None:
        """Until then all of it can be read."""
        if self.pins:
            pinned = self.pins.pop(self.rng.randrange(len(self.pins)))
            assert not pinned.holds or self.store.lookup(pinned.tokens, pinned.name) == len(pinned.tokens)
            pinned.pin.release()

    def remove(self) -> None:
        tokens, name = self.some()
        chunks = set(self.chunks(tokens, name))
        removed = self.store.remove(tokens, name)
        assert self.is_as_expected(removed, len(chunks & self.there))
        self.forget(chunks)

    def forget(self, chunks: set[Chunk]) -> None:
        self.there -= chunks
        for pinned in self.pins:
            pinned.holds &= chunks.isdisjoint(self.chunks(pinned.tokens, pinned.name))

    def clear(self) -> None:
        self.store.clear()
        self.forget(set(self.there))
        assert self.store.lookup([0] * C) == 0

    # --- comparing ---

    def compare(self) -> None:
        stats = self.store.stats()
        assert stats.corrupt_records == stats.tier_errors == 0

    def end(self) -> None:
        for pinned in self.pins:
            pinned.pin.release()
        self.store.close()
