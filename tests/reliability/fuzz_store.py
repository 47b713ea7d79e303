"""KVStore over a tier in memory: its blocks, layers and states. StoreLives have its other calls."""

import random
from typing import Any

import torch
from fuzz_case import Case, World

from kvpage import CacheConfig, CacheEngine, ModelConfig
from kvpage.layout.groups import StateLayout, StatePart
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, metadata_of

CHUNK, LAYERS, HEADS, SIZE = 4, 2, 1, 4
CALLS = ("keys_of", "flush", "store_blocks", "load_blocks", "load_layers", "layer")
CALLS += ("states_put", "states_get", "states_longest", "states_explain")
CALLS += ("layers_there", "layers_put", "layers_load", "layers")
LAYOUT = StateLayout.of_parts([StatePart(0, "conv", 0, (3,), torch.float32)])


class StoreWorld(World):
    covers = ("kvpage.store.metadata_of", "kvpage.store.LayerLoad", "kvpage.store.StateRecords")
    covers += ("kvpage.store.LayerChunks",)

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.loads = rng, []
        model, cache = ModelConfig(SIZE, HEADS, ("full_attention",) * LAYERS, torch.float32), CacheConfig(CHUNK, 6, 0)
        self.engine = CacheEngine(cache, model)
        self.metadata = KVStoreMetadata("m", fmt=rng.choice(("vllm", "huggingface")), kv_dtype=torch.float32)
        config = KVStoreConfig(CHUNK, ("memory://?size=1MiB",), num_threads=1)
        self.store = KVStore(config, self.metadata)
        self.block_store = KVStore(config, metadata_of(self.engine, "m"))
        self.states = self.store.states(LAYOUT, torch.float32)
        self.layers = self.store.layers(self.engine)

    def __exit__(self, *error: object) -> None:
        for load in self.loads:
            load.close()
        self.store.close()
        self.block_store.close()

    def snapshot(self) -> object:
        for store in (self.store, self.block_store):
            store.flush()  # of what an earlier call has left to be written behind it
        blocks = [cache.numpy().tobytes() for cache in self.engine.gpu_cache]
        counts = [tier for store in (self.store, self.block_store) for tier in store.stats().tiers]
        return blocks, [(tier.num_records, tier.num_bytes) if tier else None for tier in counts]

    def check(self) -> None:
        assert self.store.stats().corrupt_records == self.block_store.stats().corrupt_records == 0

    def case(self, rng: random.Random) -> Case:
        tokens = [rng.choice((1, 1, 2)) for _ in range(rng.randrange(1, 11))]
        return getattr(self, f"_{rng.choice(CALLS)}")(tokens)

    def _keys_of(self, tokens: list[int]) -> Case:
        return Case("store.keys_of", self.store.keys_of, {"tokens": tokens, "namespace": b"right"})

    def _flush(self, tokens: list[int]) -> Case:
        return Case("store.flush", self.store.flush, {"sync": False})

    def _state(self, tokens: list[int]) -> bytearray:
        """A function of each token and its place."""
        return bytearray(sum(token << i for i, token in enumerate(tokens)) % 251 for _ in range(LAYOUT.slot_bytes))

    def _states_put(self, tokens: list[int]) -> Case:
        is_right = self.rng.random() < 0.5
        args = {"tokens": tokens, "state": self._state(tokens), "namespace": b"right" if is_right else b"wrong"}
        case = Case("states.put", self.states.put, args | {"skip_existing": True, "deadline": 60.0})
        case.fixed = ("tokens", "state") if is_right else ("namespace",)
        return case

    def _states_get(self, tokens: list[int]) -> Case:
        memory = bytearray(LAYOUT.slot_bytes)
        args = {"tokens": tokens, "state": memory, "namespace": b"right", "deadline": 60.0}

        def judge(is_there: bool) -> None:
            assert not is_there or memory == self._state(tokens)

        return Case("states.get_into", self.states.get_into, args, judge=judge)

    def _states_longest(self, tokens: list[int]) -> Case:
        args = {"tokens": tokens, "namespace": b"right", "most": len(tokens)}
        return Case("states.longest", self.states.longest, args)

    def _states_explain(self, tokens: list[int]) -> Case:
        return Case("states.explain", self.states.explain, {"tokens": tokens, "namespace": b"right"})

    def _blocks(self, tokens: list[int]) -> dict[str, Any]:
        table = self.rng.sample(range(6), -(-len(tokens) // CHUNK))
        return {"tokens": tokens, "engine": self.engine, "block_table": torch.tensor(table, dtype=torch.int32)}

    def _store_blocks(self, tokens: list[int]) -> Case:
        args = self._blocks(tokens) | {"namespace": b"", "skip_existing": True}
        return Case("store.store_blocks", self.block_store.store_blocks, args)

    def _load_blocks(self, tokens: list[int]) -> Case:
        args = self._blocks(tokens) | {"start": 0, "namespace": b""}
        return Case("store.load_blocks", self.block_store.load_blocks, args)

    def _layers(self, tokens: list[int]) -> Case:
        return Case("store.layers", self.store.layers, {"engine": self.engine})

    def _layers_there(self, tokens: list[int]) -> Case:
        return Case("layers.there", self.layers.there, {"tokens": tokens, "namespace": b""})

    def _layers_put(self, tokens: list[int]) -> Case:
        first = self.rng.randint(0, len(tokens) // CHUNK)
        args = {"tokens": tokens, "block_table": self._blocks(tokens)["block_table"], "first_chunk": first}
        return Case("layers.put", self.layers.put, args | {"namespace": b""})

    def _layers_load(self, tokens: list[int]) -> Case:
        args = {"tokens": tokens, "block_table": self._blocks(tokens)["block_table"], "start": 0, "namespace": b""}
        return Case("layers.load", self.layers.load, args)

    def _load_layers(self, tokens: list[int]) -> Case:
        args = self._blocks(tokens) | {"start": 0, "namespace": b""}

        def judge(load: Any) -> None:
            assert load.result(60.0) <= len(tokens)

        def done(load: Any) -> None:
            assert 0 <= load.result(60.0) <= 6 * CHUNK  # of a wrong call's tokens, too
            load.close()

        return Case("store.load_layers", self.block_store.load_layers, args, judge=judge, done=done)

    def _layer(self, tokens: list[int]) -> Case:
        """What is asked of a load while it goes on, and after."""
        self.block_store.store_blocks(**self._blocks(tokens))
        load = self.block_store.load_layers(**self._blocks(tokens))
        self.loads.append(load)
        if len(self.loads) > 3:
            self.loads.pop(0).close()
        load.result()
        return Case("load.wait", load.wait, {"layer": 0, "timeout": 60.0}, errors=(TimeoutError,))
