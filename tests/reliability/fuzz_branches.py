"""Sequences that their owner steers: Branches, PagedTokenTrie, and KVPageCache in a model's own forward."""

import random
from typing import Any

import torch
from fuzz_case import Case, World
from fuzz_serving import model
from fuzz_values import as_integers
from support.insides import cached_rows

from kvpage import CacheConfig, OutOfBlocks
from kvpage.serving import Branches, Engine, EngineConfig, KVPageCache, KVPageCachePool, PagedTokenTrie

NUM_BLOCKS, B = 16, 4


def tokens_of(rng: random.Random, most: int = 10) -> list[int]:
    return [rng.randrange(1, 4) for _ in range(rng.randint(1, most))]


class BranchWorld(World):
    """Branches and a trie over one engine, which has few blocks."""

    covers = ("kvpage.serving.Branches", "kvpage.serving.Branch", "kvpage.serving.PagedTokenTrie")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.engine = Engine.from_model(model(), EngineConfig(CacheConfig(B, NUM_BLOCKS, 0), max_model_len=32))
        self.branches, self.live = Branches(self.engine), []
        self.trie = PagedTokenTrie(self.engine, b"trie", 3, 5)

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.branches.close()
            self.trie.close()
            self.check()
            assert self.engine.manager.num_free_blocks == NUM_BLOCKS and not self.engine.manager.tree.num_matches

    def snapshot(self) -> object:
        """Not which of the trie's branches live: they end where blocks lack, also for a call that then fails."""
        branches = [(b.token_ids.tolist(), b.num_computed, b.num_room, b in self.branches) for b in self.live]
        return branches, len(self.branches), self.engine.scheduler.preemptions.num

    def check(self) -> None:
        self.engine.manager.check()
        assert self.trie.num_branches <= self.trie.max_branches and self.trie.num_logprobs <= self.trie.max_logprobs

    def case(self, rng: random.Random) -> Case:
        self.live = [branch for branch in self.live if branch in self.branches]
        names = "start start fork append compute compute wanted release first logprobs logprobs clear make"
        return getattr(self, f"_{rng.choice(names.split())}")()

    def _some(self) -> Any:
        return self.rng.choice(self.live) if self.live else None

    def _start(self) -> Case:
        if len(self.live) > 4:
            return self._release()
        args = {"tokens": as_integers(tokens_of(self.rng), self.rng), "namespace": b""}
        return Case("branches.start", self.branches.start, args, may_raise=(OutOfBlocks,), done=self.live.append)

    def _fork(self) -> Case:
        branch = self._some()
        if branch is None:
            return self._start()
        args = {"branch": branch, "num_tokens": self.rng.choice((None, len(branch)))}
        case = Case("branches.fork", self.branches.fork, args, may_raise=(ValueError, OutOfBlocks))
        case.errors, case.done = (KeyError,), self.live.append
        return case

    def _append(self) -> Case:
        branch = self._some()
        if branch is None or len(branch) > 24:
            return self._start()
        return Case("branch.append", branch.append, {"tokens": as_integers(tokens_of(self.rng, 3), self.rng)})

    def _due(self) -> list[Any]:
        return [branch for branch in self.live if branch.num_computed < len(branch)]

    def _compute(self) -> Case:
        may = (OutOfBlocks, ValueError)  # none is due; or a wrong append has given it tokens that are none
        args = {"branches": self._due(), "wanted": None}
        return Case("branches.compute", self.branches.compute, args, may_raise=may, errors=(KeyError,))

    def _wanted(self) -> Case:
        due = self._due()
        args = {"branches": due, "wanted": [[branch.num_computed + 1] for branch in due]}
        may = (OutOfBlocks, ValueError)
        return Case("branches.compute", self.branches.compute, args, may_raise=may, errors=(KeyError,))

    def _release(self) -> Case:
        branch = self._some()
        args = {"branches": [] if branch is None else [branch]}
        return Case("branches.release", self.branches.release, args, errors=(KeyError,))

    def _first(self) -> Case:
        branch = self._some()
        if branch is None:
            return self._start()
        return Case("branches.first_forkable", self.branches.first_forkable, {"branch": branch}, errors=(KeyError,))

    def _logprobs(self) -> Case:
        args = {"token_lists": [tokens_of(self.rng) for _ in range(self.rng.randrange(4))]}

        def judge(found: torch.Tensor) -> None:
            assert found.shape == (len(args["token_lists"]), self.engine.vocab_size)
            assert torch.allclose(found.exp().sum(-1), torch.ones(len(found)), atol=1e-4)

        return Case(
            "trie.next_token_logprobs", self.trie.next_token_logprobs, args, may_raise=(OutOfBlocks,), judge=judge
        )

    def _clear(self) -> Case:
        return Case("trie.clear", self.trie.clear)

    def _make(self) -> Case:
        args = {"engine": self.engine, "namespace": b"", "max_branches": 3, "max_logprobs": 4}
        return Case("PagedTokenTrie", PagedTokenTrie, args, done=lambda made: made.close(), fixed=("engine",))


