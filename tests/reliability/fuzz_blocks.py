"""BlockPool and PrefixTree, SlotAllocator, SlotTree and PrefixCacheManager: ids and tokens of every kind."""

import contextlib
import random
from typing import Any

import numpy as np
import torch
from fuzz_case import Case

from kvpage import _C, BlockPool, Match, OutOfBlocks, PrefixTree
from kvpage.extras.slots import PrefixCacheManager

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 24, 8, 4


def as_integers(values: list[int], rng: random.Random) -> Any:
    """The same numbers in one of the forms that are taken."""
    forms = (
        list,
        lambda v: np.array(v, np.int32),
        lambda v: np.array(v, np.int64),
        lambda v: torch.tensor(v, dtype=torch.int32),
    )
    return rng.choice(forms)(values)


def prompt(rng: random.Random, most: int = 20) -> list[int]:
    """Of few tokens, so that prompts share beginnings."""
    return [rng.choice((1, 1, 1, 2)) for _ in range(rng.randrange(most + 1))]


class TreeWorld:
    """A pool, a tree over it, with or without a host tier; the references and matches that are held."""

    covers = ("kvpage.BlockPool", "kvpage.PrefixTree", "kvpage.Match", "kvpage.PartMatch")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pool, self.host_pool = BlockPool(NUM_BLOCKS), BlockPool(NUM_HOST_BLOCKS)
        self.tree = PrefixTree(self.pool, BLOCK_SIZE, self.host_pool if rng.random() < 0.6 else None)
        self.other_tree = PrefixTree(BlockPool(4), BLOCK_SIZE)
        self.foreign = self.other_tree.match([1, 2, 3])
        self.owned: list[int] = []
        self.matches: list[Match] = []

    def __enter__(self) -> "TreeWorld":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.check()
            for match in self.matches:
                self.tree.release(match)
            assert self.tree.num_matches == 0
            self.tree.clear()
            assert self.pool.num_free + len(set(self.owned)) == NUM_BLOCKS
            assert self.tree.num_host_cached == 0

    def snapshot(self) -> object:
        counts = [self.pool.ref_count(i) for i in range(NUM_BLOCKS)]
        hosts = [self.host_pool.ref_count(i) for i in range(NUM_HOST_BLOCKS)]
        tree = self.tree
        numbers = (tree.num_cached, tree.num_evictable, tree.num_host_cached, tree.num_host_evictable, tree.num_matches)
        matches = [(m.is_released, m.num_tokens, None if m.is_released else m.num_device_blocks) for m in self.matches]
        return counts, hosts, numbers, tree.num_nodes, matches, self.pool.num_free, self.host_pool.num_free

    def check(self) -> None:
        self.pool.check()
        self.host_pool.check()
        self.tree.check(self.owned, [])

    def case(self, rng: random.Random) -> Case:
        names = "allocate allocate_one share release release_one ref_count match match_part pin unpin insert insert"
        names += " insert_after trim promote write_out evict demote evict_host drop clear entries hottest log questions"
        names += " check make"
        return getattr(self, f"_{rng.choice(names.split())}")()

    # --- the pool ---

    def _allocate(self) -> Case:
        n = self.rng.randrange(4)
        may = (OutOfBlocks,)
        return Case(
            "pool.allocate",
            self.pool.allocate,
            {"n": n},
            may_raise=may,
            done=lambda ids: self.owned.extend(ids.tolist()),
        )

    def _allocate_one(self) -> Case:
        return Case("pool.allocate_one", self.pool.allocate_one, may_raise=(OutOfBlocks,), done=self.owned.append)

    def _some_owned(self) -> list[int]:
        return self.rng.sample(self.owned, min(len(self.owned), self.rng.randrange(4)))

    def _share(self) -> Case:
        ids = self._some_owned()
        return self._counted(Case("pool.share", self.pool.share, {"ids": as_integers(ids, self.rng)}))

    def _release(self) -> Case:
        ids = self._some_owned()
        return self._counted(Case("pool.release", self.pool.release, {"ids": as_integers(ids, self.rng)}))

    def _release_one(self) -> Case:
        if not self.owned:
            return self._allocate()
        return self._counted(
            Case("pool.release_one", self.pool.release_one, {"block_id": self.rng.choice(self.owned)}, 1)
        )

    def _counted(self, case: Case) -> Case:
        """What is owned afterwards is what the pool counts and the tree does not hold."""
        before = {i: self.pool.ref_count(i) for i in range(NUM_BLOCKS)}

        def done(_: object) -> None:
            for block_id, count in before.items():
                change = self.pool.ref_count(block_id) - count
                self.owned += [block_id] * change
                for _ in range(-change):
                    self.owned.remove(block_id)

        case.done = done
        return case

    def _ref_count(self) -> Case:
        return Case("pool.ref_count", self.pool.ref_count, {"block_id": self.rng.randrange(NUM_BLOCKS)})

    # --- the tree ---

    def _match(self) -> Case:
        args = {
            "tokens": as_integers(prompt(self.rng), self.rng),
            "namespace": self.rng.choice((b"", b"a")),
            "priority": self.rng.randrange(8),
            "num_left_over": self.rng.randrange(BLOCK_SIZE + 2),
        }
        return Case("tree.match", self.tree.match, args, done=self.matches.append)

    def _some_match(self) -> Any:
        wrong = self.rng.random()
        if wrong < 0.1:
            return self.foreign
        return self.rng.choice(self.matches) if self.matches else self.foreign

    def _match_part(self) -> Case:
        tokens = as_integers(prompt(self.rng), self.rng)
        args = {"match": self._some_match(), "tokens": tokens, "num_left_over": self.rng.randrange(3)}

        def done(part: Any) -> None:
            if part is not None:
                self.matches.append(part.match)
                assert 1 <= part.num_tokens < BLOCK_SIZE and part.block_id >= 0

        return Case("tree.match_part", self.tree.match_part, args, done=done, may_raise=(ValueError,))

    def _pin(self) -> Case:
        args = {"match": self._some_match()}
        return Case("tree.pin", self.tree.pin, args, done=self.matches.append, may_raise=(ValueError,))

    def _forget_released(self, _: object = None) -> None:
        self.matches = [match for match in self.matches if not match.is_released]

    def _unpin(self) -> Case:
        args = {"match": self._some_match()}
        return Case("tree.release", self.tree.release, args, done=self._forget_released, may_raise=(ValueError,))

    def _insert(self, after: Any = None) -> Case:
        alone = [i for i in self.owned if self.owned.count(i) == 1]
        num_blocks = self.rng.randrange(min(len(alone), 3) + 1)
        ids = self.rng.sample(alone, num_blocks)
        tokens = [self.rng.choice((1, 1, 1, 2)) for _ in range(num_blocks * BLOCK_SIZE)]
        args = {
            "tokens": as_integers(tokens, self.rng),
            "block_ids": as_integers(ids, self.rng),
            "namespace": self.rng.choice((b"", b"a")) if after is None else b"",
            "after": after,
            "priority": 0,
        }
        case = self._counted(Case("tree.insert", self.tree.insert, args, may_raise=(ValueError,)))
        counted = case.done

        def done(match: Match) -> None:
            passed = set(self.owned) & set(match.block_ids.tolist())
            assert counted is not None
            counted(match)
            for block_id in passed:  # the tree's now: the count is the same
                if block_id in self.owned:
                    self.owned.remove(block_id)
            self.matches.append(match)
            self._forget_released()

        case.done = done
        case.fixed = ("block_ids",) if self.rng.random() < 0.5 else ()
        return case

    def _insert_after(self) -> Case:
        return self._insert(self._some_match())

    def _trim(self) -> Case:
        return Case("tree.trim", self.tree.trim, {"match": self._some_match()}, may_raise=(ValueError,))

    def _promote(self) -> Case:
        alone = [i for i in self.owned if self.owned.count(i) == 1]
        ids = self.rng.sample(alone, min(len(alone), self.rng.randrange(3)))
        args = {"match": self._some_match(), "block_ids": as_integers(ids, self.rng)}

        def done(pairs: np.ndarray) -> None:
            for block_id in pairs[:, 1].tolist():
                self.owned.remove(block_id)

        return Case("tree.promote", self.tree.promote, args, done=done, may_raise=(ValueError,))

    def _write_out(self) -> Case:
        args = {"match": self._some_match(), "min_hits": self.rng.randrange(3)}
        return Case("tree.write_out", self.tree.write_out, args, may_raise=(ValueError,))

    def _evict(self) -> Case:
        return Case("tree.evict", self.tree.evict, {"num_blocks": self.rng.randrange(5)})

    def _demote(self) -> Case:
        return Case("tree.demote", self.tree.demote, {"num_blocks": self.rng.randrange(5)})

    def _evict_host(self) -> Case:
        return Case("tree.evict_host", self.tree.evict_host, {"num_blocks": self.rng.randrange(5)})

    def _drop(self) -> Case:
        args = {"tokens": as_integers(prompt(self.rng), self.rng), "namespace": self.rng.choice((b"", b"a"))}
        return Case("tree.drop", self.tree.drop, args)

    def _clear(self) -> Case:
        return Case("tree.clear", self.tree.clear)

    def _entries(self) -> Case:
        args = {"limit": self.rng.randrange(9), "namespace": self.rng.choice((None, b"", b"a"))}
        return Case("tree.entries", self.tree.entries, args)

    def _hottest(self) -> Case:
        args = {"limit": self.rng.randrange(9), "max_tokens": self.rng.randrange(9), "namespace": None}
        return Case("tree.hottest", self.tree.hottest, args | {"namespace": self.rng.choice((None, b"", b"a"))})

    def _log(self) -> Case:
        if self.rng.random() < 0.5:
            return Case("tree.log_changes", self.tree.log_changes, {"max_bytes": self.rng.choice((0, 100, 10**6))})
        name = self.rng.choice(("take_changes", "lose_changes"))
        return Case(f"tree.{name}", getattr(self.tree, name), may_raise=(ValueError,))

    def _questions(self) -> Case:
        match = self._some_match()
        if self.rng.random() < 0.5:
            start = self.rng.randrange(match.num_blocks + 1)
            return Case("match.block_ids_from", match.block_ids_from, {"start_block": start}, may_raise=(ValueError,))
        names = ("num_blocks", "num_tokens", "num_device_blocks", "priority", "block_ids", "is_released")
        name = self.rng.choice(names)
        return Case(f"match.{name}", lambda: getattr(match, name), may_raise=(ValueError,))

    def _check(self) -> Case:
        args = {"owned_ids": list(self.owned), "owned_host_ids": []}
        return Case("tree.check", self.tree.check, args, errors=(RuntimeError,))

    def _make(self) -> Case:
        if self.rng.random() < 0.5:
            return Case("BlockPool", _small(BlockPool, "num_blocks"), {"num_blocks": self.rng.randrange(100)})
        args = {"pool": self.pool, "block_size": self.rng.randrange(1, 40), "host_pool": self.host_pool}
        return Case("PrefixTree", PrefixTree, args)


