"""KVStore over several tiers: writing through and back, promotion, replacement, and a tier in trouble."""

import random
import threading

import pytest
from support.insides import nobody_reads, stack_of
from support.store_kv import (
    KV,
    TOKENS,
    Between,
    C,
    Troubled,
    corrupt,
    kv_of,
    make,
    same,
    two_tiers,
    written_back,
)

from kvpage.store import Placed
from kvpage.store.tiers.memory_tier import MemoryTier


@pytest.mark.parametrize("write_back", [False, True])
def test_tiers_are_written_and_hits_are_promoted(write_back: bool) -> None:
    store, small, large = two_tiers(is_written_back=write_back)
    tokens = list(range(3 * C))
    kv = kv_of(tokens)
    store.store(tokens, kv)
    store.flush()
    assert small.stats().num_records == large.stats().num_records == 3
    small.clear()
    assert store.lookup(tokens) == 3 * C and same(store.retrieve(tokens)[0], kv)
    assert small.stats().num_records == 3 and store.stats().promoted_chunks == 3
    large.clear()
    assert same(store.retrieve(tokens)[0], kv)


def test_a_prefetch_copies_what_a_load_would_promote() -> None:
    store, small, large = two_tiers()
    tokens = list(range(3 * C + 1))
    kv = kv_of(tokens)
    assert store.prefetch(tokens) == 0 and store.prefetch([]) == 0
    store.store(tokens, kv)
    small.clear()
    assert store.prefetch(tokens, b"another") == 0 and small.stats().num_records == 0
    large.remove(store.keys_of(tokens)[1:2])
    assert store.prefetch(tokens) == C and small.stats().num_records == 3  # also those after a gap
    assert store.stats().promoted_chunks == 3
    assert store.prefetch(tokens[:C]) == C and store.stats().promoted_chunks == 3
    large.clear()
    assert same(store.retrieve(tokens)[0], kv[:, :, :C])


def test_a_prefetch_fills_no_tier_that_takes_no_hits() -> None:
    store, small, _ = two_tiers()
    store._tiers.tiers[0] = Placed(small, promotes=False)
    tokens = list(range(2 * C))
    store.store(tokens, kv_of(tokens))
    small.clear()
    assert store.prefetch(tokens) == 2 * C and small.stats().num_records == 0


def test_a_prefetch_of_a_damaged_record_leaves_it_to_its_reader() -> None:
    store, small, large = two_tiers()
    tokens = list(range(2 * C))
    store.store(tokens, kv_of(tokens))
    small.clear()
    corrupt(large, store.keys_of(tokens)[0], 300)
    assert store.prefetch(tokens) == 0
    assert store.retrieve(tokens)[1].sum() == 0 and store.stats().corrupt_records == 1


def test_a_prefix_may_be_spread_over_tiers() -> None:
    store, small, large = two_tiers()
    stack_of(store).tiers[0] = Placed(small, promotes=False)
    tokens = list(range(6 * C))
    kv = kv_of(tokens)
    store.store(tokens, kv)
    assert small.stats().num_records == 3 and large.stats().num_records == 6
    large.remove(store.keys_of(tokens)[3:4])
    assert store.lookup(tokens) == (6 if small.contains(store.keys_of(tokens)[3:4])[0] else 3) * C
    assert same(store.retrieve(tokens)[0], kv[:, :, : store.lookup(tokens)])
    assert store.stats().promoted_chunks == 0


def test_what_each_tier_gave_is_counted() -> None:
    store, small, _ = two_tiers()
    tokens = list(range(3 * C))
    store.store(tokens, kv_of(tokens))
    store.flush()
    assert store.stats().read_chunks == (0, 0) and store.lookup(tokens) and store.stats().read_chunks == (0, 0)
    store.retrieve(tokens)
    assert store.stats().read_chunks == (3, 0)
    small.remove(store.keys_of(tokens)[1:])
    store.retrieve(tokens)
    assert store.stats().read_chunks == (4, 2), "the others came back into the first tier by this"
    store.retrieve([*tokens[: 2 * C], -1, -1])
    assert store.stats().read_chunks == (6, 2)


