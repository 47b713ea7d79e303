"""State machines for hypothesis: each structure beside a naive model, one rule an operation.

A step draws one number, which decides all that its operation does. So what fails is shrunk to few steps, and then to
small numbers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from blocks.test_block_manager import RandomLife as ManagerLife
from blocks.test_prefix_tree_model import LIVES as POOL_WORLDS
from blocks.test_prefix_tree_model import RandomLife as PoolLife
from blocks.test_two_tiers_model import LIVES as TREE_WORLDS
from blocks.test_two_tiers_model import TwoTierLife
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from serving.loop.test_scheduler import Simulation
from support.slot_oracle import SlotOracle

from kvpage import OutOfBlocks
from kvpage.blocks.space import HostPolicy
from kvpage.extras.slots import PrefixCacheManager
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata


class Machine(RuleBasedStateMachine):
    """Lives one life of `make`; its operations are the rules."""

    make: ClassVar[Callable[[int], Any]]
    num_done: ClassVar[int] = 0  # steps, of all examples
    life: Any = None

    @initialize(number=st.integers(0, 1 << 16))
    def begin(self, number: int) -> None:
        self.life = type(self).make(number)

    def teardown(self) -> None:
        if self.life is not None and hasattr(self.life, "end"):
            self.life.end()


def machine(name: str, make: Callable[[int], Any], operations: str) -> type[Machine]:
    """A machine whose rules are those methods of what `make` returns: "write*3 fork" has writing three times as often.
    A life's `do(operation)` calls and compares."""
    rules = {}
    for weighted in operations.split():
        operation, _, weight = weighted.partition("*")
        rules |= {f"{operation}_{i}": _rule(operation) for i in range(int(weight or 1))}
    return type(name, (Machine,), {"make": staticmethod(make), "num_done": 0, **rules})


def _rule(operation: str) -> Any:
    @rule(number=st.integers(0, 1 << 16))
    def step(self: Machine, number: int) -> None:
        type(self).num_done += 1
        self.life.rng = random.Random(number)
        self.life.do(getattr(self.life, operation))

    return step


# --- lives that the tests of the parts have already ---


class Compared:
    """Compares after each operation."""

    def do(self, operation: Callable[[], object]) -> None:
        operation()
        self.compare()  # type: ignore[attr-defined]


class ComparedPool(Compared, PoolLife):
    pass


class ComparedTree(Compared, TwoTierLife):
    pass


class ComparedManager(ManagerLife):
    def do(self, operation: Callable[[], object]) -> None:
        before, num_pinned = self.state(), len(self.manager.space.pins)
        try:
            operation()
        except OutOfBlocks as error:
            assert before == self.state() and num_pinned == len(self.manager.space.pins)
            assert error.needed > error.free
        self.model.verify()

    def end(self) -> None:
        for seq_id in list(self.model.tokens):
            self.manager.release(seq_id)
        for handle in self.handles:
            self.manager.space.unpin(handle)
        assert self.manager.num_free_blocks == self.manager.num_blocks


class ComparedScheduler(Simulation):
    def do(self, operation: Callable[[], object]) -> None:
        operation()

    def computed(self) -> None:
        self.step(fails=False)

    def failed(self) -> None:
        self.step(fails=True)

    def abort(self) -> None:
        if self.unfinished:
            self.scheduler.finish(self.unfinished.pop(self.rng.choice(list(self.unfinished))))
            self.scheduler.manager.check()

    def end(self) -> None:
        for request in self.unfinished.values():
            self.scheduler.finish(request)
        assert self.scheduler.manager.num_free_blocks == self.num_blocks


# --- lives of their own ---


