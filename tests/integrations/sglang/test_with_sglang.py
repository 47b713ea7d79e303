"""The backend inside SGLang itself: its factory, its host pools, its cache controller with its threads.

`tests/integrations/run.sh sglang` runs this; elsewhere it skips. It needs no GPU: only the device is made up.
"""

import importlib.util
import inspect
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.sglang import real_pools
from integrations.sglang.real_pools import EngineSide, filled, mamba_pool, mha_pool, mla_pool, page_of, tokens_of
from support import fake_sglang
from support.redis_server import RedisServer, needs_redis
from support.waiting import until

from kvpage.store.doors.sglang_prompt import SGLangPrompt
from kvpage.store.inspection import view_tier
from kvpage.store.prompt_reach import door_reach

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs sglang: tests/integrations/run.sh sglang", allow_module_level=True)
pytestmark = [
    pytest.mark.routers,
    pytest.mark.filterwarnings("ignore"),  # SGLang warns of what only GPUs have
]
BACKEND = {
    "backend_name": "kvpage", "module_path": "kvpage.integrations.sglang.backend", "class_name": "KVPageHiCache",
    "interface_v1": 1, "model": "model@1",
}  # fmt: skip
POOLS = {
    "heads, layer_first": lambda: mha_pool("layer_first"),
    "heads, page_first": lambda: mha_pool("page_first"),
    "heads, page_first_direct": lambda: mha_pool("page_first_direct"),
    "heads, page_head": lambda: mha_pool("page_head"),
    "heads, V of another size": lambda: mha_pool("page_first", v_size=4),
    "latents, layer_first": lambda: mla_pool("layer_first"),
    "latents, page_first": lambda: mla_pool("page_first"),
    "latents, page_first_direct": lambda: mla_pool("page_first_direct"),
    "states, page_first": mamba_pool,
    "states, page_first_direct": lambda: mamba_pool("page_first_direct"),
}
FLAT = [name for name in POOLS if "another size" not in name and "states" not in name]


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    real_pools.without_images()
    real_pools.without_reserve()


@pytest.fixture
def engine() -> Iterator[Callable[..., EngineSide]]:
    made: list[EngineSide] = []

    def engine_side(pool: Any, tiers: Any = "memory://?size=16MiB", extra: dict | None = None, **ranks: int) -> Any:
        made.append(EngineSide(pool, {**BACKEND, "tiers": tiers, **(extra or {})}, **ranks))
        return made[-1]

    yield engine_side
    for one in reversed(made):
        one.close()


def on_disk(path: Path) -> str:
    return f"disk://{path}?size=16MiB&segment=8MiB"


def kept(path: Path, pool: Any, num_pages: int, extra: dict | None = None) -> list[bytes]:
    """Keep the first pages of the pool, end the process's store, and return the pages."""
    side = EngineSide(pool, {**BACKEND, "tiers": on_disk(path), **(extra or {})})
    keys = side.hit(TOKENS[: 4 * num_pages]).all_hash_values
    assert side.keep(list(range(num_pages)), keys) == 4 * num_pages
    side.close()
    return [page_of(pool, page) for page in range(num_pages)]


TOKENS = list(range(1000, 1000 + 4 * 300))

# --- the interface ----------------------------------------------------------------------------------------------------


def test_the_fakes_of_the_quick_tests_are_like_the_wheel():
    for name, members in fake_sglang.MODULES.items():
        real = importlib.import_module(name)
        for member, fake in members.items():
            assert hasattr(real, member), f"{name} has no {member}"
            if is_dataclass(fake):
                assert {one.name for one in fields(fake)} <= {one.name for one in fields(getattr(real, member))}
            elif inspect.isclass(fake) and hasattr(fake, "__members__"):
                assert {one.value for one in fake} <= {one.value for one in getattr(real, member)}
            elif inspect.isclass(fake):
                for method in [one for one in vars(fake) if not one.startswith("_")]:
                    ours, theirs = (inspect.signature(getattr(one, method)) for one in (fake, getattr(real, member)))
                    assert list(ours.parameters) == list(theirs.parameters), method