@pytest.mark.parametrize("order", [0, 1])
def test_a_tier_in_trouble_is_a_miss_and_the_other_goes_on(order: int) -> None:
    rng, failing = random.Random(1), [True]
    tiers = [Troubled(lambda: failing[0] and rng.random() < 0.5), MemoryTier(1 << 20, pin_memory=False)]
    store = make(tiers=tiers if order else tiers[::-1])
    for seed in range(20):
        tokens = [seed] * (3 * C)
        kv = kv_of(tokens)
        store.store(tokens, kv)
        found, mask = store.retrieve(tokens)
        assert same(found, kv[:, :, : int(mask.sum())])
        assert int(mask.sum()) == 3 * C, "the tier that works has it all"
    assert store.stats().tier_errors > 20
    failing[0] = False
    alone = make(tiers=[Troubled(lambda: True)])
    assert alone.store(TOKENS, KV).result() == 0 and alone.lookup(TOKENS) == 0
    assert alone.retrieve(TOKENS)[0] == () and alone.remove(TOKENS) == 0 and alone.pin(TOKENS).num_tokens == 0
    alone.clear(), alone.flush(), alone.stats(), alone.close()


def test_what_is_to_be_written_back_is_not_evicted_before() -> None:
    store, small, large, go = written_back(2)
    first, second = list(range(2 * C)), list(range(100, 100 + 3 * C))
    store.store(first, kv_of(first))
    assert (small.stats().num_records, large.stats().num_records) == (2, 0)
    store.store(second, kv_of(second))
    assert small.stats().evicted == 0
    assert large.stats().num_records == 3, "what the first tier has no room for is written at once"
    go.set()
    store.flush()
    assert large.stats().num_records == 5
    assert store.store(second, kv_of(second)).result() == 3  # now the first tier has room
    small.clear()
    for tokens in (first, second):
        assert same(store.retrieve(tokens)[0], kv_of(tokens))
    store.flush()
    assert stack_of(store).copies.num_under_way == 0 and nobody_reads(small)
    store.close()