def _small(make: Any, name: str) -> Any:
    """A size that is allowed and does not fit into the machine is no finding."""

    def call(**given: Any) -> Any:
        size = given.get(name)
        if isinstance(size, (int, np.integer)) and 10**6 < size < 2**31:
            return None
        return make(**given)

    return call


class SlotWorld:
    """Whole-sequence slots."""

    covers = (
        "kvpage._C.SlotAllocator",
        "kvpage._C.SlotTree",
        "kvpage.extras.slots.PrefixCacheManager",
        "kvpage.extras.slots.SlotAllocator",
    )

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.num_slots = rng, 6
        self.slots, self.manager = _C.SlotAllocator(self.num_slots), PrefixCacheManager(rng.choice((0, 10, 40)))
        self.kv = torch.randn(
            2, 2, self.num_slots, 24, 1, 4, generator=torch.Generator().manual_seed(rng.getrandbits(32))
        )

    def __enter__(self) -> "SlotWorld":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def snapshot(self) -> object:
        slots = [(self.slots.is_free(i), self.slots.version(i)) for i in range(self.num_slots)]
        manager = self.manager
        numbers = (manager.num_tokens, manager.num_over, manager.num_slots, manager.num_nodes, manager.num_pins)
        return slots, self.slots.free_count, numbers, self.kv.numpy().tobytes()

    def check(self) -> None:
        self.manager.check()
        assert self.slots.free_count == sum(self.slots.is_free(i) for i in range(self.num_slots))

    def case(self, rng: random.Random) -> Case:
        slot, tokens = rng.randrange(self.num_slots), as_integers(prompt(rng), rng)
        refused = (ValueError,)
        allocator = rng.choice((None, self.slots))
        makers = (
            lambda: Case("slots.alloc", self.slots.alloc),
            lambda: Case("slots.free", self.slots.free, {"slot": slot}, 1, errors=(OverflowError,), may_raise=refused),
            lambda: Case("slots.occupy", self.slots.occupy, {"slot": slot}, may_raise=refused),
            lambda: Case("slots.is_free", self.slots.is_free, {"slot": slot}),
            lambda: Case("slots.version", self.slots.version, {"slot": slot}),
            lambda: Case(
                "slots.insert",
                self.manager.insert,
                {"token_ids": tokens, "slot": slot, "slot_ver": self.slots.version(slot)},
                may_raise=refused,
            ),
            lambda: self._find("find", tokens, allocator),
            lambda: self._find("pin", tokens, allocator),
            lambda: Case("slots.release", self.manager.release, {"token_ids": tokens}, may_raise=refused),
            lambda: Case("slots.withdraw", self.manager.withdraw, {"slot": slot}),
            lambda: Case("SlotAllocator", _small(_C.SlotAllocator, "max_slots"), {"max_slots": 10}),
            lambda: Case("PrefixCacheManager", PrefixCacheManager, {"max_capacity": 10}),
            lambda: self._copy(tokens, slot, allocator),
        )
        return rng.choice(makers)()

    def _find(self, name: str, tokens: Any, allocator: Any) -> Case:
        args = {"token_ids": tokens, "allocator": allocator}
        return Case(f"slots.{name}", getattr(self.manager, name), args, may_raise=(ValueError,))

    def _copy(self, tokens: Any, slot: int, allocator: Any) -> Case:
        args = {"token_ids": tokens, "target_slot": slot, "kv_cache": self.kv, "n_layers": 2, "allocator": allocator}
        case = Case("slots.copy_kv", self.manager.copy_kv, args, may_raise=(ValueError,))
        if allocator is not None:  # what is of an old version is forgotten, also where the copy is refused
            with contextlib.suppress(ValueError):
                self.manager.find(tokens, allocator)
            case.fixed = ("token_ids", "allocator")
        return case