def test_this_version_has_the_interface():
    from sglang.srt.mem_cache import hicache_storage
    from sglang.version import __version__

    from kvpage.integrations.sglang.interface import TESTED, differences

    assert __version__ in TESTED and differences(hicache_storage) == []


# --- SGLang's factory and pools ---------------------------------------------------------------------------------------


@pytest.fixture
def create() -> Iterator[Callable[..., Any]]:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    made: list[Any] = []

    def backend(pool: Any, extra: dict | None = None, name: str = "kv") -> Any:
        given = {**BACKEND, "tiers": ["memory://?size=16MiB"], **(extra or {})}
        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "model", extra_config=given)
        made.append(StorageBackendFactory.create_backend("dynamic", config, pool))
        made[-1].register_mem_pool_host(pool)
        made[-1].register_mem_host_pool_v2(pool, name)
        return made[-1]

    yield backend
    for one in made:
        one.close()


@pytest.mark.parametrize("is_mla, rank, size", [(False, 0, 1), (True, 0, 1), (False, 1, 4)])
def test_sglangs_own_test_of_a_batch_passes(monkeypatch: pytest.MonkeyPatch, is_mla: bool, rank: int, size: int):
    """It is in the wheel, for the storage over Mooncake; here it is given this one."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.mem_cache.storage.mooncake_store import test_mooncake_store as theirs

    def backend(config: Any) -> Any:
        given = replace(config, extra_config={**BACKEND, "tiers": ["memory://?size=1MiB"]})
        return StorageBackendFactory.create_backend("dynamic", given, None)

    monkeypatch.setattr(theirs, "MooncakeStore", backend)
    config = theirs.make_hicache_storage_config(is_mla_model=is_mla, tp_rank=rank, tp_size=size)
    theirs.test_batch_operation(config)


@pytest.mark.parametrize("name", POOLS)
def test_pages_of_sglangs_pools_come_back_to_other_places(create: Callable[..., Any], name: str):
    pool, keys = POOLS[name](), [f"{number:064x}" for number in range(130)]
    backend, wanted = create(pool), [page_of(pool, page) for page in range(130)]
    assert backend.batch_set_v1(keys, tokens_of(pool, list(range(130)))) == [True] * 130
    filled(pool, 2)
    others = [page_of(pool, page) for page in range(150)]
    places = list(range(150, 280))
    assert backend.batch_get_v1(keys, tokens_of(pool, places)) == [True] * 130
    assert [page_of(pool, place) for place in places] == wanted
    assert [page_of(pool, page) for page in range(150)] == others


@pytest.mark.parametrize("name", FLAT)
def test_copies_of_pages_come_back_without_interface_v1(engine: Callable[..., EngineSide], name: str):
    pool = POOLS[name]()
    side, wanted = engine(pool, extra={"interface_v1": 0}), [page_of(pool, page) for page in range(3)]
    keys = side.hit(TOKENS[:12]).all_hash_values
    assert side.keep([0, 1, 2], keys) == 12
    assert side.fetch(side.hit(TOKENS[:12]), [7, 8, 9]) == 12
    assert [page_of(pool, page) for page in (7, 8, 9)] == wanted


def test_another_layout_never_reads_these_pages(tmp_path: Path, engine: Callable[..., EngineSide]):
    wanted = kept(tmp_path, mha_pool("layer_first"), 3)
    for pool, extra in [
        (mha_pool("page_first"), {}),
        (mha_pool("layer_first"), {"interface_v1": 0}),
        (mha_pool("layer_first"), {"model": "other"}),
    ]:
        side = EngineSide(pool, {**BACKEND, "tiers": on_disk(tmp_path), **extra})
        assert side.hit(TOKENS[:12]).storage_hit_count == 0
        side.close()
    pool = filled(mha_pool("layer_first"), 5)
    side = engine(pool, on_disk(tmp_path))
    assert side.fetch(side.hit(TOKENS[:12]), [0, 1, 2]) == 12
    assert [page_of(pool, page) for page in range(3)] == wanted


# --- SGLang's controller: prefetch and backup in its threads ----------------------------------------------------------


def test_what_one_process_kept_another_one_fetches(tmp_path: Path, engine: Callable[..., EngineSide]):
    wanted = kept(tmp_path, mha_pool("page_first"), 200)
    pool = filled(mha_pool("page_first"), 5)
    side = engine(pool, on_disk(tmp_path))
    operation = side.hit(TOKENS[:1200])
    assert operation.storage_hit_count == 800
    assert side.fetch(operation, list(range(50, 250))) == 800
    assert [page_of(pool, page) for page in range(50, 250)] == wanted
    stats = side.controller.storage_backend.get_stats()
    assert (sum(stats.prefetch_pgs), stats.backup_pgs) == (200, [])


def test_explain_makes_sglangs_own_hashes(tmp_path: Path):
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    kept(tmp_path, mha_pool("page_first"), 20)
    tier = view_tier(on_disk(tmp_path))
    (reach,) = door_reach(tier, SGLangPrompt(TOKENS)).reaches
    tier.close()
    assert (reach.num_tokens, reach.refused) == (80, ())
    for prompt in (SGLangPrompt(TOKENS), SGLangPrompt(TOKENS, "s"), SGLangPrompt(TOKENS, "s", ("a", "/a"))):
        lora = uuid.uuid5(uuid.NAMESPACE_URL, "a\0/a").hex if prompt.adapter else None
        assert prompt.hashes(4) == get_hash_str(TOKENS, storage_namespace_seed(lora, prompt.salt), page_size=4)


def test_a_damaged_page_ends_the_prefix(tmp_path: Path, engine: Callable[..., EngineSide]):
    wanted = kept(tmp_path, mha_pool("page_first"), 200)
    flip(tmp_path, wanted[140][:64])
    pool = filled(mha_pool("page_first"), 5)
    side = engine(pool, on_disk(tmp_path))
    operation = side.hit(TOKENS[:800])
    assert operation.storage_hit_count == 800
    assert side.fetch(operation, list(range(200))) == 140 * 4
    assert [page_of(pool, page) for page in range(140)] == wanted[:140]
    assert side.hit(TOKENS[:800]).storage_hit_count == 140 * 4  # the damaged one is gone, and may be kept again
    assert side.keep([140], operation.hash_value[140:141]) == 4
    assert side.hit(TOKENS[:800]).storage_hit_count == 800


def flip(folder: Path, target: bytes) -> None:
    """Flip a bit behind these bytes, wherever they are in the folder."""
    spoilt = 0
    for path in [one for one in folder.rglob("*") if one.is_file()]:
        data = path.read_bytes()
        at = data.find(target)
        if at >= 0:
            spoilt += 1
            path.write_bytes(data[: at + 9] + bytes([data[at + 9] ^ 4]) + data[at + 10 :])
    assert spoilt == 1


def test_a_flipped_bit_is_a_wrong_page_of_sglangs_file(tmp_path: Path, engine: Callable[..., EngineSide]):
    """What docs/sglang.md says of it; the test before shows what this backend does."""
    pool = mha_pool("page_first")
    side = EngineSide(pool, {"file_storage_path": str(tmp_path)}, "file")
    operation, wanted = side.hit(TOKENS[:12]), [page_of(pool, page) for page in range(3)]
    assert side.keep([0, 1, 2], operation.all_hash_values) == 12
    flip(tmp_path, wanted[1][:64])
    assert side.fetch(side.hit(TOKENS[:12]), [4, 5, 6]) == 12
    assert [page_of(pool, page) == one for page, one in zip((4, 5, 6), wanted, strict=True)] == [True, False, True]
    side.close()


def test_a_tier_that_is_not_there_costs_a_miss(engine: Callable[..., EngineSide]):
    side = engine(mha_pool("layer_first"), "redis://127.0.0.1:1/0?deadline=0.2")
    operation = side.hit(TOKENS[:12])
    assert operation.storage_hit_count == 0
    assert side.keep([0, 1, 2], operation.all_hash_values) == 0
    assert side.hit(TOKENS[:12]).storage_hit_count == 0


def after_a_failed_fetch(side: EngineSide, pool: Any, wanted: list[bytes], trouble: Callable[[], None]) -> int:
    """Look three pages up, lose the store, and fetch them. What SGLang takes is right. It computes the rest.

    Returns:
        How many pages SGLang took.
    """
    operation = side.hit(TOKENS[:12])
    assert operation.storage_hit_count == 12
    trouble()
    found = side.fetch(operation, [20, 21, 22]) // 4
    assert [page_of(pool, page) for page in (20, 21, 22)][:found] == wanted[:found]
    return found


@needs_redis
@pytest.mark.parametrize("trouble", ["kill", "pause"])
def test_a_server_that_is_lost_between_look_up_and_fetch(
    tmp_path: Path, engine: Callable[..., EngineSide], trouble: str
):
    server, pool = RedisServer(tmp_path), mha_pool("layer_first")
    url, wanted = f"redis://127.0.0.1:{server.port}/0?deadline=1", [page_of(pool, page) for page in range(3)]
    side = engine(pool, url)
    keys = side.hit(TOKENS[:12]).all_hash_values
    assert side.keep([0, 1, 2], keys) == 12
    assert after_a_failed_fetch(side, pool, wanted, getattr(server, trouble)) == 0
    server.kill()
    server.start()  # empty; SGLang has computed the pages, and keeps them
    until(lambda: side.keep([0, 1, 2], keys) == 12)
    filled(pool, 9)
    assert side.fetch(side.hit(TOKENS[:12]), [4, 5, 6]) == 12
    assert [page_of(pool, page) for page in (4, 5, 6)] == wanted
    server.kill()


def test_a_disk_that_vanishes_between_look_up_and_fetch(tmp_path: Path, engine: Callable[..., EngineSide]):
    pool, folder = mha_pool("layer_first"), tmp_path / "kv"
    wanted, side = [page_of(pool, page) for page in range(3)], engine(pool, on_disk(folder))
    keys = side.hit(TOKENS[:12]).all_hash_values
    assert side.keep([0, 1, 2], keys) == 12
    after_a_failed_fetch(side, pool, wanted, lambda: shutil.rmtree(folder))
    filled(pool, 9)
    found = side.fetch(side.hit(TOKENS[:12]), [4, 5, 6]) // 4
    assert [page_of(pool, page) for page in (4, 5, 6)][:found] == wanted[:found]


def test_a_disk_that_is_full(tmp_path: Path, engine: Callable[..., EngineSide]):
    pool = mha_pool("layer_first")
    side = engine(pool, f"disk://{tmp_path / 'kv'}?size=128KiB&segment=64KiB")
    for at in range(20):
        pages = list(range(3 * at % 60, 3 * at % 60 + 3))
        tokens = list(range(5000 * at, 5000 * at + 12))
        wanted = [page_of(pool, page) for page in pages]
        assert side.keep(pages, side.hit(tokens).all_hash_values) == 12
        assert side.fetch(side.hit(tokens), [70, 71, 72]) == 12
        assert [page_of(pool, page) for page in (70, 71, 72)] == wanted
    assert side.hit(list(range(12))).storage_hit_count < 12  # the first ones made place


@pytest.mark.parametrize("name", ["heads, layer_first", "latents, page_first"])
def test_what_is_kept_after_a_failed_fetch_is_what_was_computed(
    tmp_path: Path, engine: Callable[..., EngineSide], name: str
):
    pool = POOLS[name]()
    wanted = kept(tmp_path, pool, 3)
    flip(tmp_path, wanted[0][:64])
    side = engine(pool, on_disk(tmp_path))
    operation = side.hit(TOKENS[:12])
    assert side.fetch(operation, [20, 21, 22]) == 0
    filled(pool, 7)  # as SGLang computes them anew
    computed = [page_of(pool, page) for page in (20, 21, 22)]
    side.keep([20], operation.all_hash_values[:1])  # the others are there
    filled(pool, 8)
    assert side.fetch(side.hit(TOKENS[:12]), [4, 5, 6]) == 12
    assert [page_of(pool, page) for page in (4, 5, 6)] == [computed[0], *wanted[1:]]


def test_sglangs_own_failures_in_front_of_the_backend_are_misses(
    engine: Callable[..., EngineSide], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    pool = mha_pool("layer_first")
    side, wanted = engine(pool), [page_of(pool, page) for page in range(3)]
    assert type(side.controller.storage_backend).__name__ == "HiCacheStorageFailureInjector"
    for _ in range(20):
        operation = side.hit(TOKENS[:12])
        side.keep([0, 1, 2], operation.all_hash_values)
        found = side.fetch(operation, [20, 21, 22]) // 4
        assert [page_of(pool, page) for page in (20, 21, 22)][:found] == wanted[:found]


@needs_redis
def test_one_rank_keeps_latents_and_all_fetch_them(tmp_path: Path, engine: Callable[..., EngineSide]):
    server = RedisServer(tmp_path)
    url, pool = f"redis://127.0.0.1:{server.port}/0", mla_pool("layer_first")
    wanted = [page_of(pool, page) for page in range(3)]
    first = engine(pool, url, tp_rank=0, tp_size=2)
    keys = first.hit(TOKENS[:12]).all_hash_values
    assert first.keep([0, 1, 2], keys) == 12
    other = filled(mla_pool("layer_first"), 5)
    second = engine(other, url, tp_rank=1, tp_size=2)
    assert second.controller.backup_skip and second.keep([0, 1, 2], ["0" * 64] * 3) == 0
    assert second.fetch(second.hit(TOKENS[:12]), [4, 5, 6]) == 12
    assert [page_of(other, page) for page in (4, 5, 6)] == wanted
    server.kill()


# --- hybrid models ----------------------------------------------------------------------------------------------------


def test_states_end_where_they_were_kept(create: Callable[..., Any]):
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    kv, mamba, keys = mha_pool("page_first"), mamba_pool(), [f"{number:064x}" for number in range(6)]
    backend = create(kv)
    backend.register_mem_host_pool_v2(mamba, PoolName.MAMBA)
    assert backend.batch_set_v1(keys[:5], tokens_of(kv, [0, 1, 2, 3, 4])) == [True] * 5
    state = page_of(mamba, 3)
    for at in (1, 3):
        move = PoolTransfer(PoolName.MAMBA, tokens_of(mamba, [at]), keys=[keys[at]])
        assert backend.batch_set_v2([move]) == {PoolName.MAMBA: [True]}
    asked = PoolTransfer(PoolName.MAMBA, keys=["end"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    result = backend.batch_exists_v2(keys, [asked])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [2, 4])
    filled(mamba, 9)
    move = PoolTransfer(PoolName.MAMBA, tokens_of(mamba, [77]), keys=[keys[3]])
    assert backend.batch_get_v2([move]) == {PoolName.MAMBA: [True]}
    assert page_of(mamba, 77) == state


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"tier": "memory://"}, "the extra config must have only"),
        ({"tiers": []}, "tiers must"),
        ({"tiers": "nothing://"}, "scheme must be one of"),
    ],
)
def test_wrong_settings_end_the_start(extra: dict, message: str):
    with pytest.raises(ValueError, match=message):
        EngineSide(mha_pool("layer_first"), {**BACKEND, "tiers": "memory://?size=1MiB", **extra})


def test_two_processes_cannot_own_one_folder(tmp_path: Path, engine: Callable[..., EngineSide]):
    engine(mha_pool("layer_first"), on_disk(tmp_path))
    with pytest.raises(Exception, match=str(tmp_path)):
        EngineSide(mha_pool("layer_first"), {**BACKEND, "tiers": on_disk(tmp_path)})


def test_nothing_of_sglang_is_needed_to_read_the_settings():
    assert "sglang" in sys.modules and torch.cuda.is_available() is False
    from kvpage.integrations.sglang import HiCacheSettings

    assert HiCacheSettings(("memory://",)).all_local
