"""What SGLang's extra config may have, and which versions of SGLang are taken."""

from abc import abstractmethod
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support import fake_sglang

from kvpage.integrations.sglang import HiCacheSettings, PageStorage, Shard
from kvpage.integrations.sglang.interface import FIELDS, METHODS, check_interface, differences

OF_SGLANG = {"backend_name": "kvpage", "module_path": "kvpage.integrations.sglang.backend", "class_name": "C"}


def read(**given: Any) -> HiCacheSettings:
    return HiCacheSettings.from_extra_config({**OF_SGLANG, **given})


def test_keys_of_sglang_are_left_to_it():
    found = read(tiers=["memory://?size=1MiB", "disk:///kv/{rank}"], interface_v1=1, deadline=2, model="m@2")
    assert found == HiCacheSettings(("memory://?size=1MiB", "disk:///kv/{rank}"), "m@2", None, True, None, 2)
    assert found.store_config("dp0-tp1").tiers == ("memory://?size=1MiB", "disk:///kv/dp0-tp1")


def test_one_tier_may_be_a_text():
    assert read(tiers="memory://").tiers == ("memory://",) and not read(tiers="memory://").interface_v1


def test_unknown_keys_are_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError) as error:
        read(tiers=["memory://"], tier="disk:kv", treads=2)
    for word in ("backend_name", "tiers", "model", "kv_cache_dtype", "interface_v1", "num_threads", "deadline"):
        assert word in str(error.value)
    assert "got ['tier', 'treads']" in str(error.value)


@pytest.mark.parametrize("values", [None, {}, OF_SGLANG])
def test_tiers_must_be_named(values: dict | None):
    with pytest.raises(ValueError, match="the extra config must name tiers, got only"):
        HiCacheSettings.from_extra_config(values)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"tiers": []}, "tiers must"),
        ({"tiers": 3}, "tiers must"),
        ({"tiers": ["kv"]}, "a tier must be a URL"),
        ({"tiers": "memory://", "deadline": 0}, "deadline must be positive seconds"),
        ({"tiers": "memory://", "deadline": None}, "deadline must be positive seconds"),
        ({"tiers": "memory://", "deadline": True}, "deadline must be positive seconds"),
        ({"tiers": "memory://", "num_threads": 0}, "num_threads must be"),
        ({"tiers": "memory://", "model": ""}, "model must be text"),
        ({"tiers": "memory://", "kv_cache_dtype": 8}, "kv_cache_dtype must be text"),
        ({"tiers": "memory://", "interface_v1": "yes"}, "interface_v1 must be True or False"),
    ],
)
def test_wrong_values_are_refused(given: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read(**given)


def test_the_backend_refuses_them_too(monkeypatch: pytest.MonkeyPatch):
    module = fake_sglang.installed(monkeypatch)
    with pytest.raises(ValueError, match="the extra config must have only"):
        module.KVPageHiCache(fake_sglang.config({"tiers": "memory://", "size": 1}), {})


def test_somebody_must_name_the_weights():
    with pytest.raises(ValueError, match="model must be named"):
        PageStorage(read(tiers="memory://?size=1MiB"), Shard(None, False), "0.5.23")


# --- versions ---------------------------------------------------------------------------------------------------------


def module_of(**changed: Any) -> Any:
    members = dict(fake_sglang.MODULES[fake_sglang.STORAGE])
    return SimpleNamespace(**{**members, **changed})


def test_a_version_with_the_same_interface_is_taken():
    assert differences(module_of()) == []
    check_interface("0.6.0", module_of())


def test_a_version_with_another_one_is_refused_by_name():
    class Other(fake_sglang.HiCacheStorage):
        def batch_get_v1(self, keys, pages):
            return []

    for name in ("batch_set_v1", "get"):
        setattr(Other, name, None)
    with pytest.raises(RuntimeError, match=r"sglang must be 0\.5\.23, .* got 0\.6\.0: ") as error:
        check_interface("0.6.0", module_of(HiCacheStorage=Other))
    for word in ("batch_get_v1 has no argument host_indices", "batch_set_v1 has no argument self"):
        assert word in str(error.value)


def test_new_abstract_methods_fields_and_policies_are_differences():
    class Other(fake_sglang.HiCacheStorage):
        @abstractmethod
        def pin_pages(self, keys): ...

    fewer = make_dataclass("PoolTransfer", ["name", "keys", "hit_policy"])
    policies = [SimpleNamespace(value="all_pages"), SimpleNamespace(value="some_pages")]
    found = differences(module_of(HiCacheStorage=Other, PoolTransfer=fewer, PoolHitPolicy=policies))
    assert found == [
        "pin_pages is new and must be written",
        "PoolTransfer has no field host_indices",
        "the hit policy some_pages is new",
    ]


def test_a_version_without_it_is_refused():
    found = differences(SimpleNamespace())
    assert len(found) >= len(METHODS) + sum(map(len, FIELDS.values()))


def test_the_backend_refuses_another_version(monkeypatch: pytest.MonkeyPatch):
    module = fake_sglang.installed(monkeypatch)
    monkeypatch.setattr(module, "__version__", "9.9")
    monkeypatch.delattr(module.hicache_storage.HiCacheStorage, "batch_get_v2")
    with pytest.raises(RuntimeError, match=r"got 9\.9: batch_get_v2 has no argument"):
        module.KVPageHiCache(fake_sglang.config({"tiers": "memory://"}), {})
