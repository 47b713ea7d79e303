"""No integration stores what a failed load has left behind: garbage under a valid key would be found by all others.

Each store here promises chunks, fills the memory that it was given with garbage, and then says that it has failed.
What is stored afterwards must be what was computed, byte by byte. Dynamo, Ray and `kvpage serve` store by kvpage's
engine.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from support import fake_vllm
from support.fake_tiering import Tiering, bytes_of
from support.models import generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of

B, CHUNK, MAX_TOKENS = 4, 8, 6
PROMPTS = make_prompts([5 * CHUNK + 3, 3 * CHUNK, CHUNK + 1])
GARBAGE = 0x5A


class FailingStore:
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
    later = tiering.tier._store.later
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
    monkeypatch.setattr(tiering.tier._store._tiers, "locate", lambda names, *_: [0] * len(names))
    assert tiering.load("fails", keys) == [False] * 8 and tiering.num_loads == 1
    monkeypatch.undo()
    fake_vllm.installed(monkeypatch)
    assert tiering.look_up(tiering.request("asks"), keys) == [False] * 8  # nothing was stored by the load
    assert tiering.compute("computes", keys).success
    rows = [np.zeros(len(bytes_of(key)), np.uint8) for key in keys]
    assert tiering.tier._store.get_into(keys, rows) == [True] * 8
    assert [row.tobytes() for row in rows] == [bytes_of(key) for key in keys]
    tiering.close()


def made(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({}))
    return folder
