"""ByteStore against a dict: every size, kind of buffer and number of pieces; misses, deadlines, bad arguments."""

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_stores import HEADER, MEMORY, SIZES, as_kinds, data_of, disk, in_pieces, key_of, opened, room
from support.insides import names_of, refuses_calls
from support.waiting import until

from kvpage.store import ByteStore, ByteStoreConfig, Placed
from kvpage.store.tiers.memory_tier import MemoryTier

KEYS = [key_of(number) for number in range(len(SIZES))]
RECORDS = [data_of(number, size) for number, size in enumerate(SIZES)]


@pytest.fixture(params=["memory", "disk", "both"])
def store(request, tmp_path):
    urls = {"memory": [MEMORY], "disk": [disk(tmp_path)], "both": ["memory://?size=1MiB", disk(tmp_path)]}
    with opened(*urls[request.param]) as store:
        yield store


@pytest.mark.parametrize("size", [0, 1, 5000, 1 << 20, (2 << 20) + 3])
def test_pieces_that_read_may_be_others_than_those_that_wrote(store: ByteStore, size: int) -> None:
    data = data_of(7, size)
    ways = [[], [size // 2], [0, 0, size], sorted({min(at, size) for at in (1, 4095, 4096, 70000)}),
            list(range(0, size, max(size // 50, 1)))]  # fmt: skip
    for number, cuts in enumerate(ways):
        assert store.put([key_of(number)], [in_pieces(bytearray(data), cuts)]) == [True]
    for number in range(len(ways)):
        for cuts in ways:
            one = room(size)
            assert store.get_into([key_of(number)], [in_pieces(one, cuts)]) == [True]
            assert one == data


@pytest.mark.parametrize("data", [b"", b"abcd" * 1025])
def test_every_kind_of_buffer_holds_a_record(data: bytes) -> None:
    with opened() as store:
        kinds = as_kinds(data)
        keys = [key_of(number) for number in range(len(kinds))]
        assert all(store.put(keys, kinds)) and all(store.put([b"mixed"], [kinds]))
        for buffer in as_kinds(bytes(len(data)))[1:]:
            if isinstance(buffer, memoryview):
                continue  # of bytes: read-only
            for key in keys:
                assert store.get_into([key], [buffer]) == [True] and bytes(memoryview(np.asarray(buffer))) == data
        mixed = room(len(data) * len(kinds))
        assert store.get_into([b"mixed"], [mixed]) == [True] and mixed == data * len(kinds)


def test_none_stands_for_a_record_that_is_not_wanted(store: ByteStore) -> None:
    assert store.put([b"a", b"b", b"c"], [b"1", None, b"3"]) == [True, False, True]
    assert store.contains([b"a", b"b", b"c"]) == [True, False, True]
    one = room(1)
    assert store.get_into([b"a", b"b", b"c"], [None, room(1), one]) == [False, False, True] and one == b"3"
    assert store.put([b"a"], [None]) == [False] and store.contains([b"a"]) == [True]


@pytest.mark.parametrize("more", [-1, 1, 4096])
def test_a_record_of_another_size_is_a_miss_and_makes_place_for_the_right_one(store: ByteStore, more: int) -> None:
    """If it stayed, `contains` would promise it for ever, and `put` would leave it alone."""
    assert all(store.put(KEYS, RECORDS))
    sizes = [max(size + more, 0) for size in SIZES]
    is_same = [size == 0 and more == -1 for size in SIZES]
    assert store.get_into(KEYS, [room(size) for size in sizes]) == store.contains(KEYS) == is_same
    others, rooms = [data_of(50 + at, size) for at, size in enumerate(sizes)], [room(size) for size in sizes]
    assert all(store.put(KEYS, others)) and all(store.get_into(KEYS, rooms)) and rooms == others


def freed(tensor: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """A part of a tensor whose storage is gone."""
    part = tensor[begin:]
    tensor.untyped_storage().resize_(0)
    return part


def test_memory_that_cannot_hold_a_record_is_refused_by_name() -> None:
    shared, other = torch.zeros(9), bytearray(8)
    refused = [
        ([freed(torch.zeros(9))], "must have memory, got one of 36 bytes whose storage has 0"),
        ([freed(torch.zeros(9), 4)], "must have memory"),
        ([torch.zeros(4, dtype=torch.complex64).conj()], "must be resolved"),
        ([torch.zeros(4, dtype=torch.complex64).conj().imag], "must be resolved"),
        ([other, other], "buffers must share no byte"),
        ([shared[:5], shared[4:]], "buffers must share no byte"),
        ([[shared[:5], other, shared[4:]]], "buffers must share no byte"),
    ]
    with opened() as store:
        for buffers, message in refused:
            with pytest.raises(ValueError, match=message):
                store.get_into(KEYS[: len(buffers)], buffers)
        assert store.get_into(KEYS[:3], [shared[:4], shared[4:], torch.zeros(0)]) == [False] * 3
        assert store.put(KEYS[:2], [other, other]) == [True, True], "to read a byte twice is right"


def test_stores_of_other_headers_do_not_meet(tmp_path) -> None:
    headers = [
        HEADER, {}, {"model": "m@1"}, {"model": "m@1", "version": 2}, {"model": "m@1", "version": "1"},
        {"model": "m@1", "version": 1.0}, {"model": "m@1", "version": True}, {"model": "m@1", "version": [1]},
        {"model": "m@1", "version": b"1"}, {"model": "m@1", "version": None}, {"model": "m@1", "version": [[1]]},
        {"model": "m@1", "version": 1, "x": None}, b"", b"m@1",
    ]  # fmt: skip
    tier = MemoryTier(1 << 20, pin_memory=False)
    stores = [opened(tier, header=header) for header in headers]
    for number, store in enumerate(stores):
        assert store.contains([b"k"]) == [False] and store.get_into([b"k"], [room(2)]) == [False]
        assert store.put([b"k"], [b"%2d" % number]) == [True]
    for number, store in enumerate(stores):
        one = room(2)
        assert store.get_into([b"k"], [one]) == [True] and one == b"%2d" % number
    assert opened(tier, header={"version": 1, "model": "m@1"}).contains([b"k"]) == [True], "the order of names is free"
    assert opened(tier, header={"model": "m@1", "version": (1,)}).remove([b"k"]) == [True], "a tuple is a list"
    assert stores[0].contains([b"k"]) == [True]


def test_a_call_whose_time_is_over_is_a_miss_and_changes_nothing(store: ByteStore) -> None:
    assert store.put([b"k"], [b"x"], deadline=0) == [False] and store.contains([b"k"]) == [False]
    assert store.put([b"k"], [b"x"], deadline=60) == [True]
    one = room(1)
    assert store.contains([b"k"], deadline=0) == store.get_into([b"k"], [one], deadline=0) == [False]
    assert store.remove([b"k"], deadline=0) == [False] and one == room(1)
    assert store.put([b"k"], [b"y"], skip_existing=False, deadline=0) == [False]
    assert store.get_into([b"k"], [one], deadline=60) == [True] and one == b"x"
    assert store.later.get_into([b"k"], [one], deadline=0).result() == [False]
    assert store.remove([b"k"], deadline=60) == [True]


BAD_KEYS = [b"k", ["k"], [b""], [bytes(65536)], [None], 5]


def test_use_is_counted_by_tier() -> None:
    tiers = [MemoryTier(1 << 20, pin_memory=False, name="a"), MemoryTier(1 << 20, pin_memory=False, name="b")]
    with opened(Placed(tiers[0], promotes=False), tiers[1]) as store:
        assert all(store.put([b"k", b"l"], [b"1" * 100, b"2" * 200]))
        assert store.remove([b"none"]) == [False]
        tiers[0].remove(names_of(store, [b"l"]))
        assert store.get_into([b"k", b"l", b"m"], [room(100), room(200), room(1)]) == [True, True, False]
        first, second = store.stats().tiers
        assert (first.name, first.written, first.hits, first.misses, first.num_records) == ("a", 2, 1, 2, 1)
        assert (second.name, second.written, second.hits, second.misses, second.num_records) == ("b", 2, 1, 1, 2)
        assert first.written_bytes > 300 and first.read_bytes > 100 and second.read_bytes > 200
        assert first.read_seconds > 0 and first.write_seconds > 0


@pytest.mark.parametrize("keys", BAD_KEYS)
def test_wrong_keys_are_refused(keys) -> None:
    with opened() as store:
        for call in (store.contains, store.remove, store.later.contains, store.later.remove):
            with pytest.raises((ValueError, TypeError), match="keys must"):
                call(keys)
        for call in (store.put, store.get_into, store.later.put, store.later.get_into):
            with pytest.raises((ValueError, TypeError), match="keys must"):
                call(keys, [bytearray(1)])
        assert store.put([bytes(65535)], [b"x"]) == [True]


WRONG_BUFFERS = [
    "text",
    5,
    object(),
    [5],
    np.zeros((4, 4))[:, 1],
    memoryview(bytes(8))[::2],
    torch.zeros(4, 4).t(),
    torch.zeros(4, device="meta"),
    np.array([object()]),
]


@pytest.mark.parametrize("buffer", WRONG_BUFFERS)
def test_wrong_buffers_are_refused_before_anything_is_written(buffer) -> None:
    with opened() as store:
        for call in (store.put, store.get_into, store.later.put, store.later.get_into):
            with pytest.raises((ValueError, TypeError), match="(buffers|tensors) must"):
                call([b"good", b"bad"], [bytearray(1), buffer])
        assert store.contains([b"good"]) == [False]


def test_arguments_that_do_not_fit_are_refused() -> None:
    with opened() as store:
        with pytest.raises(ValueError, match="one a key, got 1 for 2"):
            store.put([b"a", b"b"], [b"1"])
        with pytest.raises(ValueError, match="keys must be given once"):
            store.put([b"a", b"a"], [b"1", b"2"])
        with pytest.raises(ValueError, match="must be writable"):
            store.get_into([b"a"], [bytes(1)])
        for deadline in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="deadline must"):
                store.contains([b"a"], deadline=deadline)
        with pytest.raises(TypeError, match="deadline must"):
            store.contains([b"a"], deadline="1")
        with pytest.raises(TypeError, match="skip_existing must"):
            store.put([b"a"], [b"1"], skip_existing=1)
        assert store.contains([b"a"]) == [False]


@pytest.mark.parametrize("header", [5, "text", {1: 2}, {"a": object()}, {"a": {"b": 1}}, {"a": torch.float16}])
def test_wrong_headers_are_refused(header) -> None:
    with pytest.raises(TypeError, match="header must"):
        opened(header=header)
    with pytest.raises(ValueError, match="header must be at most"):
        opened(header=bytes(1 << 16))


def test_a_configuration_names_what_is_wrong() -> None:
    assert ByteStoreConfig.from_dict({"tiers": MEMORY, "deadline": 2}) == ByteStoreConfig((MEMORY,), deadline=2)
    with pytest.raises(ValueError, match="keys must be among deadline, dtype, num_threads, tiers, got teirs"):
        ByteStoreConfig.from_dict({"teirs": MEMORY})
    for values in ({"tiers": ()}, {"num_threads": 0}, {"deadline": 0}, {"deadline": True}, {"tiers": ("x",)}):
        with pytest.raises(ValueError, match="must"):
            ByteStoreConfig(**values)


def test_a_closed_store_refuses_calls_and_a_forked_one_too() -> None:
    store = opened()
    store.put([b"k"], [b"x"])
    pid = os.fork()
    if pid == 0:
        codes = []
        for call in (lambda: store.contains([b"k"]), lambda: store.later.contains([b"k"]), store.stats, store.flush):
            try:
                call()
            except RuntimeError:
                codes.append(0)
        store.close()
        os._exit(len(codes))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert store.contains([b"k"]) == [True]
    store.close(), store.close()
    for call in (lambda: store.contains([b"k"]), lambda: store.later.put([b"k"], [b"x"]), store.clear):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert store.stats().tiers[0].written == 1


class SlowTier(MemoryTier):
    """Waits for `go` before it makes room for a record."""

    def __init__(self) -> None:
        super().__init__(1 << 20, pin_memory=False)
        self.entered, self.go = threading.Event(), threading.Event()

    def create(self, key, num_bytes):
        self.entered.set()
        assert self.go.wait(120)
        return super().create(key, num_bytes)


def test_closing_waits_for_calls_and_futures() -> None:
    tier = SlowTier()
    store, source = opened(tier), bytearray(b"x" * 100)
    futures = [store.later.put([key_of(number)], [source]) for number in range(3)]
    assert tier.entered.wait(120)
    closing = threading.Thread(target=store.close)
    closing.start()
    until(lambda: refuses_calls(store))
    with pytest.raises(ValueError, match="closed"):
        store.later.contains([b"k"])
    assert closing.is_alive() and not futures[0].done()
    tier.go.set()
    closing.join(120)
    assert [future.result() for future in futures] == [[True]] * 3


def test_futures_give_what_calls_give_and_changes_keep_their_order(store: ByteStore) -> None:
    records = [data_of(number, 3000) for number in range(30)]
    keys = [key_of(number) for number in range(30)]
    futures = [store.later.put([key], [record]) for key, record in zip(keys, records, strict=True)]
    futures += [store.later.remove([key]) for key in keys[::2]]
    futures += [store.later.put([key], [b"new"]) for key in keys[::4]]
    assert [future.result() for future in futures] == [[True]] * len(futures)
    rooms = [room(3 if number % 4 == 0 else 3000) for number in range(30)]
    expected = [number % 4 == 0 or number % 2 == 1 for number in range(30)]
    assert store.later.contains(keys).result() == expected == store.later.get_into(keys, rooms).result()
    for number, is_there in enumerate(expected):
        assert not is_there or rooms[number] == (b"new" if number % 4 == 0 else records[number])


def test_a_cancelled_future_does_not_hold_the_store_open() -> None:
    tier = SlowTier()
    store = opened(tier)
    first, second = store.later.put([b"a"], [b"1"]), store.later.put([b"b"], [b"2"])
    assert tier.entered.wait(120) and second.cancel()
    tier.go.set()
    assert first.result() == [True] and store.contains([b"b"]) == [False]
    store.close()


def test_look_ups_and_touches_wait_for_no_read() -> None:
    entered, go = threading.Semaphore(0), threading.Event()

    class Slow(MemoryTier):
        def open(self, keys, timeout=None):
            entered.release()
            assert go.wait(120)
            return super().open(keys, timeout)

    with opened(Slow(1 << 20, pin_memory=False)) as store:
        store.put([b"a"], [b"1"])
        reads = [store.later.get_into([b"a"], [room(1)]) for _ in range(8)]
        assert entered.acquire(timeout=120)
        assert store.later.contains([b"a"]).result(120) == store.later.touch([b"a"]).result(120) == [True]
        assert not any(read.done() for read in reads)
        go.set()
        assert [read.result() for read in reads] == [[True]] * 8


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_random_life_against_a_dict(data) -> None:
    tier, known = MemoryTier(1 << 20, pin_memory=False), {}
    with opened(tier) as store:
        for step in range(data.draw(st.integers(1, 25))):
            numbers = data.draw(st.lists(st.integers(0, 7), max_size=6, unique=True))
            keys, sizes = [key_of(one) for one in numbers], [data.draw(st.integers(0, 3)) * 2500 for _ in numbers]
            records = [data_of(100 * step + one, size) for one, size in zip(numbers, sizes, strict=True)]
            act = data.draw(st.sampled_from(["put", "replace", "get", "remove", "clear"]))
            if act in ("put", "replace"):
                assert all(store.put(keys, records, skip_existing=act == "put"))
                new = dict(zip(keys, records, strict=True))
                known = new | known if act == "put" else known | new
            elif act == "remove":
                assert store.remove(keys) == [known.pop(key, None) is not None for key in keys]
            elif act == "clear" and step % 5 == 0:
                store.clear()
                known.clear()
            rooms = [room(size) for size in sizes]
            found = store.get_into(keys, rooms)
            fits = [len(known[key]) == size if key in known else None for key, size in zip(keys, sizes, strict=True)]
            assert found == [fit is True for fit in fits]
            known = {key: one for key, one in known.items() if (key, False) not in zip(keys, fits, strict=True)}
            assert all(one == known[key] for key, one, is_found in zip(keys, rooms, found, strict=True) if is_found)
            assert store.contains(list(known)) == [True] * len(known)
            assert tier.stats().num_records == len(known)
