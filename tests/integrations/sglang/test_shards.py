"""Which ranks and models share pages, and which never do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.host_pools import MadePool, tokens_of

from kvpage.integrations.sglang import HiCacheSettings, PageStorage, ServedModel, Shard

KEYS = ["a" * 64, "b" * 64]
LONE = Shard("model", False)
Change = Callable[[Any], Any]


def opened(path: Path, shard: Shard, pool: Any, version: str = "0.5.23", name: str = "kv", **given: Any) -> PageStorage:
    values = {"interface_v1": True, "num_threads": 1, **given}
    settings = HiCacheSettings((f"disk://{path}?size=8MiB&segment=4MiB",), **values)
    storage = PageStorage(settings, shard, version, served=ServedModel({"model_path": __file__}))
    storage.register(name, pool)
    return storage


def kept(path: Path, shard: Shard = LONE, pool: Any = None, **given: Any) -> list[torch.Tensor]:
    """Keep two pages, and return them."""
    pool = MadePool() if pool is None else pool
    pool.fill(1)
    storage = opened(path, shard, pool, **given)
    assert storage.keep(given.get("name", "kv"), KEYS, tokens_of(0, 1)) == [True, True]
    storage.close()
    return [pool.page(0), pool.page(1)]


def loaded(path: Path, shard: Shard = LONE, pool: Any = None, **given: Any) -> tuple[list[bool], list[torch.Tensor]]:
    pool = MadePool() if pool is None else pool
    storage = opened(path, shard, pool, **given)
    flags = storage.load(given.get("name", "kv"), KEYS, tokens_of(4, 5))
    assert storage.found(given.get("name", "kv"), KEYS) == flags
    storage.close()
    return flags, [pool.page(4), pool.page(5)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, wanted, strict=True))


def test_another_process_finds_what_one_kept(tmp_path: Path):
    pages = kept(tmp_path)
    flags, found = loaded(tmp_path)
    assert flags == [True, True] and same(found, pages)


OTHERS = [
    {"shard": replace(LONE, model="other")},
    {"shard": replace(LONE, is_replicated=True)},
    {"shard": replace(LONE, tp=(1, 2))},
    {"shard": replace(LONE, tp=(0, 2))},
    {"shard": replace(LONE, pp=(0, 2))},
    {"shard": replace(LONE, cp=(0, 2))},
    {"shard": replace(LONE, dcp=(0, 2))},
    {"version": "0.5.24"},
    {"model": "model@2"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"interface_v1": False},
    {"pool": MadePool("layer_first")},
    {"pool": MadePool(dtype=torch.float16)},
    {"pool": MadePool(parts=1)},
]


@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_others_find_nothing_and_change_nothing(tmp_path: Path, other: dict):
    pages = kept(tmp_path)
    assert loaded(tmp_path, **other)[0] == [False, False]
    flags, found = loaded(tmp_path)
    assert flags == [True, True] and same(found, pages)


def test_a_name_given_in_the_settings_replaces_sglangs(tmp_path: Path):
    kept(tmp_path, replace(LONE, model="a"), model="weights@1")
    assert loaded(tmp_path, replace(LONE, model="b"), model="weights@1")[0] == [True, True]


def test_replicas_share(tmp_path: Path):
    kept(tmp_path, replace(LONE, dp=0))
    assert loaded(tmp_path, replace(LONE, dp=1))[0] == [True, True]


# --- latents: all ranks have the same, and one keeps them -------------------------------------------------------------

LATENTS = replace(LONE, is_replicated=True)


class MLATokenToKVPoolHost(MadePool):
    """Named as SGLang's pool of latents."""


@pytest.mark.parametrize(
    "name, pool, is_shared",
    [
        ("kv", MadePool(parts=1), True),
        ("indexer", MadePool(parts=1), True),
        ("draft", MLATokenToKVPoolHost(parts=1), True),
        ("draft", MadePool(), False),
        ("mamba", MadePool(parts=1), False),
        ("mamba", MLATokenToKVPoolHost(parts=1), False),
        ("swa", MadePool(), False),
    ],
)
def test_one_rank_keeps_what_all_have(name: str, pool: MadePool, is_shared: bool):
    first, second, alone = replace(LATENTS, tp=(0, 2)), replace(LATENTS, tp=(1, 2)), replace(LATENTS, tp=(0, 1))
    scopes = [shard.scope(name, pool, "pieces") for shard in (first, second, alone)]
    assert (len(set(scopes)) == 1) == is_shared
    assert len({shard.scope(name, pool, "pieces") for shard in (first, replace(first, pp=(1, 2)))}) == 2


def test_all_ranks_load_the_latents_that_one_keeps(tmp_path: Path):
    made = [Shard("model", True, tp=(rank, 1)) for rank in (0, 1)]
    pages = kept(tmp_path, made[0], MadePool(parts=1))
    flags, found = loaded(tmp_path, made[1], MadePool(parts=1))
    assert flags == [True, True] and same(found, pages)


def test_latents_of_several_ranks_need_a_tier_that_all_reach():
    settings = HiCacheSettings(("memory://?size=1MiB", "disk:///kv/{rank}"))
    with pytest.raises(ValueError, match="tiers must have one that all ranks reach"):
        PageStorage(settings, replace(LATENTS, tp=(1, 2)), "0.5.23")


def test_names_of_ranks_differ():
    shards = [LONE, *(replace(LONE, **{name: (1, 2)}) for name in ("tp", "pp", "cp")), replace(LONE, dp=1)]
    assert len({shard.name for shard in shards}) == len(shards)


# --- bytes that do not tell their dtype -------------------------------------------------------------------------------


def test_a_cache_of_bytes_must_name_its_dtype(tmp_path: Path):
    with pytest.raises(ValueError, match="kv_cache_dtype must be named in the extra config"):
        opened(tmp_path / "a", LONE, MadePool(dtype=torch.uint8))
    opened(tmp_path / "b", LONE, MadePool(dtype=torch.uint8), kv_cache_dtype="fp8_e4m3").close()
    opened(tmp_path / "c", LONE, MadePool(dtype=torch.uint8), name="indexer").close()