class CacheWorld(World):
    """KVPageCaches over one pool, and the model's forward with them."""

    covers = ("kvpage.serving.KVPageCache", "kvpage.serving.KVPageCachePool")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pool = KVPageCachePool.from_model(model(), CacheConfig(B, NUM_BLOCKS, 0))
        self.caches: list[KVPageCache] = []

    def __exit__(self, kind: object, *error: object) -> None:
        for cache in self.caches:
            cache.release()
        if kind is None:
            self.check()
            assert self.pool.manager.num_free_blocks == NUM_BLOCKS and not self.pool.manager.tree.num_matches

    def snapshot(self) -> object:
        manager = self.pool.manager
        rows = [(len(cached_rows(cache)), cached_rows(cache).length, cache.is_in_forward) for cache in self.caches]
        return rows, manager.num_free_blocks, manager.tree.num_matches, len(model()._forward_pre_hooks)

    def check(self) -> None:
        self.pool.manager.check()

    def case(self, rng: random.Random) -> Case:
        while len(self.caches) > 3:
            self.caches.pop(0).release()
        names = "make make make forward forward forward crop crop reorder select repeat length reset release update"
        names += " pool" * (rng.random() < 0.2)  # which tries the model out
        return getattr(self, f"_{rng.choice(names.split())}")()

    def _some(self) -> KVPageCache | None:
        return self.rng.choice(self.caches) if self.caches else None

    def _make(self) -> Case:
        num_rows, num_tokens = self.rng.choice((1, 1, 2)), self.rng.randint(1, 9)
        ids = torch.tensor([[self.rng.randrange(1, 4) for _ in range(num_tokens)] for _ in range(num_rows)])
        args = {"pool": self.pool, "input_ids": ids, "namespace": b""}
        args |= {"attention_mask": self.rng.choice((None, torch.ones_like(ids)))}
        case = Case("KVPageCache", KVPageCache, args, may_raise=(OutOfBlocks,), done=self.caches.append)
        case.fixed = ("pool",)
        return case

    def _forward(self) -> Case:
        """The tokens that the cache was made with, and then any."""
        cache = self._some()
        if cache is None or not len(cached_rows(cache)):
            return self._make()
        left = cached_rows(cache)._tokens[:, cached_rows(cache).length :]
        drawn = [[self.rng.randrange(1, 4)] for _ in range(len(cached_rows(cache)))]
        ids = torch.from_numpy(left).long() if left.size else torch.tensor(drawn)
        args = {"input_ids": ids, "past_key_values": cache, "use_cache": True}

        def forward(**given: Any) -> Any:
            with torch.no_grad():
                return model()(**given)

        case = Case("model.forward", forward, args, may_raise=(OutOfBlocks, ValueError))
        case.fixed = ("past_key_values", "use_cache", "input_ids")
        return case

    def _method(self, name: str, args: dict[str, Any]) -> Case:
        cache = self._some()
        if cache is None:
            return self._make()
        may = (OutOfBlocks, ValueError)
        return Case(f"cache.{name}", getattr(cache, name), args, may_raise=may)

    def _crop(self) -> Case:
        return self._method("crop", {"num_tokens": self.rng.choice((-1, 0, 2, 5))})

    def _reorder(self) -> Case:
        return self._method("reorder_cache", {"beam_idx": torch.tensor([0])})

    def _select(self) -> Case:
        indices = self.rng.choice((torch.tensor([0]), torch.tensor([True])))
        return self._method("batch_select_indices", {"indices": indices})

    def _repeat(self) -> Case:
        return self._method("batch_repeat_interleave", {"repeats": self.rng.choice((1, 1, 2))})

    def _length(self) -> Case:
        return self._method("get_seq_length", {"layer_idx": 0})

    def _reset(self) -> Case:
        return self._method("reset", {})

    def _release(self) -> Case:
        return self._method("release", {})

    def _update(self) -> Case:
        """Outside of a forward it is always refused."""
        rows = torch.zeros(1, 2, 1, 8)
        args = {"key_states": rows, "value_states": rows, "layer_idx": 0}
        return self._method("update", args)

    def _pool(self) -> Case:
        args = {"model": model(), "cache_config": CacheConfig(B, 4, 0), "share_parts": True, "host_policy": None}
        args |= {"pin_quota": 0, "kv_scales": None}
        return Case("KVPageCachePool.from_model", KVPageCachePool.from_model, args, fixed=("model",))
