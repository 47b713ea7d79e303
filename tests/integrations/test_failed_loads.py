"""No integration stores what a failed load has left behind: garbage under a valid key would be found by all others.

Each store here promises chunks, fills the memory that it was given with garbage, and then says that it has failed.
What is stored afterwards must be what was computed, byte by byte. Dynamo, Ray and `kvpage serve` store by kvpage's
engine.
"""

import ctypes
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support import fake_sglang, fake_vllm
from support.fake_tiering import Tiering, bytes_of
from support.host_pools import PAGE, MadePool, PoolOfCopies, tokens_of
from support.insides import stack_of, store_of
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.store import BlockStore, KVStore, KVStoreConfig, metadata_of
from kvpage.store.bytes.pieces import pieces_of

B, CHUNK, MAX_TOKENS = 4, 8, 6
PROMPTS = make_prompts([5 * CHUNK + 3, 3 * CHUNK, CHUNK + 1])
GARBAGE = 0x5A


class FailingStore(BlockStore):
    """A KVStore whose loads all fail, after they have written garbage into every block they were given."""

    def __init__(self, store: KVStore, error: type[Exception] | None) -> None:
        self._store, self._error, self.num_loads = store, error, 0

    def lookup(self, tokens, *, namespace: bytes = b"") -> int:
        return len(tokens) // CHUNK * CHUNK

    def load_blocks(self, tokens, engine, block_table, *, start: int, namespace: bytes) -> int:
        self.num_loads += 1
        for layer in engine.gpu_cache:
            layer[:, [int(block) for block in block_table[start // B :]]] = 1e3
        if self._error is not None:
            raise self._error("the load failed")
        return start

    def store_blocks(self, tokens, engine, block_table, *, namespace: bytes) -> int:
        return self._store.store_blocks(tokens, engine, block_table, namespace=namespace)


def serve(store, expected) -> list[int]:
    config = CacheConfig(block_size=B, num_gpu_blocks=64)
    engine = Engine.from_model(make_model("llama"), EngineConfig(config, load_or_compute=False), store=store)
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    engine.close()
    assert [output.token_ids for output in outputs] == expected
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_an_engine_stores_what_it_has_computed(error):
    expected = generate_each(make_model("llama"), PROMPTS, MAX_TOKENS)
    probe = Engine.from_model(make_model("llama"), EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=64)))
    config = KVStoreConfig(CHUNK, ("memory://?size=4MiB",))
    with KVStore(config, metadata_of(probe.cache, "m")) as store:
        failing = FailingStore(store, error)
        assert serve(failing, expected) == [0, 0, 0] and failing.num_loads >= len(PROMPTS)
        assert serve(store, expected) == [5 * CHUNK, 3 * CHUNK - B, CHUNK]
    probe.close()


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_vllms_tier_stores_what_vllm_has_computed(tmp_path, monkeypatch, error):
    fake_vllm.installed(monkeypatch)
    tiering, keys = Tiering(made(tmp_path), tiers=["memory://?size=1MiB"]), [bytes([at]) * 36 for at in range(1, 9)]
    later = store_of(tiering.tier).later
    get_into = later.get_into

    def spoil(keys, buffers, deadline=None):
        future = get_into(keys, buffers, deadline)  # none is there
        future.result(60)
        for row in buffers:
            row[:] = np.uint8(GARBAGE)
        if error is not None:
            future._result, future._exception = None, error("the load failed")
        return future

    monkeypatch.setattr(later, "get_into", spoil)
    monkeypatch.setattr(stack_of(store_of(tiering.tier)), "locate", lambda names, *_: [0] * len(names))
    assert tiering.load("fails", keys) == [False] * 8 and tiering.num_loads == 1
    monkeypatch.undo()
    fake_vllm.installed(monkeypatch)
    assert tiering.look_up(tiering.request("asks"), keys) == [False] * 8  # nothing was stored by the load
    assert tiering.compute("computes", keys).success
    rows = [np.zeros(len(bytes_of(key)), np.uint8) for key in keys]
    prefix = importlib.import_module("kvpage.integrations.vllm.tier").PERSISTENT
    assert store_of(tiering.tier).get_into([prefix + key for key in keys], rows) == [True] * 8
    assert [row.tobytes() for row in rows] == [bytes_of(key) for key in keys]
    tiering.close()


@pytest.mark.parametrize("kind", ["addresses", "copies", "pools"])
@pytest.mark.parametrize("pool_class", [MadePool, PoolOfCopies])
def test_sglangs_backend_stores_what_sglang_has_computed(monkeypatch, pool_class, kind):
    module, pool, keys = fake_sglang.installed(monkeypatch), pool_class(), [letter * 64 for letter in "abcd"]
    tiers, by_address = ["memory://?size=1MiB&prefault=no"], int(kind != "copies")
    settings = {"tiers": tiers, "model": "model@1", "interface_v1": by_address, "num_threads": 1}
    backend = module.KVPageHiCache(fake_sglang.config(settings, enable_storage_metrics=False), {})
    backend.register_mem_pool_host(pool)
    store = store_of(backend._storage)

    def load(places) -> list[bool]:
        if kind == "addresses":
            return backend.batch_get_v1(keys, tokens_of(*places))
        if kind == "pools":
            move = fake_sglang.PoolTransfer(fake_sglang.PoolName.KV, tokens_of(*places), keys=keys)
            return backend.batch_get_v2([move])[fake_sglang.PoolName.KV]
        found = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for place, page in zip(places, found, strict=True):
            if page is not None:
                pool.set_from_flat_data_page(place * PAGE, page)
        return [page is not None for page in found]

    def spoil(names, buffers, deadline=None) -> list[bool]:
        """Write garbage into all memory that the call was given, and miss."""
        for buffer in buffers:
            for address, num_bytes in pieces_of(buffer, writable=True)[0]:
                ctypes.memset(int(address), GARBAGE, int(num_bytes))
        return [False] * len(names)

    with monkeypatch.context() as patch:
        patch.setattr(store, "get_into", spoil)
        patch.setattr(stack_of(store), "locate", lambda names, *_: [0] * len(names))
        assert backend.batch_exists(keys) == 4 and load(range(4)) == [False] * 4
    assert backend.batch_exists(keys) == 0  # nothing was stored by the load
    pool.fill(1)  # as the engine computes them
    computed = [pool.page(page) for page in range(4)]
    kept = [pool.get_data_page(page * PAGE) for page in range(4)]
    assert backend.batch_set(keys, kept) if kind == "copies" else backend.batch_set_v1(keys, tokens_of(0, 1, 2, 3))
    pool.fill(2)
    assert load(range(4, 8)) == [True] * 4
    for place, page in zip(range(4, 8), computed, strict=True):
        assert torch.equal(pool.page(place).view(torch.uint8), page.view(torch.uint8))
    backend.close()


def made(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({}))
    return folder
