"""KVPageTier under vLLM's own manager of tiers, with vLLM's own shared host memory, and no engine.

It also runs where vLLM has no compiled part, as from an unpacked wheel of a version that has no build for CPUs.
"""

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.insides import store_of

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: tests/integrations/run.sh vllm", allow_module_level=True)

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

pytestmark = pytest.mark.routers
PAGE = 4096
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(1, 7)]
MAX_STEPS = 20_000


class Managed:
    """A manager, the rows of its host memory, and one request."""

    def __init__(self, folder: Path, name: str, publishes: bool = False) -> None:
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text("{}")
        plugin = {"type": "KVPageTier", "module_path": "kvpage.integrations.vllm"}
        named = {**plugin, "weights": "test"}  # no engine, whose configuration would tell
        tier = {**named, "enable_kv_events": publishes, "tiers": [f"disk://{folder / 'kv'}?size=8MiB&segment=1MiB"]}
        parallel = OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=True,
        )  # fmt: skip
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
            worker_kv_bytes_per_block=PAGE,
            enable_kv_cache_events=publishes,
            extra_config={"cpu_bytes_to_use": 16 * PAGE, "secondary_tiers": [tier]},
            engine_id=f"kvpage-test-{os.getpid()}-{name}",
            model=OffloadingModelConfig(str(folder / "model"), "float32"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=parallel,
        )
        self.manager = TieringOffloadingSpec(config).get_manager()
        self.request = ReqContext(name)
        self.manager.on_new_request(self.request)

    def rows(self) -> Any:
        """Return the host memory, [chunks, bytes]. No array of it may live when the manager shuts down."""
        return np.frombuffer(self.manager.primary_tier.get_kv_memoryview(), np.uint8).reshape(-1, PAGE)

    def until(self, is_over: Any) -> None:
        for _ in range(MAX_STEPS):
            if is_over():
                return
            self.manager.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.0005)  # as long as a model computes
        raise AssertionError(f"nothing happened in {MAX_STEPS} steps")

    def close(self) -> None:
        self.manager.on_request_finished(self.request)
        self.manager.shutdown()
        assert not [name for name in os.listdir("/dev/shm") if f"kvpage-test-{os.getpid()}" in name]


def test_chunks_outlive_the_manager_and_no_shared_memory_does(tmp_path):
    first = Managed(tmp_path, "first")
    spec = first.manager.prepare_store(KEYS, first.request).store_spec
    for key, row in zip(KEYS, spec.chunk_ids, strict=True):
        first.rows()[row] = key[0]
    first.manager.complete_store(KEYS, first.request)
    first.until(lambda: not first.manager.has_pending_work())
    first.close()

    second, hit = Managed(tmp_path, "second"), LookupResult.HIT
    second.until(lambda: {second.manager.lookup(key, second.request) for key in KEYS} == {hit})
    spec = second.manager.prepare_load(KEYS, second.request)
    assert [set(second.rows()[row].tolist()) for row in spec.chunk_ids] == [{key[0]} for key in KEYS]
    second.manager.complete_load(KEYS, second.request)
    metrics = {}

    def are_told() -> bool:
        stats = second.manager.get_stats()
        metrics.update(stats.reduce() if stats is not None else {})
        return "vllm:kvpage_place_hits:('0 disk',)" in metrics

    second.until(are_told)
    assert metrics["vllm:kvpage_place_hits:('0 disk',)"] == len(KEYS)
    second.close()


def test_chunks_that_nobody_stored_are_misses(tmp_path):
    managed, miss = Managed(tmp_path, "only"), LookupResult.MISS
    managed.until(lambda: {managed.manager.lookup(key, managed.request) for key in KEYS} == {miss})
    managed.close()


def test_the_manager_passes_uses_on_and_takes_events(tmp_path):
    managed = Managed(tmp_path, "only", publishes=True)
    managed.manager.prepare_store(KEYS, managed.request)
    managed.manager.complete_store(KEYS, managed.request)
    managed.until(lambda: not managed.manager.has_pending_work())
    (tier,) = managed.manager.secondary_tiers
    store_of(tier).flush()
    events = [event for event in managed.manager.take_events() if event.medium is tier.medium]
    assert sorted(key for event in events for key in event.keys) == KEYS and not any(one.removed for one in events)
    managed.manager.touch(KEYS[:2], managed.request)
    managed.until(lambda: tier._touches._sent is not None and tier._touches._sent.done())
    assert tier._touches._sent.result() == [True, True]
    managed.close()


def test_a_reset_of_vllm_s_caches_reaches_the_tier(tmp_path):
    managed, miss = Managed(tmp_path, "only"), LookupResult.MISS
    managed.manager.prepare_store(KEYS, managed.request)
    managed.manager.complete_store(KEYS, managed.request)
    managed.until(lambda: not managed.manager.has_pending_work())
    managed.manager.reset_cache()
    getattr(managed.manager, "on_reset_flushed", lambda: None)()
    managed.until(lambda: {managed.manager.lookup(key, managed.request) for key in KEYS} == {miss})
    assert store_of(managed.manager.secondary_tiers[0]).stats().tiers[0].num_records == len(KEYS)
    managed.close()
