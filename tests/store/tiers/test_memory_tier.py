"""The memory tier against a dict; extents against naive ones."""

import errno
import gc
import random
import sys

import pytest
import torch
from support.pinned import FakeRegistrar
from support.seeds import seed_of
from support.store_records import get, key, put, record
from support.tier_life import TierLife

from kvpage.layout import host_memory, pinned_memory, shown_progress
from kvpage.store.tiers import memory_tier
from kvpage.store.tiers.extents import Extents
from kvpage.store.tiers.memory_tier import UNIT, MemoryTier
from kvpage.store.tiers.policy import POLICIES
from kvpage.store.tiers.stretches import address_of
from kvpage.store.tiers.tier import TierError


@pytest.mark.parametrize("seed", range(5))
def test_extents_against_a_list_of_units(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([0, 1, 7, 64])
    extents, units, used = Extents(size), [None] * size, {}
    for step in range(400):
        if step % 100 == 99:
            count = rng.randint(0, 5)
            extents.extend(count)
            units += [None] * count
        elif used and rng.random() < 0.45:
            begin = rng.choice(list(used))
            extents.release(begin)
            for unit in range(begin, begin + used.pop(begin)):
                units[unit] = None
        else:
            count = rng.randint(1, max(size // 3, 1))
            begin = extents.allocate(count)
            runs = free_runs(units)
            fitting = [length for length in runs.values() if length >= count]
            assert (begin is None) == (not fitting)
            if begin is not None:
                assert runs[begin] == min(fitting), "not the best fit"
                used[begin] = count
                units[begin : begin + count] = [step] * count
        extents.check()
        assert extents.num_free == units.count(None)
    with pytest.raises(ValueError, match="num_units must be positive"):
        extents.allocate(0)
    with pytest.raises(ValueError, match="begin must be that of a run in use"):
        extents.release(len(units) + 1)


def free_runs(units: list) -> dict[int, int]:
    runs, begin = {}, None
    for index, unit in enumerate([*units, 0]):
        if unit is None and begin is None:
            begin = index
        elif unit is not None and begin is not None:
            runs[begin] = index - begin
            begin = None
    return runs


@pytest.mark.parametrize("policy", POLICIES)
def test_random_life(policy: str) -> None:
    """Records go one by one, by the policy; open ones stay."""
    make = lambda: MemoryTier(24 * UNIT, policy, pin_memory=False)  # noqa: E731
    # In so short a time all records are of one age for `cost`.
    life = TierLife(seed_of(0), make, 3 * UNIT, policy=None if policy == "cost" else policy)
    life.live(800 if policy == "lru" else 200)
    assert min(life.figures[name] for name in ("read", "evicted")) > 0
    life.tier.clear()
    assert life.tier.stats().num_bytes == 0 and life.tier.create(key(99), 24 * UNIT) is not None


def test_nothing_goes_for_a_record_that_finds_no_run() -> None:
    """Three of four units could be free, but not side by side: one that is read lies between them."""
    tier = MemoryTier(4 * UNIT, pin_memory=False)
    for number in range(4):
        put(tier, {key(number): bytes([number]) * UNIT})
    (reader,) = tier.open([key(1)])
    assert tier.create(key(9), 3 * UNIT) is None
    assert tier.contains([key(number) for number in range(4)]) == [True] * 4 and tier.stats().evicted == 0
    reader.close()
    with tier.create(key(9), 3 * UNIT) as writer:
        assert tier.create(key(8), 2 * UNIT) is None and writer.num_bytes == 3 * UNIT
    tier.check()


def test_a_refused_commit_publishes_nothing() -> None:
    tier, other = MemoryTier(8 * UNIT, pin_memory=False), MemoryTier(8 * UNIT, pin_memory=False)
    data = record(key(0))
    whole, foreign = tier.create(key(0), len(data)), other.create(key(1), len(data))
    part, closed = tier.create(key(2), 100), tier.create(key(3), 100)
    for writer in (whole, foreign):
        writer.piece(0, len(data))[:] = data
    part.piece(0, 99)
    closed.close()
    for writers in ([whole, foreign], [whole, closed], [whole, whole]):
        with pytest.raises(ValueError, match="writers must be this tier's, not closed, each given once"):
            tier.commit(writers)
    with pytest.raises(ValueError, match="must be written to its end, 99 of 100 bytes are"):
        tier.commit([whole, part])
    assert tier.contains([key(n) for n in range(4)]) == [False] * 4
    assert tier.commit([whole]) == other.commit([foreign]) == [True]
    assert get(tier, [key(0)]) == get(other, [key(1)]) == [data]
    part.close()
    tier.check()
    other.check()


def test_what_is_closed_reaches_nobody_elses_bytes() -> None:
    """Its place belongs to another record by then."""
    tier = MemoryTier(UNIT, pin_memory=False)
    put(tier, {key(0): record(key(0))})
    (reader,) = tier.open([key(0)])
    reader.close()
    given_up = tier.create(key(1), 100)
    given_up.close()
    committed = tier.create(key(2), 100)
    committed.piece(0, 100)
    tier.commit([committed])
    put(tier, {key(3): record(key(3))})
    for closed, message in (
        (reader, "a reader must not be closed"),
        (given_up, "a writer must not be closed"),
        (committed, "a writer must not be closed"),
    ):
        with pytest.raises(ValueError, match=message):
            closed.piece(0, 100)
    assert get(tier, [key(3)]) == [record(key(3))]


def test_writers_write_in_order_and_no_further() -> None:
    tier = MemoryTier(UNIT, pin_memory=False)
    writer = tier.create(key(0), 100)
    writer.piece(0, 50)
    for begin, end in ((0, 50), (60, 70), (50, 101), (50, 49)):
        with pytest.raises(ValueError, match="a piece must begin at 50"):
            writer.piece(begin, end)


def test_pieces_outside_and_closed_tiers() -> None:
    tier = MemoryTier(4 * UNIT, pin_memory=False)
    put(tier, {key(0): record(key(0))})
    (reader,) = tier.open([key(0)])
    for begin, end in ((-1, 1), (0, reader.num_bytes + 1), (5, 4)):
        with pytest.raises(ValueError, match="a piece must be in"):
            reader.piece(begin, end)
    tier.close()
    tier.close()
    for call in (
        lambda: reader.piece(0, 1),
        lambda: tier.contains([]),
        lambda: tier.open([]),
        lambda: list(tier.infos()),
    ):
        with pytest.raises(TierError, match="is closed"):
            call()
    with pytest.raises(ValueError, match="capacity must be"):
        MemoryTier(UNIT - 1)


@pytest.mark.parametrize("prefault", [False, True])
def test_a_slab_is_touched_unless_it_must_not(prefault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = []
    monkeypatch.setattr(memory_tier, "touch", lambda slabs, name: touched.append((slabs[0].nbytes, name)))
    MemoryTier(10 * UNIT, pin_memory=False, name="m", prefault=prefault)
    assert touched == [(10 * UNIT, "m")] * prefault
    with pytest.raises(TypeError, match="prefault must be True or False, got int"):
        MemoryTier(UNIT, prefault=1)


def test_touching_shows_progress_of_large_slabs(monkeypatch: pytest.MonkeyPatch, caplog, capsys) -> None:
    monkeypatch.setattr(shown_progress, "SHOWN_BYTES", 3 * UNIT)
    slab = torch.full((3 * UNIT,), 7, dtype=torch.uint8)
    with caplog.at_level("INFO"):
        host_memory.touch([slab[:-1]], "small")
        assert not caplog.messages
        host_memory.touch([slab], "large")
        monkeypatch.setitem(sys.modules, "rich.console", None)  # an extra that is not installed
        host_memory.touch([slab], "large")
    assert caplog.messages == ["touching large: 0.0 GiB"] * 2
    assert bool((slab == 7).all()) and capsys.readouterr() == ("", "")  # no terminal, no bar


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(host_memory, "prefault", fail)
    with pytest.raises(OSError, match="m must have 4096 bytes of memory, got less: Cannot allocate memory"):
        MemoryTier(UNIT, pin_memory=False, name="m")


def test_a_pinned_slab_keeps_records_within_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses a copy across two registrations: a unit at each border is never given out."""
    registrar = FakeRegistrar()
    monkeypatch.setattr(pinned_memory, "make_registrar", lambda: registrar)
    monkeypatch.setattr(memory_tier, "PINNED_PIECE_BYTES", 4 * UNIT)
    tier = MemoryTier(11 * UNIT + 5, pin_memory=True)
    first = min(registrar.held)
    assert sorted(registrar.held.items()) == [(first + at * UNIT, n * UNIT) for at, n in ((0, 4), (4, 4), (8, 3))]
    assert tier.create(bytes(32), 5 * UNIT) is None, "a record is larger than a piece"
    places = []
    for number, num_units in enumerate((4, 3, 2)):
        with tier.create(bytes([number] * 32), num_units * UNIT) as writer:
            view = writer.piece(0, num_units * UNIT)
            view[:] = bytes([number]) * len(view)
            begin = (address_of(view) - first) // UNIT
            places.append(range(begin, begin + num_units))
            assert tier.commit([writer]) == [True]
    assert all(border not in place for place in places for border in (4, 8)) and len(set().union(*places)) == 9
    tier.check()
    assert tier.create(bytes([9] * 32), 5 * UNIT) is None and tier.stats().num_records == 3, "others went for nothing"
    tier.close()
    del tier, writer, view
    gc.collect()
    assert not registrar.held


def test_a_slab_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = FakeRegistrar(failing_call=2)
    monkeypatch.setattr(pinned_memory, "make_registrar", lambda: registrar)
    monkeypatch.setattr(memory_tier, "PINNED_PIECE_BYTES", UNIT)
    with pytest.raises(OSError, match="m must have 16384 bytes that can be pinned, got less: the fake fails"):
        MemoryTier(4 * UNIT, pin_memory=True, name="m")
    assert not registrar.held
