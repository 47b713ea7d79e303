"""SlotAllocator and PrefixCacheManager: promises one by one, errors that change nothing, lives beside their oracles."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.life import lived, total
from support.seeds import seed_of
from support.slot_life import WORLDS, AllocatorLife

from kvpage.extras.slots import PrefixCacheManager, SlotAllocator

# --- SlotAllocator ---


def taken(allocator: SlotAllocator) -> list[int]:
    return [slot for slot in range(allocator.max_slots) if not allocator.is_free(slot)]


@pytest.mark.parametrize("max_slots", [0, 1, 2, 63, 64, 65, 4095, 4096, 4097, 262_145])
def test_alloc_gives_every_slot_once_and_then_minus_one(max_slots):
    allocator = SlotAllocator(max_slots)
    assert [allocator.alloc() for _ in range(max_slots)] == list(range(max_slots))
    assert allocator.alloc() == -1 and allocator.free_count == 0
    for slot in (0, max_slots // 2, max_slots - 1) if max_slots else ():
        allocator.free(slot)
        assert allocator.free_count == 1 and allocator.alloc() == slot
        assert allocator.version(slot) == (2 if max_slots > 2 else allocator.version(slot))
    assert allocator.alloc() == -1


@pytest.mark.parametrize(
    "call, slot, error, message",
    [
        ("free", 1, ValueError, "slot must be taken, 1 is free"),
        ("occupy", 0, ValueError, "slot must be free, 0 is taken"),
        *((call, 3, ValueError, "between 0 and max_slots - 1 = 2, got 3") for call in ("free", "occupy")),
        *((call, -1, ValueError, "got -1") for call in ("free", "occupy", "is_free", "version")),
        ("version", 3, ValueError, "got 3"),
        ("is_free", 2**62, ValueError, f"got {2**62}"),
        ("free", 2**64, OverflowError, "too big"),
        ("free", "0", TypeError, "integer"),
        ("occupy", 0.0, TypeError, "incompatible"),
    ],
)
def test_allocator_refuses_and_stays(call, slot, error, message):
    allocator = SlotAllocator(3)
    allocator.alloc()
    with pytest.raises(error, match=message):
        getattr(allocator, call)(slot)
    assert taken(allocator) == [0] and allocator.free_count == 2 and allocator.version(0) == 1


@pytest.mark.parametrize("max_slots", [-1, 2**31])
def test_allocator_sizes(max_slots):
    with pytest.raises(ValueError, match=f"max_slots must be at least 0 and below 2\\*\\*31, got {max_slots}"):
        SlotAllocator(max_slots)


def test_an_allocator_without_init_raises():
    with pytest.raises(TypeError):
        object.__new__(SlotAllocator).alloc()
    with pytest.raises(TypeError):
        SlotAllocator.alloc(3)


# --- PrefixCacheManager: what it says ---


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda t: np.array(t, np.int32)])
def test_kinds_of_token_ids(kind):
    cache = PrefixCacheManager(10_000)
    tokens = [*range(5000), -3, 2**31 - 1]
    cache.insert(kind(tokens), 3, 1)
    assert cache.find(tokens) == cache.find(kind(tokens)) == (5002, 3, 1)
    assert cache.find(np.array([0, 2**40])) == (1, 3, 1)  # an id beyond 32 bits equals none
    cache.release(kind(tokens))


REFUSED = [
    (lambda c: c.insert([], 0, 1), "token_ids must not be empty"),
    (lambda c: c.insert([1, 9], -1, 1), "slot must not be negative, got -1"),
    (lambda c: c.insert([1, 2**31], 5, 1), "tokens must fit into 32 bits, got 2147483648 at 1"),
    (lambda c: c.insert([[1]], 5, 1), "token_ids must be one-dimensional"),
    (lambda c: c.insert(np.array([1.0]), 5, 1), "token_ids must be int32 or int64, got float64"),
    (lambda c: c.release([1, 2]), "token_ids must be those of a pin, none ends after these 2"),
    (lambda c: c.release([1, 2, 3, 4]), "none ends after these 4"),
    (lambda c: c.release([4]), "none ends after these 1"),
    (lambda c: c.find([1, 2, 3], SlotAllocator(0)), "allocator must have all slots .* got one of 0 for slot 0"),
    (lambda c: c.pin([1, 2, 3], SlotAllocator(0)), "allocator must have all slots"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_the_manager_refuses_and_stays(call, message):
    cache = PrefixCacheManager(10)
    cache.insert([1, 2, 3], 0, 1)

    def state():
        cache.check()
        return cache.num_tokens, cache.num_nodes, cache.num_slots, cache.num_pins, cache.find([1, 2, 3])

    before = state()
    with pytest.raises(ValueError, match=message):
        call(cache)
    assert state() == before
    cache.release([1, 2, 3])


def test_capacity_is_not_negative():
    with pytest.raises(ValueError, match="max_capacity must not be negative, got -1"):
        PrefixCacheManager(-1)


# --- random lives, and large ones ---


def test_random_lives():
    """The long form is a battery."""
    figures = total(lived(WORLDS, 300))
    assert min(figures[name] for name in ("hits", "stale", "over")) > 0, figures


@pytest.mark.parametrize("max_slots", [1, 64, 200, 5000])
def test_random_lives_of_an_allocator(max_slots):
    AllocatorLife(seed_of(max_slots % 1000), 0, max_slots).live(1500, compare_every=300)


def test_a_deep_path_of_many_nodes():
    cache = PrefixCacheManager(10**6)
    tokens = np.arange(20_000)
    for n in range(1, 20_001, 7):
        cache.insert(tokens[:n], n, 1)
    cache.check()
    assert cache.find(tokens).prefix_len == 20_000 and cache.num_nodes == 2858


def test_a_conversation_in_one_slot_is_one_edge():
    cache = PrefixCacheManager(10**6)
    tokens = np.arange(5000)
    for n in range(50, 5001, 50):
        cache.insert(tokens[:n], 0, 1)
        if n > 50:
            cache.release(tokens[: n - 50])
        cache.check()
    assert (cache.num_nodes, cache.num_tokens) == (1, 5000)


def test_threads():
    cache = PrefixCacheManager(30_000)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for step in range(60):
            tokens = np.concatenate([np.arange(4000), rng.integers(0, 9, 1000)])
            cache.insert(tokens, seed * 100 + step, 1)
            assert cache.find(tokens).prefix_len == 5000
            cache.release(tokens)

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(4)))
    cache.check()
    assert cache.num_pins == 0 and cache.num_tokens <= 30_000


# --- copy_kv ---

LAYERS, SLOTS, LEN, HEADS, SIZE = 3, 4, 6, 2, 5


def one_tensor(device):
    return torch.empty(LAYERS, 2, SLOTS, LEN, HEADS, SIZE, dtype=torch.bfloat16, device=device)


def per_layer(device):
    return [torch.empty(2, SLOTS, LEN, HEADS, SIZE, device=device) for _ in range(LAYERS)]


def pairs(device):
    return [tuple(torch.empty(SLOTS, LEN, HEADS, SIZE, device=device) for _ in "kv") for _ in range(LAYERS)]


def latents(device):
    return [(torch.empty(SLOTS, LEN, SIZE, dtype=torch.float64, device=device),) for _ in range(LAYERS)]


def heads_first(device):
    return [
        tuple(torch.empty(SLOTS, HEADS, LEN, SIZE, device=device).transpose(1, 2) for _ in "kv") for _ in range(LAYERS)
    ]


def slices(device):
    wide = torch.empty(LAYERS, 2, 2 * SLOTS, LEN + 3, HEADS, SIZE, dtype=torch.float16, device=device)
    return wide[:, :, ::2, 1:-2]


KINDS = [one_tensor, per_layer, pairs, latents, heads_first, slices]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def fill(kv_cache):
    parts = [part for layer in kv_cache for part in layer]
    for part in parts:
        part.copy_(torch.randn(part.shape))
        part[1, 0] = float("nan")
    return parts


def bits(parts):
    return [part.cpu().contiguous().view(torch.uint8).clone() for part in parts]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, LEN])
@pytest.mark.parametrize("n_layers", [1, LAYERS])
def test_copy_kv_copies_the_prefix_and_nothing_else(kind, n, n_layers, device):
    kv_cache = kind(device)
    parts = fill(kv_cache)
    wanted = bits(parts)
    for part in wanted[: len(parts) // LAYERS * n_layers]:
        part[3, :n] = part[1, :n]
    cache = PrefixCacheManager(100)
    cache.insert(range(LEN), 1, 1)
    assert cache.copy_kv([*range(n), 77], 3, kv_cache, n_layers) == n
    for got, part in zip(bits(parts), wanted, strict=True):
        assert torch.equal(got, part)


def test_copy_kv_copies_nothing_without_a_prefix_or_from_the_slot_itself():
    kv_cache = pairs("cpu")
    parts = fill(kv_cache)
    before = bits(parts)
    cache, slots = PrefixCacheManager(100), SlotAllocator(SLOTS)
    assert slots.alloc() == 0
    cache.insert([1, 2, 3], 0, 1)
    assert cache.copy_kv([4], 3, kv_cache, LAYERS) == 0
    assert cache.copy_kv([1, 2], 0, kv_cache, LAYERS) == 2
    slots.free(0)
    slots.alloc()
    assert cache.copy_kv([1, 2], 3, kv_cache, LAYERS, slots) == 0  # stale
    assert all(map(torch.equal, bits(parts), before))


COPY_REFUSED = [
    (3, lambda: pairs("cpu"), 0, "n_layers must be between 1 and the cache's number of layers 3, got 0"),
    (3, lambda: pairs("cpu"), 4, "got 4"),
    (4, lambda: pairs("cpu"), 3, "target_slot must be between 0 and 3, got 4"),
    (-1, lambda: pairs("cpu"), 3, "target_slot must be between 0 and 3, got -1"),
    (0, lambda: [tuple(p[:1] for p in layer) for layer in pairs("cpu")], 3, "must have all slots .* got 1 for slot 1"),
    (3, lambda: [tuple(p[:, :2] for p in layer) for layer in pairs("cpu")], 3, "room for 3 tokens a slot, got 2"),
    (3, lambda: [*pairs("cpu")[:2], *latents("cpu")[:1]], 3, "kv_cache must be of one shape, got"),
    (3, lambda: [*latents("cpu")[:2], (latents("cpu")[0][0].float(),)], 3, "kv_cache must be of one dtype"),
    (3, lambda: [*pairs("cpu")[:2], pairs("meta")[0]], 3, "kv_cache must be of one device"),
    (3, lambda: [()], 1, "must have tensors"),
    (3, lambda: torch.zeros(3, 2), 3, "must have tensors"),
    (3, lambda: torch.zeros(3, 2, 4, 1).expand(3, 2, 4, 6), 3, "memory for each"),
]


@pytest.mark.parametrize("target, kind, n_layers, message", COPY_REFUSED)
def test_copy_kv_refuses_and_writes_nothing(target, kind, n_layers, message):
    kv_cache = kind()
    cache = PrefixCacheManager(100)
    cache.insert([1, 2, 3], 1, 1)
    parts = [part for layer in kv_cache for part in layer if part.device.type == "cpu" and part.dim()]
    before = bits(parts)
    with pytest.raises(ValueError, match=message):
        cache.copy_kv([1, 2, 3], target, kv_cache, n_layers)
    assert all(map(torch.equal, bits(parts), before))
    assert cache.find([1, 2, 3]) == (3, 1, 1)


def test_an_allocator_without_all_slots_changes_nothing():
    allocator, cache = SlotAllocator(2), PrefixCacheManager(100)
    slot = allocator.alloc()
    cache.insert([1, 2, 3], slot, allocator.version(slot) - 1)  # stale: `find` would forget it
    cache.insert([1, 2], 7, 0)
    before = cache.num_slots, cache.num_nodes, cache.num_tokens
    for call in (cache.find, cache.pin):
        with pytest.raises(ValueError, match="allocator must have all slots"):
            call([1, 2, 3, 4], allocator)
        assert (cache.num_slots, cache.num_nodes, cache.num_tokens) == before
    assert cache.find([1, 2, 3, 4]) == (3, slot, 0)
    cache.check()


def test_copy_takes_tensors_only():
    cache = PrefixCacheManager(100)
    for kv_cache in (np.zeros((1, 2, 3, 4)), [None], [[torch.zeros(3, 4), None]], torch.zeros(1, 2, 3, 4).to_sparse()):
        with pytest.raises((TypeError, ValueError)):
            cache.copy_kv([1], 0, kv_cache, 1)
