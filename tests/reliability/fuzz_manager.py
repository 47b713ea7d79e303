"""BlockManager and CacheEngine: sequences, counts, positions and maps of blocks of every kind."""

import contextlib
import functools
import random
from typing import Any

import torch
from fuzz_blocks import as_integers
from fuzz_caches import LAYOUTS
from fuzz_case import Case
from support.insides import sequences_of

from kvpage import BlockManager, CacheConfig, CacheEngine, Explanation, ModelConfig, OutOfBlocks

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 16, 6, 4


class ManagerWorld:
    """Sequences that grow, fork, swap and end. A wrong call that is taken is as good as any other."""

    covers: tuple[str, ...] = ("kvpage.BlockManager", "kvpage.Allocation", "kvpage.BlockStats")
    calls = "allocate allocate append append commit commit fork private forkable room release before swap_out swap_in"
    calls += " ids tables slots all_slots questions explain moves moves pin unpin prefetch drop make"

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.num_made = rng, 0
        self.pins: list[int] = []
        self.manager = self._new_manager()

    def __enter__(self) -> "ManagerWorld":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            return
        manager = self.manager
        for seq_id in self._known():
            manager.release(seq_id)
        manager.check()
        pinned = {block_id for match, _ in manager.space.pins._pins.values() for block_id in match.block_ids.tolist()}
        assert manager.num_free_blocks == NUM_BLOCKS - len(pinned)

    def snapshot(self) -> object:
        manager = self.manager
        states = {seq_id: sequences_of(manager).state(seq_id) for seq_id in sequences_of(manager).on_device}
        running = [
            (
                seq_id,
                manager.block_ids(seq_id).tolist(),
                seq.num_tokens,
                seq.num_written,
                seq.pending.tolist(),
                seq.num_left,
            )
            for seq_id, seq in states.items()
        ]
        off_device = sequences_of(manager).swapped.items()
        swapped = [(seq_id, seq.host_ids.tolist(), seq.num_written) for seq_id, seq in off_device]
        tree, moves = manager.tree, [(kind, pairs.tolist()) for kind, pairs in manager.space._moves]
        numbers = (
            tree.num_matches - len(manager.space.pins),
            tree.num_cached + manager.pool.num_free,
            manager.pool.num_free,
        )
        return running, swapped, numbers, moves

    def check(self) -> None:
        self.manager.check()

    def case(self, rng: random.Random) -> Case:
        return getattr(self, f"_{rng.choice(self.calls.split())}")()

    def _new_manager(self) -> BlockManager:
        return BlockManager(
            NUM_BLOCKS,
            BLOCK_SIZE,
            self.rng.random() < 0.8,
            num_host_blocks=self.rng.choice((0, NUM_HOST_BLOCKS)),
            share_parts=self.rng.random() < 0.7,
            pin_quota=4,
        )

    def _known(self) -> list[Any]:
        return [*sequences_of(self.manager).on_device, *sequences_of(self.manager).swapped]

    def _tokens(self, most: int = 14) -> list[int]:
        return [self._token() for _ in range(self.rng.randint(1, most))]

    def _token(self) -> int:
        return self.rng.choice((1, 1, 1, 2))

    def _some(self) -> Any:
        known = self._known()
        return self.rng.choice(known) if known and self.rng.random() < 0.95 else "nobody"

    def _call(self, name: str, **args: Any) -> Case:
        """Whether it is possible now is the manager's to say."""
        errors = (KeyError, RuntimeError) if name in ("block_tables", "slot_mapping", "slot_mappings") else (KeyError,)
        may = (*errors, ValueError, OutOfBlocks)
        return Case(f"manager.{name}", getattr(self.manager, name), args, errors=errors, may_raise=may)

    def _allocate(self) -> Case:
        self.num_made += 1
        return self._call(
            "allocate",
            seq_id=self.num_made,
            tokens=as_integers(self._tokens(), self.rng),
            namespace=self.rng.choice((b"", b"a")),
            priority=self.rng.randrange(8),
            max_cached_tokens=self.rng.choice((None, 0, 5)),
        )

    def _append(self) -> Case:
        known = list(sequences_of(self.manager).on_device)
        seq_ids = self.rng.sample(known, min(2, len(known)))
        counts = self.rng.choice((1, 2, [self.rng.randrange(6) for _ in seq_ids]))
        return self._call("append", seq_ids=seq_ids, num_new_tokens=counts)

    def _commit(self) -> Case:
        seq_id = self._some()
        count = 0
        if seq_id in sequences_of(self.manager).on_device:
            seq = sequences_of(self.manager).state(seq_id)
            count = seq.num_tokens - seq.num_written
        tokens = [self._token() for _ in range(self.rng.choice((count, self.rng.randint(0, count))))]
        return self._call("commit", seq_id=seq_id, tokens=as_integers(tokens, self.rng))

    def _fork(self) -> Case:
        self.num_made += 1
        num_tokens = self.rng.choice((None, self.rng.randrange(20)))
        return self._call("fork", seq_id=self._some(), new_seq_id=self.num_made, num_tokens=num_tokens)

    def _private(self) -> Case:
        return self._call("make_private", seq_id=self._some())

    def _forkable(self) -> Case:
        return self._call("first_forkable", seq_id=self._some())

    def _room(self) -> Case:
        return self._call("give_back_room", seq_id=self._some())

    def _release(self) -> Case:
        return self._call("release", seq_id=self._some())

    def _before(self) -> Case:
        return self._call("release_before", seq_id=self._some(), num_tokens=self.rng.randrange(12))

    def _swap_out(self) -> Case:
        return self._call("swap_out", seq_id=self._some())

    def _swap_in(self) -> Case:
        swapped = list(sequences_of(self.manager).swapped.items())
        seq_id, state = self.rng.choice(swapped) if swapped else ("nobody", None)
        num_tokens = 1 if state is None else max(state.num_written + self.rng.randrange(3), 1)
        return self._call("swap_in", seq_id=seq_id, tokens=as_integers([1] * num_tokens, self.rng))

    def _ids(self) -> Case:
        return self._call("block_ids", seq_id=self._some())

    def _tables(self) -> Case:
        return self._call("block_tables", seq_ids=[self._some() for _ in range(self.rng.randrange(3))])

    def _slots(self) -> Case:
        start = self.rng.randrange(6)
        return self._call("slot_mapping", seq_id=self._some(), start=start, end=start + self.rng.randrange(4))

    def _all_slots(self) -> Case:
        seq_ids = [self._some() for _ in range(self.rng.randrange(3))]
        return self._call("slot_mappings", seq_ids=seq_ids, starts=[0] * len(seq_ids), ends=[2] * len(seq_ids))

    def _questions(self) -> Case:
        name = self.rng.choice(("is_swapped", "has_room", "stats"))
        args = {"is_swapped": {"seq_id": self._some()}, "has_room": {"num_blocks": 3}, "stats": {}}[name]
        return self._call(name, **args)

    def _explain(self) -> Case:
        tokens, namespace = self._tokens(), self.rng.choice((b"", b"a"))
        case = self._call("explain", tokens=as_integers(tokens, self.rng), namespace=namespace)
        before = self.snapshot()

        def judge(explanation: Explanation) -> None:
            reached = [group.num_tokens for group in explanation.groups]
            assert explanation.num_tokens == len(tokens)
            assert 0 <= explanation.num_cached_tokens <= min(len(tokens) - 1, *reached)
            assert str(explanation) and self.snapshot() == before

        case.judge = judge
        return case

    def _moves(self) -> Case:
        return self._call("take_moves")

    def _pin(self) -> Case:
        args = {
            "tokens": as_integers(self._tokens(), self.rng),
            "namespace": b"",
            "ttl": self.rng.choice((None, 1e-9, 100.0)),
        }
        pin = self.manager.space.pin
        return Case("manager.space.pin", pin, args, done=self.pins.append, may_raise=(ValueError, OutOfBlocks))

    def _unpin(self) -> Case:
        handle = self.rng.choice(self.pins) if self.pins else 1
        return Case(
            "manager.space.unpin",
            self.manager.space.unpin,
            {"handle": handle},
            errors=(KeyError,),
            may_raise=(KeyError,),
        )

    def _prefetch(self) -> Case:
        args = {"tokens": as_integers(self._tokens(), self.rng), "namespace": b""}
        return Case("manager.space.prefetch", self.manager.space.prefetch, args, may_raise=(ValueError, OutOfBlocks))

    def _drop(self) -> Case:
        args = {"tokens": as_integers(self._tokens(), self.rng), "namespace": b""}
        return Case("manager.space.drop", self.manager.space.drop, args)

    def _make(self) -> Case:
        args = {
            "num_blocks": 10,
            "block_size": 4,
            "enable_prefix_caching": True,
            "num_host_blocks": 3,
            "share_parts": True,
        }
        args |= {"host_policy": None, "rule": None, "pin_quota": 0}
        return Case("BlockManager", functools.partial(make_manager, BlockManager), args)


