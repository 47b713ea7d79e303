"""kvpage.blend: boundaries, indices, rotations, the executor, segments and their stores, and retrievers."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fuzz_case import Case, World
from fuzz_memory import Arena, ArenaWorld
from fuzz_values import as_integers

from kvpage import CacheLayout, ops
from kvpage.blend import (
    BlendConfig,
    ContentBoundaries,
    MemorySegments,
    RotaryTables,
    SegmentKV,
    SegmentStore,
    StoredSegments,
    create_index,
    indices_to_mask,
    mask_to_indices,
    measure_sensitivity,
    select_tokens,
    token_deviation,
)
from kvpage.integrations import lmcache
from kvpage.integrations.lmcache import (
    CacheBlendImpl,
    SegmentBlendRetriever,
    SPTBlendRetriever,
    gather_rotated,
    load_rotated,
)
from kvpage.layout.rotation import Rotation
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata

HEADS, SIZE, LAYERS, CHUNK, BLOCKS = 2, 8, 3, 4, 5
FREQUENCIES = torch.tensor([1.0, 0.5, 0.25, 0.125])
ROTARY = RotaryTables.of_frequencies(FREQUENCIES, SIZE)


def names(*given: str) -> tuple[str, ...]:
    """Return the public names: of kvpage.blend, or of the blender in LMCache's shape."""
    rooms = {name: "kvpage.integrations.lmcache" for name in lmcache.__all__}
    return tuple(f"{rooms.get(name, 'kvpage.blend')}.{name}" for name in given)