@pytest.mark.parametrize("change", ["remove", "clear", "store"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_promotion_brings_nothing_back_that_was_removed_or_replaced(change: str, number: int) -> None:
    """Its reader was open before."""
    fast, slow = MemoryTier(1 << 20, pin_memory=False), Between("open", number)
    store, tokens, other = make(tiers=[fast, slow]), list(range(C)), kv_of(list(range(C)), namespace=b"other")
    store.store(tokens, kv_of(tokens))
    fast.clear()
    changes = {
        "remove": lambda: store.remove(tokens),
        "clear": store.clear,
        "store": lambda: store.store(tokens, other, skip_existing=False),
    }
    slow.then = changes[change]
    slow.begin()
    store.retrieve(tokens)
    assert store.lookup(tokens) == (C if change == "store" else 0)
    assert same(store.retrieve(tokens)[0], other if change == "store" else other[:, :, :0])
    fast.clear()
    assert same(store.retrieve(tokens)[0], other if change == "store" else other[:, :, :0])
    assert stack_of(store).copies.num_under_way == 0


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("fails", ["create", "commit"])
@pytest.mark.parametrize("troubled", [0, 1])
def test_what_could_not_be_replaced_is_gone(write_back: bool, fails: str, troubled: int) -> None:
    """Else the older one would come back as soon as the newer is evicted from where it was written."""
    tiers = [MemoryTier(1 << 20, pin_memory=False) for _ in range(2)]
    store = make(tiers=[Placed(tiers[0]), Placed(tiers[1], is_written_back=write_back)])
    tokens, other = list(range(C)), kv_of(list(range(C)), namespace=b"other")
    store.store(tokens, kv_of(tokens))
    store.flush()
    works, no = getattr(tiers[troubled], fails), {"create": None, "commit": [False]}[fails]
    setattr(tiers[troubled], fails, lambda *args: no)
    assert store.store(tokens, other, skip_existing=False).result() == 1
    store.flush()
    setattr(tiers[troubled], fails, works)
    tiers[1 - troubled].clear()
    assert store.lookup(tokens) == 0 and store.retrieve(tokens)[0] == ()
    store.store(tokens, other, skip_existing=False)
    assert same(store.retrieve(tokens)[0], other)
    for tier in tiers:
        tier.check()


def test_of_replacements_at_once_all_tiers_have_the_same() -> None:
    """The second comes when the first tier has the first one's, and the second tier has not."""
    fast, slow = MemoryTier(1 << 20, pin_memory=False), Between("create", after=False)
    store, tokens = make(tiers=[fast, slow]), list(range(C))
    versions = [kv_of(tokens, namespace=b"%d" % number) for number in range(2)]
    second = threading.Thread(target=lambda: store.store(tokens, versions[1], skip_existing=False))
    slow.then = lambda: (second.start(), second.join(0.5))
    slow.begin()
    store.store(tokens, versions[0], skip_existing=False)
    second.join()
    assert same(store.retrieve(tokens)[0], versions[1])
    fast.clear()
    assert same(store.retrieve(tokens)[0], versions[1])


@pytest.mark.parametrize("change", ["remove", "clear", "store"])
@pytest.mark.parametrize("method", ["create", "commit"])
def test_a_put_that_a_change_overtakes_leaves_no_tier_behind(change: str, method: str) -> None:
    """It has written the first tier, and comes to the second one when all that it wrote was removed or replaced."""
    fast, slow = MemoryTier(1 << 20, pin_memory=False), Between(method, after=False)
    store, tokens = make(tiers=[fast, slow]), list(range(C))
    versions = [kv_of(tokens, namespace=b"%d" % number) for number in range(2)]
    changes = {
        "remove": lambda: store.remove(tokens),
        "clear": store.clear,
        "store": lambda: store.store(tokens, versions[1], skip_existing=False),
    }
    changing = threading.Thread(target=changes[change])
    slow.then = lambda: (changing.start(), changing.join(0.5))
    slow.begin()
    store.store(tokens, versions[0])
    changing.join()
    left = versions[1] if change == "store" else versions[1][:, :, :0]
    for clear in (lambda: None, fast.clear):
        clear()
        assert same(store.retrieve(tokens)[0], left)
    assert stack_of(store).copies.num_under_way == 0


@pytest.mark.parametrize("change", ["remove", "clear"])
def test_what_is_removed_while_it_is_being_written_back_is_gone(change: str) -> None:
    fast, slow, at_work = MemoryTier(1 << 20, pin_memory=False), Between("commit", after=False), threading.Event()
    store, tokens = make(tiers=[Placed(fast), Placed(slow, is_written_back=True)]), list(range(C))
    remover = threading.Thread(target=(store.clear if change == "clear" else lambda: store.remove(tokens)))
    slow.then = lambda: (remover.start(), remover.join(0.5), at_work.set())
    slow.begin()
    store.store(tokens, kv_of(tokens))
    assert at_work.wait(120)
    remover.join()
    store.flush()
    assert store.lookup(tokens) == 0
    slow.check()


@pytest.mark.parametrize("call", ["store", "retrieve"])
def test_a_slow_tier_that_is_written_back_keeps_nobody_waiting(call: str) -> None:
    go, is_slow = threading.Event(), threading.Event()
    fast, middle = (MemoryTier(1 << 20, pin_memory=False) for _ in range(2))
    slow = Between("commit", after=False)
    slow.then = lambda: (is_slow.set(), go.wait(120))
    store = make(tiers=[Placed(fast), Placed(middle), Placed(slow, is_written_back=True)])
    tokens, others = list(range(C)), list(range(100, 100 + C))
    store.store(others, kv_of(others))
    store.flush()
    fast.clear()
    slow.begin()
    store.store(tokens, kv_of(tokens))
    assert is_slow.wait(120)
    done = []
    calls = {
        "store": lambda: done.append(store.store([7] * C, kv_of([7] * C)).result() == 1),
        "retrieve": lambda: done.append(same(store.retrieve(others)[0], kv_of(others))),
    }
    thread = threading.Thread(target=calls[call], daemon=True)
    thread.start()
    thread.join(120)
    assert done == [True]
    go.set()
    store.flush()
    assert slow.stats().num_records == 2 + (call == "store")
    assert fast.stats().num_records == 2
