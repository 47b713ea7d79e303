"""Prefill and decode apart over a server: each role has a store of its own there. Tokens are those of generate."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.models import generate_each, make_model, make_prompts
from support.mooncake_master import running_master
from support.redis_server import RedisServer, needs_redis
from support.store_engines import B, C

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.store import ArrivingStore, KVStore, KVStoreConfig, LayerwiseStore, metadata_of

SOON = 120.0
CONFIG = EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=64), load_or_compute=False, store_deadline=SOON)


@pytest.fixture(params=[pytest.param("redis", marks=needs_redis), "mooncake"])
def url(request, tmp_path) -> Iterator[str]:
    if request.param == "mooncake":
        yield from (master.url() for master in running_master())
        return
    server = RedisServer(tmp_path)
    yield f"redis://127.0.0.1:{server.port}/0?cooldown=0"
    server.kill()


def make_store(url: str) -> KVStore:
    """Return a store of the role's own, as a process of its own would have."""
    cache = Engine.from_model(make_model("llama"), CONFIG).cache
    return KVStore(KVStoreConfig(C, (url,)), metadata_of(cache, "m"))


def make_worker(**fields) -> Engine:
    return Engine.from_model(make_model("llama"), replace(CONFIG, **fields))


@pytest.mark.parametrize("num_layers", [None, 1])
@pytest.mark.parametrize("num_tokens", [C, 5 * C + B + 3])
def test_a_decode_worker_loads_what_a_prefill_worker_stores(url, num_tokens: int, num_layers: int | None) -> None:
    (prompt,) = make_prompts([num_tokens])
    (expected,) = generate_each(make_model("llama"), [prompt], 6)
    with make_store(url) as near, make_store(url) as far:
        prefill, decode = make_worker(save_portions=True, max_num_batched_tokens=C), make_worker()
        near_by, far_off = (
            store if num_layers is None else LayerwiseStore(store, engine.cache, num_layers)
            for store, engine in ((near, prefill), (far, decode))
        )
        arriving = ArrivingStore(far_off, patience=SOON)
        prefill.use_store(near_by)
        decode.use_store(arriving)
        results: list = []
        with arriving.expect(prompt):
            thread = threading.Thread(
                target=lambda: results.extend(decode.generate([prompt], SamplingParams(max_tokens=6)))
            )
            thread.start()
            prefill.generate([prompt], SamplingParams(max_tokens=1))
            prefill.close()
        thread.join(SOON)
        assert [one.token_ids for one in results] == [expected]
        assert results[0].num_cached_tokens == (num_tokens - 1) // B * B
        decode.close()