class BlendMathWorld(World):
    """What computes and keeps nothing. Tensors of its own; what is given must stay as it is."""

    covers = names(
        "create_index", "indices_to_mask", "mask_to_indices", "token_deviation", "select_tokens", "RotaryTables",
        "ContentBoundaries", "BlendConfig", "SegmentKV", "CacheBlendImpl", "measure_sensitivity",
    )  # fmt: skip

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))
        self.count = rng.randrange(1, 7)
        self.k, self.v, self.fresh = (self.rows() for _ in range(3))
        self.valid = torch.rand(self.count, generator=self.torch_rng) < 0.6
        self.old = torch.randint(0, 50, (self.count,), generator=self.torch_rng)
        self.new = torch.arange(self.count)
        filters = rng.choice(((), ((1, 0.8),)))
        self.executor = CacheBlendImpl(0.5, 2, rng.choice(("k", "v", "kv")), ROTARY, filters)
        self.layer = 0

    def rows(self) -> torch.Tensor:
        return torch.randn(self.count, HEADS, SIZE, generator=self.torch_rng)

    def snapshot(self) -> object:
        chosen = self.executor.selection
        given = (self.k, self.v, self.fresh, self.valid, self.old, self.new)
        return [t.numpy().tobytes() for t in given], self.executor._next_layer, None if chosen is None else id(chosen)

    def check(self) -> None:
        """What a wrong call that was taken has written would be in the snapshot of the next one."""

    def case(self, rng: random.Random) -> Case:
        makers = (
            self._index, self._to_mask, self._to_indices, self._deviation, self._select, self._rotary, self._rotation,
            self._rotation_between, self._frequencies, self._boundaries, self._cuts, self._config, self._spans,
            self._segment, self._sensitivity, self._executor, self._blend, self._blend, self._blend,
        )  # fmt: skip
        return rng.choice(makers)()

    # --- indices ---

    def _index(self) -> Case:
        args = {"num_dims": 3, "dim": self.rng.choice((0, 1, -1)), "index": torch.tensor([0])}
        return Case("blend.create_index", create_index, args, fixed=("index",))

    def _to_mask(self) -> Case:
        indices = torch.tensor(self.rng.sample(range(8), 3))
        args = {"indices": indices, "size": 8}
        return Case("blend.indices_to_mask", small_mask, args)

    def _to_indices(self) -> Case:
        return Case("blend.mask_to_indices", mask_to_indices, {"mask": self.valid.clone()})

    def _deviation(self) -> Case:
        args = {"fresh": self.fresh, "retrieved": self.k, "valid": self.valid, "token_dim": 0}
        return Case("blend.token_deviation", token_deviation, args)

    def _select(self) -> Case:
        deviation = torch.rand(self.count, generator=self.torch_rng)
        args = {"deviation": deviation, "valid": self.valid, "query_start_loc": [0, self.count], "ratios": [0.5]}
        args |= {"among": self.rng.choice((None, torch.ones(self.count, dtype=torch.bool)))}
        return Case("blend.select_tokens", select_tokens, args)

    # --- rotations ---

    def _rotary(self) -> Case:
        args = {"cos_sin": ROTARY.cos_sin, "head_size": 8, "rotary_size": 4, "is_interleaved": False}
        return Case("RotaryTables", RotaryTables, args | {"scaling": 1.0, "offset": 2}, fixed=("cos_sin",))

    def _frequencies(self) -> Case:
        args = {"frequencies": FREQUENCIES.clone(), "head_size": 8, "scaling": 1.0, "is_interleaved": True}
        return Case("RotaryTables.of_frequencies", RotaryTables.of_frequencies, args)

    def _rotation(self) -> Case:
        args = {"k": self.k, "old": self.old, "new": self.new, "token_dim": 0}
        return Case("RotaryTables.rotate", ROTARY.rotate, args)

    def _rotation_between(self) -> Case:
        return Case("RotaryTables.rotation", ROTARY.rotation, {"old": self.old, "new": self.new, "device": "cpu"})

    # --- boundaries ---

    def _boundaries(self) -> Case:
        return Case("ContentBoundaries", ContentBoundaries, {"window": 2, "min_length": 3, "max_length": 8})

    def _cuts(self) -> Case:
        tokens = np.array([self.rng.randrange(5) for _ in range(self.rng.randrange(40))], np.int32)
        return Case("ContentBoundaries.cuts", ContentBoundaries(2, 3, 8).cuts, {"tokens": tokens})

    def _config(self) -> Case:
        args: dict[str, Any] = {"ratio": 0.5, "check_layer": 2, "metric": "kv", "separator": (1, 2)}
        args |= {"filters": self.rng.choice(((), ((0, 0.9), (1, 0.7)))), "seam": self.rng.choice((0, 1.5, 32.0))}
        args |= {"uses_sensitivity": self.rng.random() < 0.5}
        return Case("BlendConfig", BlendConfig, args | {"boundaries": None, "max_bytes": 1000, "deadline": 0.5})

    def _spans(self) -> Case:
        tokens = np.array([self.rng.randrange(3) for _ in range(12)], np.int32)
        if self.rng.random() < 0.5:
            return Case("BlendConfig.spans", BlendConfig(separator=(1, 2)).spans, {"tokens": tokens})
        args = {"num_layers": 3, "is_known": self.rng.random() < 0.5}
        return Case("BlendConfig.stages_of", BlendConfig(check_layer=self.rng.choice((None, 1))).stages_of, args)

    # --- segments ---

    def _segment(self) -> Case:
        args = {"k": self.k[None], "v": self.v[None], "positions": self.old, "is_standalone": True}
        known = torch.rand(self.count, generator=self.torch_rng)
        return Case("SegmentKV", SegmentKV, args | {"sensitivity": self.rng.choice((None, known))})

    def _sensitivity(self) -> Case:
        return Case("blend.measure_sensitivity", measure_sensitivity, {"layers": [(self.k, self.v)] * 2})

    # --- the executor ---

    def _executor(self) -> Case:
        args = {"recompute_ratio": [0.5, 0.1], "check_layer": 2, "metric": "k", "rotary": ROTARY}
        args |= {"filters": ((1, 0.7),)}
        return Case("CacheBlendImpl", CacheBlendImpl, args)

    def _blend(self) -> Case:
        """The layer that is next, or a new pass."""
        executor = self.executor
        layer = 0 if executor._next_layer > LAYERS or self.rng.random() < 0.2 else executor._next_layer
        chosen = slice(None) if layer == 0 or executor.selection is None else executor.selection.indices
        args = {
            "layer_id": layer,
            "retrieved_k": self.k,
            "retrieved_v": self.v,
            "valid_mask": self.valid,
            "original_positions": self.old,
            "fresh_q": self.fresh[chosen],
            "fresh_k": self.fresh[chosen],
            "fresh_v": self.fresh[chosen],
            "positions": self.new[chosen],
            "query_start_loc": torch.tensor([0, self.count]),
            "token_dim": 0,
        }
        return Case("CacheBlendImpl.blend", executor.blend, args)


def small_mask(indices: Any, size: Any) -> Any:
    """Sizes that are allowed and do not fit into the machine are no finding."""
    return None if isinstance(size, int) and 10**9 < size < 2**63 else indices_to_mask(indices, size)