def make_manager(kind: type[BlockManager], /, **given: Any) -> Any:
    """Sizes that are allowed and do not fit into the machine are no finding."""
    for name in ("num_blocks", "num_host_blocks", "num_slots", "num_host_slots"):
        size = given.get(name)
        if type(size) is int and 10**6 < size < 2**31:
            return None
    return kind(**given)


class EngineWorld:
    """CacheEngine: swaps and copies with maps of every kind, and its making."""

    covers = ("kvpage.CacheEngine", "kvpage.Transfer", "kvpage.CacheLayout")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        backend, kv_layout = rng.choice(LAYOUTS)
        self.model = ModelConfig(8, 1, ("full_attention",) * 2, torch.float32, backend == "mla")
        self.config = CacheConfig(4, 5, 3, "auto", backend, kv_layout, rng.choice(("separate", "packed")))
        self.engine = CacheEngine(self.config, self.model)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        for cache in (*self.engine.gpu_cache, *self.engine.cpu_cache):
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def __enter__(self) -> "EngineWorld":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def snapshot(self) -> object:
        tiers = (*self.engine.gpu_cache, *self.engine.cpu_cache)
        return [cache.contiguous().numpy().tobytes() for cache in tiers], self.engine.poll()

    def check(self) -> None:
        assert all(bool(cache.isfinite().all()) for cache in (*self.engine.gpu_cache, *self.engine.cpu_cache))

    def case(self, rng: random.Random) -> Case:
        name = rng.choice(("swap_in", "swap_out", "copy", "swap_in", "swap_out", "copy", "block_size", "make"))
        if name == "block_size":
            args = {"cache_config": self.config, "model_config": self.model, "parallel_config": None}
            return Case("CacheEngine.get_cache_block_size", CacheEngine.get_cache_block_size, args)
        if name == "make":
            args = {
                "cache_config": self.config,
                "model_config": self.model,
                "parallel_config": None,
                "device_config": None,
            }
            return Case("CacheEngine", CacheEngine, args | {"calibration": None, "kv_scales": None})
        return self._move(name)

    def _move(self, name: str) -> Case:
        num_src, num_dst = {"swap_in": (3, 5), "swap_out": (5, 3), "copy": (2, 3)}[name]
        count = self.rng.randrange(min(num_src, num_dst) + 1)
        first = 2 if name == "copy" else 0
        pairs = [self.rng.sample(range(num_src), count), self.rng.sample(range(first, first + num_dst), count)]
        mapping = torch.tensor(pairs, dtype=torch.int64).t().contiguous()
        args: dict[str, Any] = {"src_to_dsts" if name == "copy" else "src_to_dst": mapping}
        if name != "copy" and self.rng.random() < 0.4:
            args |= {"non_blocking": True, "pools": (None, None), "on_done": None, "by_layer": self.rng.random() < 0.5}
        return Case(f"CacheEngine.{name}", getattr(self.engine, name), args, done=wait)


def wait(transfer: Any) -> None:
    if transfer is not None:
        with contextlib.suppress(TypeError):  # on_done's own, where it takes no transfer
            transfer.wait()
