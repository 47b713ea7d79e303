"""OutputCache: order of eviction, bytes, devices, errors."""

import gc
import random
import weakref
from collections import OrderedDict

import pytest
import torch
from support.trie_arrays import storage_bytes

from kvpage.extras.token_trie import OutputCache

# --- OutputCache ---


def test_output_cache_gives_back_what_it_was_given():
    cache = OutputCache(2)
    x, y = torch.randn(3), torch.randn(4).double()
    cache["x"], cache[7] = x, y
    assert cache["x"] is x and cache[7] is y
    assert len(cache) == 2 and 7 in cache and "y" not in cache
    assert cache.num_bytes == 3 * 4 + 4 * 8


def test_overwriting_evicts_nothing():
    cache = OutputCache(2)
    cache["a"], cache["b"] = torch.zeros(1), torch.zeros(1)
    new = torch.ones(5)
    cache["a"] = new
    assert cache["a"] is new and "b" in cache and cache.num_bytes == 24
    cache["c"] = torch.zeros(1)
    assert "b" not in cache and "a" in cache


@pytest.mark.parametrize("move_to_cpu", [False, True])
def test_maxsize_0_keeps_nothing(move_to_cpu):
    cache = OutputCache(0, move_to_cpu)
    cache["a"] = torch.zeros(1)
    assert len(cache) == 0 and cache.num_bytes == 0 and "a" not in cache


@pytest.mark.parametrize("move_to_cpu", [False, True])
def test_a_slice_owns_its_bytes_and_nothing_more(move_to_cpu):
    cache, whole = OutputCache(4, move_to_cpu), torch.randn(1000, 8)
    cache["row"], cache["column"], cache["all"] = whole[3], whole[:, 2], whole
    assert cache.num_bytes == 8 * 4 + 1000 * 4 + whole.nbytes
    assert torch.equal(cache["row"], whole[3]) and torch.equal(cache["column"], whole[:, 2])
    assert storage_bytes(cache["row"]) == 32
    kept = weakref.ref(whole.untyped_storage())
    del cache["all"], whole
    gc.collect()
    assert kept() is None and cache.num_bytes == 4032


def test_clear_and_delete():
    cache = OutputCache(3)
    cache["a"], cache["b"] = torch.zeros(1), torch.zeros(2)
    del cache["a"]
    assert cache.num_bytes == 8 and len(cache) == 1
    cache.clear()
    assert cache.num_bytes == 0 and len(cache) == 0


@pytest.mark.gpu
def test_offloaded_tensors_come_back_to_their_device():
    cache = OutputCache(2, move_to_cpu=True)
    here, there = torch.randn(4), torch.randn(4, device="cuda")
    cache["here"], cache["there"] = here, there
    assert cache["there"].device == there.device and torch.equal(cache["there"], there)
    assert cache["here"].device == here.device
    assert all(tensor.device.type == "cpu" for _, tensor in cache._entries.values())


@pytest.mark.parametrize("seed", range(5))
def test_output_cache_random(seed):
    rng = random.Random(seed)
    maxsize = rng.randint(0, 5)
    cache, naive = OutputCache(maxsize, seed % 2 == 1), OrderedDict()
    for _ in range(500):
        key = rng.randrange(8)
        if rng.random() < 0.5:
            cache[key] = torch.zeros(key + rng.randrange(3))
            naive[key] = cache[key].numel() if maxsize else 0
            naive.move_to_end(key)
            while len(naive) > maxsize:
                naive.popitem(last=False)
        elif key in naive:
            assert cache[key].numel() == naive[key], seed
            naive.move_to_end(key)
        assert [k in cache for k in range(8)] == [k in naive for k in range(8)], seed
        assert cache.num_bytes == 4 * sum(naive.values()), seed


def test_output_cache_errors():
    with pytest.raises(ValueError, match="maxsize must not be negative, got -1"):
        OutputCache(-1)
    cache = OutputCache(1)
    cache["a"] = torch.zeros(2)
    for key in ("b", 0):
        with pytest.raises(KeyError):
            cache[key]
        with pytest.raises(KeyError):
            del cache[key]
    with pytest.raises(TypeError, match="values must be torch.Tensors, got list"):
        cache["b"] = [1]
    assert cache["a"].tolist() == [0, 0] and cache.num_bytes == 8