class SlotLife:
    """PrefixCacheManager beside SlotOracle."""

    def __init__(self, number: int) -> None:
        self.rng = random.Random(number)
        capacity = (0, 1, 5, 20, 60)[number % 5]
        self.cache, self.oracle = PrefixCacheManager(capacity), SlotOracle(capacity)
        self.pinned: list[tuple[int, ...]] = []
        self.version = 0

    def do(self, operation: Callable[[], object]) -> None:
        operation()
        cache, oracle = self.cache, self.oracle
        cache.check()
        seen = (cache.num_tokens, cache.num_slots, cache.num_pins, cache.num_over, cache.num_nodes)
        assert seen == (
            len(oracle.used), len(oracle.held), oracle.pins.total(), oracle.num_over, len(oracle.edges())
        )  # fmt: skip

    def tokens(self) -> tuple[int, ...]:
        return tuple(int(self.rng.random() < 0.2) for _ in range(self.rng.randrange(10)))

    def insert(self) -> None:
        tokens, slot = self.tokens() or (0,), self.rng.randrange(6)
        self.version += 1
        assert self.cache.insert(tokens, slot, self.version) == self.oracle.insert(tokens, slot, self.version)
        self.pinned.append(tokens)

    def find(self) -> None:
        self.compare_hit(tokens := self.tokens(), self.cache.find(tokens), self.oracle.find(tokens))

    def pin(self) -> None:
        self.compare_hit(tokens := self.tokens(), self.cache.pin(tokens), num_tokens := self.oracle.pin(tokens))
        self.pinned += [tokens[:num_tokens]] if num_tokens else []

    def compare_hit(self, tokens: tuple[int, ...], hit: Any, num_tokens: int) -> None:
        assert hit.prefix_len == num_tokens
        assert num_tokens == 0 or hit[1:] in self.oracle.slots_with(tokens[:num_tokens])

    def release(self) -> None:
        if self.pinned:
            tokens = self.pinned.pop(self.rng.randrange(len(self.pinned)))
            self.cache.release(tokens)
            self.oracle.release(tokens)

    def withdraw(self) -> None:
        slot = self.rng.randrange(6)
        assert self.cache.withdraw(slot) == self.oracle.withdraw(slot)

    def end(self) -> None:
        while self.pinned:
            self.release()
        assert self.cache.num_pins == 0 and self.cache.num_over == 0


@dataclass(slots=True)
class Pinned:
    """holds: nothing of it was removed since."""

    pin: Any
    tokens: list[int]
    name: bytes
    holds: bool = True


