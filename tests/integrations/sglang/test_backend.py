"""KVPageHiCache over made-up host pools: pages come back byte by byte, and nothing else changes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import fake_sglang
from support.fake_sglang import PoolHitPolicy, PoolName, PoolTransfer
from support.host_pools import PAGE, AnchorPool, MadePool, PoolOfCopies, tokens_of

MEMORY = {"tiers": ["memory://?size=8MiB&prefault=no"], "num_threads": 1, "model": "model@1"}
KINDS = [("layer_first", 2), ("page_first", 2), ("layer_first", 1), ("page_first", 1)]
Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A backend over a pool; pools of other names by keyword."""
    module, made = fake_sglang.installed(monkeypatch), []

    def backend(pool: Any, extra: dict | None = None, metrics: bool = False, **pools: Any) -> Any:
        config = fake_sglang.config({**MEMORY, "interface_v1": 1, **(extra or {})}, enable_storage_metrics=metrics)
        made.append(module.KVPageHiCache(config, {}))
        made[-1].register_mem_pool_host(pool)
        for name, other in pools.items():
            made[-1].register_mem_host_pool_v2(other, PoolName(name))
        return made[-1]

    yield backend
    for one in made:
        one.close()


def hashes(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def assert_pages(pool: MadePool, wanted: dict[int, torch.Tensor], before: torch.Tensor) -> None:
    """Check that these pages have these bytes, and that all others are as they were."""
    expected = MadePool(pool.layout, pool.tokens // PAGE, pool.parts, pool.dtype)
    expected.bytes.copy_(before)
    for page, content in wanted.items():
        expected.set_from_flat_data_page(page * PAGE, content.flatten())
    assert torch.equal(pool.bytes, expected.bytes)


@pytest.mark.parametrize("interface_v1", [1, 0])
@pytest.mark.parametrize("layout, parts", KINDS)
@pytest.mark.parametrize("num_pages", [0, 1, 3, 12])
def test_pages_come_back_to_other_places(make: Make, layout: str, parts: int, num_pages: int, interface_v1: int):
    pool = MadePool(layout, parts=parts)
    pool.fill(1)
    backend, keys = make(pool, {"interface_v1": interface_v1}), hashes(*range(num_pages))
    kept = [pool.page(page) for page in range(num_pages)]
    places = list(reversed(range(12)))[:num_pages]
    if interface_v1:
        assert backend.batch_set_v1(keys, tokens_of(*range(num_pages))) == [True] * num_pages
    else:
        assert backend.batch_set(keys, [pool.get_data_page(page * PAGE) for page in range(num_pages)])
    assert backend.batch_exists(keys) == num_pages
    pool.fill(2)
    before = pool.bytes.clone()
    if interface_v1:
        assert backend.batch_get_v1(keys, tokens_of(*places)) == [True] * num_pages
    else:
        found = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for place, page in zip(places, found, strict=True):
            pool.set_from_flat_data_page(place * PAGE, page)
    assert_pages(pool, dict(zip(places, kept, strict=True)), before)


@pytest.mark.parametrize("layout, parts", KINDS)
def test_pieces_are_the_pools_own_memory(make: Make, layout: str, parts: int):
    pool = MadePool(layout, parts=parts)
    pages = make(pool)._storage.pages("kv")
    start, end = pool.kv_buffer.data_ptr(), pool.kv_buffer.data_ptr() + pool.kv_buffer.nbytes
    pieces = pages.pieces(2, tokens_of(3, 7))
    assert [len(one.runs) for one in pieces] == [parts * (3 if layout == "layer_first" else 1)] * 2
    assert all(start <= at and at + size <= end for one in pieces for at, size in one.runs)
    assert sum(int(one.runs[:, 1].sum()) for one in pieces) == 2 * PAGE * pool.size_per_token


def test_a_missing_page_in_the_middle_misses_alone(make: Make):
    pool = MadePool()
    pool.fill(1)
    backend, kept = make(pool), [pool.page(page) for page in range(3)]
    assert backend.batch_set_v1([hashes(0)[0], hashes(2)[0]], tokens_of(0, 2)) == [True, True]
    pool.fill(2)
    before = pool.bytes.clone()
    assert backend.batch_get_v1(hashes(0, 1, 2), tokens_of(5, 6, 7)) == [True, False, True]
    assert_pages(pool, {5: kept[0], 6: pool.page(6), 7: kept[2]}, before)


def test_exists_counts_from_the_first_page_on(make: Make):
    pool = MadePool()
    backend = make(pool)
    backend.batch_set_v1(hashes(0, 1, 3), tokens_of(0, 1, 3))
    assert [backend.batch_exists(hashes(*keys)) for keys in ([], [0], [0, 1], [0, 1, 2, 3], [2, 0])] == [0, 1, 2, 2, 0]
    assert backend.exists(hashes(3)[0]) and not backend.exists(hashes(2)[0])


def test_a_key_that_comes_twice_is_kept_once(make: Make):
    pool = MadePool()
    pool.fill(1)
    backend, kept = make(pool), pool.page(0)
    assert backend.batch_set_v1(hashes(0, 1, 0), tokens_of(0, 1, 0)) == [True] * 3
    assert backend.batch_get_v1(hashes(0, 0), tokens_of(4, 5)) == [True, True]
    assert same(pool.page(4), kept) and same(pool.page(5), kept)


def test_what_is_stored_stays_when_it_is_stored_again(make: Make):
    pool = MadePool()
    pool.fill(1)
    backend, kept = make(pool), pool.page(0)
    backend.batch_set_v1(hashes(0), tokens_of(0))
    pool.fill(2)
    assert backend.batch_set_v1(hashes(0), tokens_of(0)) == [True]
    assert backend.batch_get_v1(hashes(0), tokens_of(1)) == [True]
    assert same(pool.page(1), kept)


@pytest.mark.parametrize("indices", [tokens_of(0), tokens_of(0, 1)[:-1], tokens_of(0, 1, 2), None])
def test_indices_that_do_not_fit_change_nothing(make: Make, indices: torch.Tensor | None):
    pool = MadePool()
    pool.fill(1)
    backend, before = make(pool), pool.bytes.clone()
    with pytest.raises(ValueError, match=r"host_indices of 2 pages of pool kv must be 8, got"):
        backend.batch_set_v1(hashes(0, 1), indices)
    with pytest.raises(ValueError, match=r"host_indices of 2 pages of pool kv must be 8, got"):
        backend.batch_get_v1(hashes(0, 1), indices)
    assert backend.batch_exists(hashes(0, 1)) == 0 and torch.equal(pool.bytes, before)


def test_a_page_of_another_size_is_a_miss_and_makes_place(make: Make):
    pool = MadePool()
    backend = make(pool, {"interface_v1": 0})
    assert backend.set(hashes(0)[0], torch.arange(7, dtype=torch.uint8))
    assert backend.get(hashes(0)[0], torch.empty(8, dtype=torch.uint8)) is None and not backend.exists(hashes(0)[0])
    assert backend.set(hashes(0)[0], torch.arange(7, dtype=torch.uint8))
    assert backend.get(hashes(0)[0]) is None and backend.get(hashes(1)[0], torch.empty(7, dtype=torch.uint8)) is None
    found = backend.get(hashes(0)[0], torch.empty(7, dtype=torch.uint8))
    assert found.tolist() == list(range(7))
    with pytest.raises(ValueError, match="buffers must be one a key"):
        backend.batch_get(hashes(0, 1), [found])
    with pytest.raises(ValueError, match="contiguous"):
        backend.get(hashes(0)[0], torch.empty(14, dtype=torch.uint8)[::2])


def test_a_pool_with_pages_of_different_pieces_is_refused(make: Make):
    pool = MadePool()
    backend, honest = make(pool), pool.get_page_buffer_meta
    pool.get_page_buffer_meta = lambda indices: tuple(one[:-1] for one in honest(indices))
    with pytest.raises(ValueError, match="pieces of 2 pages of pool kv must be as many a page"):
        backend.batch_set_v1(hashes(0, 1), tokens_of(0, 1))


# --- hybrid models ----------------------------------------------------------------------------------------------------


def transfer(name: str, pages: list[int], policy: str = "all_pages", places: list[int] | None = None) -> PoolTransfer:
    indices = tokens_of(*(pages if places is None else places))
    return PoolTransfer(PoolName(name), indices, keys=hashes(*pages), hit_policy=PoolHitPolicy(policy))


@pytest.mark.parametrize("other", [MadePool, PoolOfCopies])
def test_pools_of_a_hybrid_model_are_kept_apart(make: Make, other: type[MadePool]):
    kv, mamba = MadePool(), other("layer_first", parts=1)
    kv.fill(1), mamba.fill(2)
    backend = make(kv, kv=kv, mamba=mamba)
    wanted = {"kv": kv.page(1), "mamba": mamba.page(1)}
    assert backend.batch_set_v2([transfer("mamba", [1])]) == {PoolName.MAMBA: [True]}
    assert backend.batch_exists(hashes(1)) == 0
    assert backend.batch_set_v1(hashes(1), tokens_of(1)) == [True]
    kv.fill(3), mamba.fill(4)
    before = mamba.bytes.clone()
    moves = [transfer("kv", [1, 2], places=[5, 6]), transfer("mamba", [0, 1], places=[7, 8])]
    missed = mamba.page(7)
    assert backend.batch_get_v2(moves) == {PoolName.KV: [True, False], PoolName.MAMBA: [False, True]}
    assert same(kv.page(5), wanted["kv"])
    if other is PoolOfCopies:  # a copy that was missed is not put in its place
        assert same(mamba.page(7), missed)
    assert_pages(mamba, {7: mamba.page(7), 8: wanted["mamba"]}, before)


def brute(kv: set[int], other: set[int], num_pages: int, policy: str, window: int) -> list[int]:
    """The beginnings that both pools can serve, by asking for each page of each."""
    found = []
    for length in range(1, num_pages + 1):
        needed = range(length) if policy == "all_pages" else range(max(0, length - window), length)
        if set(range(length)) <= kv and set(needed) <= other:
            found.append(length)
    return found


@pytest.mark.parametrize("policy, window", [("all_pages", 1), ("trailing_pages", 1), ("trailing_pages", 3)])
@pytest.mark.parametrize("kept", [[], [0], [3], [0, 1, 2], [1, 2, 3], [0, 2, 3, 4], [0, 1, 2, 3, 4, 5]])
def test_hits_are_the_beginnings_that_all_pools_serve(make: Make, kept: list[int], policy: str, window: int):
    backend = make(MadePool(), swa=MadePool(parts=1))
    backend.batch_set_v1(hashes(0, 1, 2, 3, 4), tokens_of(0, 1, 2, 3, 4))
    backend.batch_set_v2([transfer("swa", kept)])
    asked = transfer("swa", list(range(window)), policy)
    result = backend.batch_exists_v2(hashes(*range(6)), [asked])
    wanted = brute({0, 1, 2, 3, 4}, set(kept), 6, policy, window)
    assert result.restorable_prefix_pages == wanted and result.kv_hit_pages == max(wanted, default=0)
    assert result.extra_pool_hit_pages[PoolName.KV] == 5
    assert result.extra_pool_hit_pages.get(PoolName.SWA, 0) == max(wanted, default=0)


def test_nothing_in_the_pool_of_kv_is_no_hit(make: Make):
    backend = make(MadePool(), swa=MadePool(parts=1))
    backend.batch_set_v2([transfer("swa", [0])])
    result = backend.batch_exists_v2(hashes(0), [transfer("swa", [0])])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages, result.restorable_prefix_pages) == (0, {}, [])
    assert backend.batch_exists_v2([], None).kv_hit_pages == 0


def test_groups_of_blocks_never_gate_a_hit(make: Make):
    backend = make(MadePool(), swa=MadePool(parts=1))
    backend.batch_set_v1(hashes(0), tokens_of(0))
    result = backend.batch_exists_v2(hashes(0), [transfer("swa", [0], "block_groups")])
    assert result.kv_hit_pages == 1 and PoolName.SWA not in result.extra_pool_hit_pages


def test_an_anchor_without_bytes_follows_the_other_pools(make: Make):
    indexer = MadePool(parts=1)
    indexer.fill(1)
    backend = make(AnchorPool(), indexer=indexer)
    assert backend.batch_set_v1(hashes(0, 1), tokens_of(0, 1)) == [True, True]
    assert backend.batch_exists(hashes(0)) == 0
    backend.batch_set_v2([transfer("indexer", [0, 1])])
    assert backend.batch_exists_v2(hashes(0, 1, 2), [transfer("indexer", [0])]).kv_hit_pages == 2
    assert backend.batch_get_v1(hashes(0, 1), tokens_of(0, 1)) == [True, True]


def test_a_pool_that_nobody_registered_is_named(make: Make):
    backend = make(MadePool())
    with pytest.raises(ValueError, match="a pool must be one of kv, got 'swa'"):
        backend.batch_get_v2([transfer("swa", [0])])


# --- counters, and the end --------------------------------------------------------------------------------------------


def test_metrics_are_sglangs_own_and_given_once(make: Make):
    backend = make(MadePool(), metrics=True)
    backend.batch_set_v1(hashes(0, 1), tokens_of(0, 1))
    backend.batch_get_v1(hashes(0, 1, 2), tokens_of(0, 1, 2))
    backend.batch_get_v1(hashes(3), tokens_of(3))
    stats = backend.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([2], [2])
    assert all(speed > 0 for speed in [*stats.prefetch_bandwidth, *stats.backup_bandwidth])
    assert [len(stats.prefetch_bandwidth), len(stats.backup_bandwidth)] == [1, 1]
    assert backend.get_stats() == fake_sglang.StorageMetrics()
    (tier,) = backend.store_stats().tiers
    assert (tier.hits, tier.misses, tier.written) == (2, 2, 3)  # with the record of the scopes


def test_without_metrics_there_are_none(make: Make):
    assert make(MadePool()).get_stats() is None


def test_clear_forgets_all(make: Make):
    backend = make(MadePool())
    backend.batch_set_v1(hashes(0), tokens_of(0))
    assert backend.clear() is True
    assert backend.batch_exists(hashes(0)) == 0


def test_close_may_be_called_again_and_all_calls_miss(make: Make):
    backend = make(MadePool())
    assert backend.batch_set_v1(hashes(0), tokens_of(0)) == [True]
    backend.close()
    backend.close()
    assert backend.batch_exists(hashes(0)) == 0 and backend.batch_get_v1(hashes(0), tokens_of(0)) == [False]
    assert backend.batch_set_v1(hashes(0), tokens_of(0)) == [False] and not backend.batch_set(
        hashes(0), [torch.ones(1)]
    )


@pytest.mark.parametrize("is_asked_for", [1, 0])
def test_the_log_tells_of_each_call_if_it_is_asked_for(make: Make, caplog: pytest.LogCaptureFixture, is_asked_for: int):
    pool = MadePool("page_first")
    backend = make(pool, {"log_requests": is_asked_for})
    backend.batch_set_v1(hashes(0), tokens_of(0))
    with caplog.at_level("INFO", "kvpage.integrations.sglang.page_storage"):
        assert backend.batch_exists(hashes(0, 1)) == 1
        backend.batch_get_v1(hashes(0, 1), tokens_of(2, 3))
    told = "in pool kv: the store had 1 of 2 pages, 1 from the first one on; refused until now: none"
    assert caplog.messages == [f"look-up {told}", f"load {told}"] * is_asked_for
