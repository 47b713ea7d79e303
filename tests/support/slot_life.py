"""SlotLife: SlotAllocator beside a set of free slots, and PrefixCacheManager beside SlotOracle."""

from dataclasses import dataclass

from support.life import Life, Operation
from support.naive_tree import common_prefix
from support.slot_oracle import Prefix, SlotOracle

from kvpage.extras.slots import PrefixCacheManager, PrefixHit, SlotAllocator

NUM_SLOTS, MOST_PINS = 6, 6


@dataclass(frozen=True, slots=True)
class SlotWorld:
    capacity: int  # tokens

    def life(self, seed: int) -> "SlotLife":
        return SlotLife(seed, self.capacity)


WORLDS = [SlotWorld(capacity) for capacity in (0, 1, 5, 20, 60)]


class SlotLife(Life):
    """known: sequences that were inserted; new ones begin as they do. pinned: one for each pin."""

    def __init__(self, seed: int, capacity: int, num_slots: int = NUM_SLOTS) -> None:
        super().__init__(seed)
        self.slots, self.free, self.versions = SlotAllocator(num_slots), set(range(num_slots)), [0] * num_slots
        self.cache, self.oracle = PrefixCacheManager(capacity), SlotOracle(capacity)
        self.known: list[Prefix] = []
        self.pinned: list[Prefix] = []

    def operations(self) -> dict[Operation, float]:
        return {
            self.insert: 6, self.find: 4, self.find_valid: 2, self.pin: 2, self.release: 6, self.withdraw: 1,
            self.alloc: 4, self.give_or_take: 4,
        }  # fmt: skip

    def tokens(self) -> Prefix:
        """Often a known sequence cut short, gone on with, or changed in the middle."""
        base = self.rng.choice(self.known) if self.known and self.rng.random() < 0.8 else ()
        base = base[: self.rng.randint(0, len(base))] if self.rng.random() < 0.6 else base
        return base + tuple(self.rng.randint(0, 2) for _ in range(self.rng.choice((0, 0, 1, 2, 7))))

    # --- the allocator ---

    def alloc(self) -> None:
        slot = min(self.free, default=-1)
        assert self.slots.alloc() == slot
        if slot >= 0:
            self.free.remove(slot)
            self.versions[slot] += 1

    def give_or_take(self) -> None:
        slot = self.rng.randrange(len(self.versions))
        if slot in self.free:
            self.slots.occupy(slot)
            self.free.remove(slot)
        else:
            self.slots.free(slot)
            self.free.add(slot)

    # --- the cache ---

    def insert(self) -> None:
        tokens, slot = self.tokens() or (0,), self.rng.randrange(len(self.versions))
        version = self.versions[slot] - (self.rng.random() < 0.1)
        assert self.cache.insert(tokens, slot, version) == self.oracle.insert(tokens, slot, version)
        self.known = [*self.known[-20:], tokens]
        self.pinned.append(tokens)
        while len(self.pinned) > MOST_PINS:
            self.release()

    def find(self) -> None:
        self.compare_hit(tokens := self.tokens(), self.cache.find(tokens), self.oracle.find(tokens))

    def find_valid(self) -> None:
        """What is stale and was met is withdrawn. The rest is withdrawn here, so that both are of one mind again."""
        tokens = self.tokens()
        num_valid = max((common_prefix(tokens, held) for held in self.valid()), default=0)
        hit = self.cache.find(tokens, self.slots)
        assert hit.prefix_len == num_valid and (not num_valid or hit.slot_ver == self.versions[hit.slot])
        assert not num_valid or self.oracle.held[hit.slot][0][:num_valid] == tokens[:num_valid]
        for slot, (_, version) in list(self.oracle.held.items()):
            if version != self.versions[slot]:
                self.figures["stale"] += 1
                self.cache.withdraw(slot)
                self.oracle.withdraw(slot)
        self.compare_hit(tokens, self.cache.find(tokens, self.slots), self.oracle.find(tokens))

    def valid(self) -> list[Prefix]:
        return [tokens for slot, (tokens, version) in self.oracle.held.items() if version == self.versions[slot]]

    def pin(self) -> None:
        self.compare_hit(tokens := self.tokens(), self.cache.pin(tokens), num_tokens := self.oracle.pin(tokens))
        self.pinned += [tokens[:num_tokens]] if num_tokens else []

    def compare_hit(self, tokens: Prefix, hit: PrefixHit, num_tokens: int) -> None:
        assert hit.prefix_len == num_tokens
        assert num_tokens == 0 or hit[1:] in self.oracle.slots_with(tokens[:num_tokens])
        self.figures["hits"] += num_tokens > 0

    def release(self) -> None:
        if self.pinned:
            tokens = self.pinned.pop(self.rng.randrange(len(self.pinned)))
            self.cache.release(tokens)
            self.oracle.release(tokens)

    def withdraw(self) -> None:
        slot = self.rng.randrange(len(self.versions) + 1)
        assert self.cache.withdraw(slot) == self.oracle.withdraw(slot)

    # --- comparing ---

    def compare(self) -> None:
        slots, cache, oracle = self.slots, self.cache, self.oracle
        states = [(slots.is_free(slot), slots.version(slot)) for slot in range(len(self.versions))]
        assert states == [(slot in self.free, version) for slot, version in enumerate(self.versions)]
        assert slots.free_count == len(self.free)
        cache.check()
        seen = (cache.num_tokens, cache.num_slots, cache.num_pins, cache.num_over, cache.num_nodes)
        held, edges = len(oracle.held), len(oracle.edges())
        assert seen == (len(oracle.used), held, oracle.pins.total(), oracle.num_over, edges)
        self.figures["over"] += oracle.num_over > 0

    def end(self) -> None:
        while self.pinned:
            self.release()
        assert self.cache.num_pins == self.cache.num_over == 0


class AllocatorLife(SlotLife):
    """The allocator alone, which may have many slots."""

    def operations(self) -> dict[Operation, float]:
        return {self.alloc: 5, self.give_or_take: 4}
