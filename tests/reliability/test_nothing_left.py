"""What is closed and forgotten leaves no Python object behind, whatever it was used for: a server that makes and closes
parts of itself does not grow.
"""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import reduce
from operator import and_

import pytest
import torch
from support.models import make_model, make_prompts
from support.redis_server import MISSING, RedisServer

from kvpage import CacheConfig
from kvpage.serving import BeamSearchParams, Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.disk.disk_tier import DiskTier

NUM_TIMES = 4
THREAD_SECONDS = 5.0  # less than threads wait for more to do


def objects_left(use: Callable[[], object]) -> Counter[str]:
    """By type, what each of NUM_TIMES calls of `use` leaves at least; caches fill once and are not in every one's."""
    gc.collect()
    time.sleep(0.1)  # the threads of what other tests have forgotten end
    num_threads = threading.active_count()
    use()
    before, grown = _count(num_threads), []
    for _ in range(NUM_TIMES):
        use()
        after = _count(num_threads)
        grown.append(after - before)
        before = after
    return reduce(and_, grown) - Counter({"collections.Counter": 1})  # of `grown` itself


def _count(num_threads: int) -> Counter[str]:
    """Threads that were told to end have done so, or are counted as what they are: left."""
    end = time.monotonic() + THREAD_SECONDS
    while threading.active_count() > num_threads and time.monotonic() < end:
        time.sleep(0.001)
    gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return make_model("llama")


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    if MISSING:
        yield None
        return
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield f"redis://127.0.0.1:{server.port}/0"
    server.kill()


def serve(engine: Engine) -> None:
    prompts = make_prompts([3, 9, 17], 5)
    engine.generate(prompts, SamplingParams(max_tokens=4, temperature=1.0, seed=1, n=2))
    engine.beam_search([prompts[1]], BeamSearchParams(2, 3))
    engine.abort(engine.add_request(prompts[2], SamplingParams(max_tokens=4)))


def test_the_count_sees_what_is_kept():
    kept = []
    assert objects_left(lambda: kept.append([0])) == Counter({"builtins.list": 1})


def test_disk_tiers_leave_nothing(tmp_path):
    assert not objects_left(lambda: DiskTier([tmp_path], 1 << 20, segment_bytes=1 << 18).close())


def test_engines_leave_nothing(model):
    def use() -> None:
        engine = Engine.from_model(model, EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=24, num_cpu_blocks=12)))
        serve(engine)
        engine.close()

    assert not objects_left(use)


def test_engines_over_stores_leave_nothing(model, redis_url, tmp_path):
    tiers = ["memory://?size=1MiB", f"disk://{tmp_path}?size=4MiB"] + [redis_url] * (redis_url is not None)

    def use() -> None:
        engine = Engine.from_model(model, EngineConfig(CacheConfig(block_size=4, num_gpu_blocks=24, num_cpu_blocks=12)))
        config = KVStoreConfig(4, tuple(tiers), save_decode_cache=True, num_threads=1)
        with KVStore(config, metadata_of(engine.cache, "llama")) as store:
            engine.use_store(store)
            serve(engine)
            engine.close()

    assert not objects_left(use)