class BlendRowsWorld(ArenaWorld):
    """ops.mix_rows, ops.row_deviation, load_rotated and gather_rotated: every byte of an arena is known."""

    covers = (*names("load_rotated", "gather_rotated"), "kvpage.ops.mix_rows", "kvpage.ops.row_deviation")

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.arena = rng, Arena(1 << 16)
        self.torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))
        self.dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
        self.layout = CacheLayout(4, HEADS, SIZE, self.dtype, "flash", rng.choice(("NHD", "HND")))
        shape = self.layout.allocate(BLOCKS, 1, torch.device("cpu"))[0].shape
        self.caches = [self.filled(tuple(shape)) for _ in range(LAYERS)]
        self.count = rng.randrange(7)
        self.rows, self.out, self.fresh = (self.filled((self.count, HEADS, SIZE)) for _ in range(3))
        self.kv = self.filled((LAYERS, 2, self.count, HEADS, SIZE))
        angles = torch.rand(self.count, SIZE // 2, generator=self.torch_rng)
        self.rotation = Rotation(self.arena.copy(angles.cos()), self.arena.copy(angles.sin()), SIZE)

    def filled(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self.arena.copy(torch.randn(shape, generator=self.torch_rng).to(self.dtype))

    def case(self, rng: random.Random) -> Case:
        return rng.choice((self._mix, self._mix, self._deviation, self._load, self._gather))()

    def slots(self) -> torch.Tensor:
        return torch.tensor(self.rng.sample(range(4 * BLOCKS), self.count), dtype=torch.int64)

    def _mix(self) -> Case:
        places = torch.tensor(
            [self.rng.choice((-1, self.rng.randrange(max(self.count, 1)))) for _ in range(self.count)]
        )
        has_fresh, rotation = self.count > 0 and self.rng.random() < 0.5, self.rng.choice((None, self.rotation))
        args: dict[str, Any] = {"rows": self.rows, "out": self.out, "rotation": rotation}
        args |= {"fresh": self.fresh, "fresh_rows": places.long()} if has_fresh else {}
        args |= {"num_threads": 1}
        return Case("ops.mix_rows", ops.mix_rows, args)

    def _deviation(self) -> Case:
        valid = torch.rand(self.count, generator=self.torch_rng) < 0.6
        args = {"fresh": self.fresh, "retrieved": self.rows, "valid": valid, "num_threads": 1}
        return Case("ops.row_deviation", ops.row_deviation, args)

    def _load(self) -> Case:
        args = {"kv": self.kv, "caches": self.caches, "slots": self.slots(), "layout": self.layout}
        args |= {"rotations": self.rng.choice((None, self.rotation, [self.rotation] * LAYERS)), "scales": None}
        return Case("blend.load_rotated", load_rotated, args)

    def _gather(self) -> Case:
        rotation = self.rng.choice((None, self.rotation))
        args = {"cache": self.caches[0], "slots": self.slots(), "layout": self.layout, "rotation": rotation}
        return Case("blend.gather_rotated", gather_rotated, args)


class SegmentWorld(World):
    """Segments kept in memory and in a store, and found again by retrievers."""

    covers = names(
        "MemorySegments", "StoredSegments", "SegmentStore", "Segment", "SPTBlendRetriever", "SegmentBlendRetriever",
        "SegmentRetrieverTask", "SPTBlendRetrieverTask",
    )  # fmt: skip

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        metadata = KVStoreMetadata("m", fmt=rng.choice(("vllm", "huggingface")), kv_dtype=torch.float32)
        self.is_by_head = metadata.fmt == "huggingface"
        self.store = KVStore(KVStoreConfig(CHUNK, ("memory://?size=1MiB",), num_threads=1), metadata)
        self.segments, self.memory = SegmentStore(self.store), MemorySegments(1 << 14)
        self.stored = StoredSegments(self.store)
        self.by_separator = SPTBlendRetriever([0], self.segments, metadata, num_threads=1)
        self.by_content = SegmentBlendRetriever(self.segments, metadata, ContentBoundaries(1, 2, 4), num_threads=1)
        self.metadata = metadata

    def __exit__(self, *error: object) -> None:
        for each in (self.by_separator, self.by_content, self.store):
            each.close()

    def snapshot(self) -> object:
        self.store.flush()  # of what an earlier call has left to be written behind it
        tiers = [(tier.num_records, tier.num_bytes) for tier in self.store.stats().tiers if tier]
        return tiers, len(self.memory), self.memory.num_bytes, list(self.memory._segments)

    def check(self) -> None:
        assert self.store.stats().corrupt_records == 0
        assert self.memory.num_bytes == sum(each.num_bytes for each in self.memory._segments.values())
        assert self.memory.num_bytes <= self.memory.max_bytes

    def tokens(self) -> list[int]:
        return [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 9))]

    def segment(self, tokens: list[int]) -> SegmentKV:
        """Each number a function of its token and place, if it is known."""
        rows = torch.tensor([float(token + 10 * i) for i, token in enumerate(tokens)])[None, :, None, None]
        k = rows.expand(LAYERS, len(tokens), HEADS, SIZE).contiguous()
        is_standalone = self.rng.random() < 0.5
        known = self.rng.choice((None, rows.flatten())) if is_standalone else None
        return SegmentKV(k, -k, torch.arange(len(tokens)), is_standalone, known)

    def case(self, rng: random.Random) -> Case:
        makers: tuple[Callable[[list[int]], Case], ...] = (
            self._put, self._get, self._lookup, self._remove, self._keep, self._find, self._wants, self._request,
            self._content_request, self._make_memory, self._make_retriever,
        )  # fmt: skip
        return rng.choice(makers)(self.tokens())

    def _put(self, tokens: list[int]) -> Case:
        segment = self.segment(tokens)
        rows = torch.stack([segment.k, segment.v], 1)
        kv = rows.transpose(2, 3).contiguous() if self.is_by_head else rows
        args = {"tokens": as_integers(tokens, self.rng), "kv": kv, "positions": segment.positions}
        args |= {"is_standalone": segment.is_standalone, "namespace": b"", "blocking": True}
        args |= {"sensitivity": segment.sensitivity}
        return Case("SegmentStore.put", self.segments.put, args, fixed=("tokens", "kv", "namespace", "sensitivity"))

    def _get(self, tokens: list[int]) -> Case:
        args = {"tokens": as_integers(tokens, self.rng), "namespace": b"", "device": "cpu"}
        return Case("SegmentStore.get", self.segments.get, args, judge=lambda found: self._is_right(found, tokens))

    def _is_right(self, found: Any, tokens: list[int]) -> None:
        if found is None:
            return
        rows = found.kv.transpose(2, 3) if self.is_by_head else found.kv
        wanted = self.segment(tokens[: found.num_tokens])
        assert torch.equal(rows[:, 0], wanted.k) and torch.equal(rows[:, 1], wanted.v)
        assert found.sensitivity is None or torch.equal(found.sensitivity, wanted.k[0, :, 0, 0])

    def _lookup(self, tokens: list[int]) -> Case:
        return Case("SegmentStore.lookup", self.segments.lookup, {"tokens": tokens, "namespace": b""})

    def _remove(self, tokens: list[int]) -> Case:
        return Case("SegmentStore.remove", self.segments.remove, {"tokens": tokens, "namespace": b""})

    def _cache(self) -> Any:
        return self.rng.choice((self.memory, self.stored))

    def _keep(self, tokens: list[int]) -> Case:
        args = {"tokens": np.array(tokens, np.int32), "segment": self.segment(tokens), "namespace": b""}
        return Case("SegmentCache.keep", self._cache().keep, args, fixed=("tokens",))  # others' K and V would be theirs

    def _find(self, tokens: list[int]) -> Case:
        def judge(found: Any) -> None:
            if found is not None:
                assert torch.equal(found.k, self.segment(tokens[: found.num_tokens]).k)
                assert found.sensitivity is None or torch.equal(found.sensitivity, found.k[0, :, 0, 0])

        args = {"tokens": np.array(tokens, np.int32), "namespace": b""}
        return Case("SegmentCache.find", self._cache().find, args, judge=judge)

    def _wants(self, tokens: list[int]) -> Case:
        args = {"tokens": np.array(tokens, np.int32), "is_standalone": True, "is_measured": True}
        args |= {"namespace": b""}
        return Case("SegmentCache.wants", self._cache().wants, args)

    def _request(self, tokens: list[int]) -> Case:
        args = {"input_tokens": torch.tensor(tokens), "query_start_loc": torch.tensor([0, len(tokens)])}
        args |= {"namespaces": [b""]}
        return Case("SPTBlendRetriever.new_request", self.by_separator.new_request, args, done=all_of)

    def _content_request(self, tokens: list[int]) -> Case:
        args = {"input_tokens": torch.tensor(tokens), "query_start_loc": torch.tensor([0, len(tokens)])}
        args |= {"namespaces": None, "boundaries": self.rng.choice((None, [0, len(tokens)]))}
        return Case("SegmentBlendRetriever.new_request", self.by_content.new_request, args, done=all_of)

    def _make_memory(self, tokens: list[int]) -> Case:
        return Case("MemorySegments", MemorySegments, {"max_bytes": 100})

    def _make_retriever(self, tokens: list[int]) -> Case:
        args = {"spt": as_integers(tokens, self.rng), "cache_engine": self.segments, "metadata": self.metadata}
        args |= {"device": "cpu", "num_threads": 1}
        return Case("SPTBlendRetriever", few_threads, args, done=lambda made: made and made.close())


def few_threads(**given: Any) -> Any:
    """Threads start when they are needed; so many would be allowed."""
    return SPTBlendRetriever(**given)


def all_of(task: Any) -> None:
    """What a retrieval gives, which must be there whatever was asked for."""
    for layer in range(LAYERS):
        result = task.result(layer)
        assert (result.k is None) == (not result.valid_mask.any()), "rows are valid, and there is no K"