class StoreLife:
    """KVStore over a memory tier, beside the set of the chunks that were stored: with room for all of them exactly
    these are there; with little room some of them, and bit for bit."""

    CHUNK, LAYERS, SIZE = 2, 2, 4

    def __init__(self, number: int) -> None:
        self.rng = random.Random(number)
        self.has_room = number % 2 == 0
        config = KVStoreConfig(self.CHUNK, (f"memory://?size={'8MiB' if self.has_room else '8KiB'}",), num_threads=1)
        self.store = KVStore(config, KVStoreMetadata("m", kv_dtype=torch.float32))
        self.there: set[tuple[bytes, tuple[int, ...]]] = set()
        self.pins: list[Pinned] = []

    def do(self, operation: Callable[[], object]) -> None:
        operation()
        stats = self.store.stats()
        assert stats.corrupt_records == stats.tier_errors == 0

    def some(self) -> tuple[list[int], bytes]:
        tokens = [int(self.rng.random() < 0.1) for _ in range(self.rng.randrange(5 * self.CHUNK))]
        return tokens, self.rng.choice((b"", b"other"))

    def kv(self, tokens: list[int], name: bytes) -> torch.Tensor:
        """[layers, 2, tokens, 1, size]: of each token a function of all up to it, its layer, and K or V."""
        whose = [hash((name, tuple(tokens[: end + 1]))) % (1 << 20) for end in range(len(tokens))]
        first = torch.tensor(whose, dtype=torch.float32).view(1, 1, -1, 1, 1) * 16
        part = torch.arange(self.LAYERS * 2 * self.SIZE, dtype=torch.float32).view(self.LAYERS, 2, 1, 1, self.SIZE)
        return first + part / 4

    def chunks(self, tokens: list[int], name: bytes) -> list[tuple[bytes, tuple[int, ...]]]:
        ends = [min(begin + self.CHUNK, len(tokens)) for begin in range(0, len(tokens), self.CHUNK)]
        return [(name, tuple(tokens[:end])) for end in ends]

    def num_there(self, tokens: list[int], name: bytes) -> int:
        found = 0
        for chunk in self.chunks(tokens, name):
            if chunk not in self.there:
                break
            found = len(chunk[1])
        return found

    def put(self) -> None:
        tokens, name = self.some()
        new = set(self.chunks(tokens, name)) - self.there
        stored = self.store.store(tokens, self.kv(tokens, name), namespace=name).result()
        assert stored == len(new) if self.has_room else stored >= 0
        self.there |= new

    def get(self) -> None:
        tokens, name = self.some()
        found, mask = self.store.retrieve(tokens, return_tuple=False, namespace=name)
        count, most = int(mask.sum()), self.num_there(tokens, name)
        assert count == most if self.has_room else count <= most
        assert mask[:count].all()
        if count:
            assert torch.equal(found, self.kv(tokens, name)[:, :, :count])

    def look(self) -> None:
        tokens, name = self.some()
        count, most = self.store.lookup(tokens, name), self.num_there(tokens, name)
        assert count == most if self.has_room else count <= most

    def pin(self) -> None:
        tokens, name = self.some()
        if len(self.pins) < 3:
            pin = self.store.pin(tokens, name)
            assert pin.num_tokens <= self.num_there(tokens, name)
            self.pins.append(Pinned(pin, tokens[: pin.num_tokens], name))

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
        assert removed == len(chunks & self.there) if self.has_room else removed <= len(chunks)
        self.forget(chunks)

    def forget(self, chunks: set[tuple[bytes, tuple[int, ...]]]) -> None:
        self.there -= chunks
        for pinned in self.pins:
            pinned.holds &= chunks.isdisjoint(self.chunks(pinned.tokens, pinned.name))

    def clear(self) -> None:
        self.store.clear()
        self.forget(set(self.there))
        assert self.store.lookup([0] * self.CHUNK) == 0

    def end(self) -> None:
        for pinned in self.pins:
            pinned.pin.release()
        self.store.close()


# --- all of them ---


def make_manager(number: int) -> ComparedManager:
    options = {"num_host_blocks": (0, 12, 60)[number % 3], "host_policy": HostPolicy((None, 0, 2)[number // 3 % 3])}
    return ComparedManager(number, 24, number % 4 != 3, pin_quota=8, **options)


MANAGER_RULES = """allocate*3 write*6 append*4 fork*3 release*2 swap_out*2 swap_in*3 pin unpin prefetch drop leave
    make_private give_back_room decode*3"""
TREE_RULES = """allocate*3 release_ids match*5 match_part*2 pin release*4 trim*2 promote*3 write_out insert*8 evict
    demote*6 evict_host drop clear"""

MACHINES = {
    "pool": machine(
        "Pool", lambda n: ComparedPool(n, *POOL_WORLDS[n % len(POOL_WORLDS)][1:]), "allocate*2 share release_ids*2"
    ),
    "tree": machine("Tree", lambda n: ComparedTree(n, *TREE_WORLDS[n % len(TREE_WORLDS)][1:]), TREE_RULES),
    "manager": machine("Manager", make_manager, MANAGER_RULES),
    "slots": machine("Slots", SlotLife, "insert*3 find*2 pin release*4 withdraw"),
    "store": machine("Store", StoreLife, "put*4 get*4 look pin unpin remove clear"),
    "scheduler": machine("SchedulerOf", ComparedScheduler, "arrive*2 computed*6 failed abort"),
}
