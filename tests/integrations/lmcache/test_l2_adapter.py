"""KVPageL2Adapter made by LMCache's own plugin, over its keys, memory objects, bitmaps and events.

`tests/integrations/run.sh lmcache` runs this; elsewhere it skips.
"""

import importlib.util
import random
import select
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("needs LMCache: tests/integrations/run.sh lmcache", allow_module_level=True)

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform.event_notifier import consume_fd

pytestmark = pytest.mark.routers
SHAPE, POISON = torch.Size([2, 3, 16, 64]), 0.5


def adapter(folder: Path, **params) -> L2AdapterInterface:
    params = {"tiers": [f"disk:{folder}?size=16MiB&segment=1MiB"], "weights": "m@1", **params}
    config = {"module_path": "kvpage.integrations.lmcache.l2_adapter", "class_name": "KVPageL2Adapter"}
    return create_l2_adapter_from_registry(PluginL2AdapterConfig.from_dict({**config, "adapter_params": params}))


def keys(count: int, **fields) -> list[ObjectKey]:
    facts = {"model_name": "you/model", "kv_rank": 1, **fields}
    return [ObjectKey(chunk_hash=number.to_bytes(32, "big"), **facts) for number in range(count)]


def memory(seed: int | None) -> TensorMemoryObj:
    """Numbers in memory that is longer than they are, as LMCache's is; None for poison."""
    raw = torch.full((SHAPE.numel() * 2 + 512,), 0xA5, dtype=torch.uint8)
    made = TensorMemoryObj(raw, MemoryObjMetadata(SHAPE, torch.bfloat16, 0, len(raw), 1, 0, MemoryFormat.KV_2LTD), None)
    generator = torch.Generator().manual_seed(seed or 0)
    made.tensor.copy_(torch.full(SHAPE, POISON) if seed is None else torch.randn(SHAPE, generator=generator))
    return made


def wait(fd: int) -> None:
    assert select.select([fd], [], [], 60)[0], "no event came"
    consume_fd(fd)


def flags(bitmap, count: int) -> list[bool]:
    return [bitmap.test(index) for index in range(count)]


def store(made, chunk_keys, seeds) -> bool:
    task = made.submit_store_task(chunk_keys, [memory(seed) for seed in seeds])
    wait(made.get_store_event_fd())
    (result,) = [result for name, result in made.pop_completed_store_tasks().items() if name == task]
    return result.is_successful()


def look_up(made, chunk_keys) -> list[bool]:
    task = made.submit_lookup_and_lock_task(chunk_keys, {})
    wait(made.get_lookup_and_lock_event_fd())
    bitmap = made.query_lookup_and_lock_result(task)
    assert made.query_lookup_and_lock_result(task) is None
    made.submit_unlock(chunk_keys)
    return flags(bitmap, len(chunk_keys))


def load(made, chunk_keys) -> list[int | None]:
    """Return which seeds' numbers were loaded; each other byte is as it was."""
    rooms = [memory(None) for _ in chunk_keys]
    task = made.submit_load_task(chunk_keys, rooms)
    wait(made.get_load_event_fd())
    loaded = flags(made.query_load_result(task), len(chunk_keys))
    assert made.query_load_result(task) is None
    for index, (room, is_loaded) in enumerate(zip(rooms, loaded, strict=True)):
        assert (room.raw_data[SHAPE.numel() * 2 :] == 0xA5).all()
        assert not is_loaded or torch.equal(room.tensor, memory(index + 1).tensor)
    return loaded


def test_chunks_are_found_by_the_next_process_and_by_no_other_weights_rank_or_salt(tmp_path):
    made, chunks = adapter(tmp_path / "kv"), keys(5)
    assert len({made.get_store_event_fd(), made.get_lookup_and_lock_event_fd(), made.get_load_event_fd()}) == 3
    assert store(made, chunks[:3], [1, 2, 3]) and look_up(made, chunks) == [True] * 3 + [False] * 2
    assert load(made, chunks) == [True] * 3 + [False] * 2
    for fields in ({"kv_rank": 2}, {"cache_salt": "you"}, {"object_group_id": 1}, {"model_name": "you/other"}):
        assert not any(look_up(made, keys(3, **fields))) and not any(load(made, keys(3, **fields)))
    made.close()
    made = adapter(tmp_path / "kv")
    assert load(made, chunks) == [True] * 3 + [False] * 2
    made.delete(chunks[:1])
    assert look_up(made, chunks[:3]) == [False, True, True]
    made.close()
    other = adapter(tmp_path / "kv", weights="m@2")
    assert not any(look_up(other, chunks))
    other.close()


@pytest.mark.parametrize("params", [{}, {"dtype": "bfloat16"}])
def test_flipped_bits_are_misses_that_are_told(tmp_path, params):
    codec = "split" if "dtype" in params else "raw"
    url, chunks = f"disk:{tmp_path}/kv?size=16MiB&segment=1MiB&codec={codec}", keys(6)
    made = adapter(tmp_path, tiers=[url], **params)
    assert store(made, chunks, range(1, 7))
    made.close()
    rng = random.Random(0)
    for path in (tmp_path / "kv").rglob("*"):
        if path.is_file() and path.stat().st_size > 4096 and path.name != "journal":
            data = bytearray(path.read_bytes())
            for _ in range(3):
                data[rng.randrange(4096, len(data))] ^= 0x10
            path.write_bytes(data)
    made = adapter(tmp_path, tiers=[url], **params)
    load(made, chunks)  # compares what it loads
    assert load(made, chunks) == look_up(made, chunks) and made.report_status()["is_healthy"]
    made.close()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"weights": ""}, "weights must name"),
        ({"path": "/"}, "must be among tiers, weights.*got path"),
        ({"tiers": []}, "tiers must"),
    ],
)
def test_wrong_settings_are_named(tmp_path, params, text):
    with pytest.raises(ValueError, match=text):
        adapter(tmp_path, **params)
