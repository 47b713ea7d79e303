"""Asynchronous swaps over a stream that does nothing until it is told to: order, pins, errors, layers."""

import gc
import threading
import uuid
from collections import deque

import pytest
import torch
from support.swap_pairs import MODEL, pairs
from support.waiting import until

from kvpage import BlockPool, CacheConfig, CacheEngine, DeviceConfig, PrefixTree, register_backend
from kvpage.layout.backends import FlashBackend

NUM_GPU, NUM_CPU = 7, 5


class FakeEvent:
    def __init__(self, stream, time):
        self.stream, self.time, self.passed = stream, time, False

    def is_done(self):
        if self.stream.broken:
            raise RuntimeError("the device is gone")
        return self.passed

    def wait(self):
        if self.stream.broken:
            raise RuntimeError("the device is gone")
        while not self.passed:
            self.stream.step()

    def wait_stream(self, stream):
        self.stream.log.append(("wait_stream", self.time, stream))
        self.wait()

    def seconds_since(self, earlier):
        return float(self.time - earlier.time)


class FakeStream:
    """Work and events wait in line until `step` takes the next one."""

    def __init__(self):
        self.line, self.log, self.num_recorded = deque(), [], 0
        self.refuse_at, self.broken = None, False

    def wait_current(self):
        self.log.append("wait_current")

    def submit(self, work):
        self.line.append(work)

    def record(self):
        if self.num_recorded == self.refuse_at:
            raise RuntimeError("no more")
        self.num_recorded += 1
        self.line.append(FakeEvent(self, self.num_recorded))
        return self.line[-1]

    def step(self):
        item = self.line.popleft()
        if isinstance(item, FakeEvent):
            item.passed = True
        else:
            item()

    def run(self):
        while self.line:
            self.step()

    def close(self, last):
        self.run()
        last()
        self.log.append("closed")


def engine(stream, backend="flash", model=MODEL, **names) -> CacheEngine:
    config = CacheConfig(4, NUM_GPU, NUM_CPU, backend=backend, **names)
    made = CacheEngine(config, model, None, DeviceConfig("cpu"), make_stream=lambda device: stream)
    for cache in (*made.gpu_cache, *made.cpu_cache):
        cache.copy_(torch.randint(-(1 << 15), 1 << 15, cache.shape, dtype=torch.int16).view(torch.float16))
    return made


def bits(caches) -> list[torch.Tensor]:
    return [cache.contiguous().view(torch.int16).clone() for cache in caches]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def moved(srcs, dsts, mapping, dim) -> list[torch.Tensor]:
    """What dsts become."""
    out = bits(dsts)
    for src, dst in zip(bits(srcs), out, strict=True):
        dst.index_copy_(dim, mapping[:, 1], src.index_select(dim, mapping[:, 0]))
    return out


@pytest.fixture
def stream():
    return FakeStream()


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("direction", ["swap_in", "swap_out"])
@pytest.mark.parametrize("rows", [[], [(3, 1)], [(0, 4), (4, 0), (4, 2), (1, 1)]], ids=len)
def test_nothing_moves_before_its_time_and_then_every_byte(stream, direction, by_layer, layer_layout, rows):
    made = engine(stream, layer_layout=layer_layout)
    tiers = made.cpu_cache, made.gpu_cache
    srcs, dsts = tiers if direction == "swap_in" else tiers[::-1]
    before, mapping = (bits(srcs), bits(dsts)), pairs(*rows)
    expected = moved(srcs, dsts, mapping, 1)
    transfer = getattr(made, direction)(mapping, non_blocking=True, by_layer=by_layer)
    mapping.fill_(1 << 40)  # the caller's own again
    assert stream.log == ["wait_current"] and not transfer.is_done() and made.poll() == 1
    assert same(bits(srcs), before[0]) and same(bits(dsts), before[1])
    assert transfer.seconds is None and transfer.gigabytes_per_second is None
    stream.run()
    assert same(bits(srcs), before[0]) and same(bits(dsts), expected)
    assert transfer.is_done() and made.poll() == 0
    block_bytes = 3 * made.layout.block_bytes
    assert transfer.num_bytes == len(rows) * block_bytes
    assert transfer.seconds == (3 if by_layer else 1)
    assert transfer.gigabytes_per_second == pytest.approx(len(rows) * block_bytes / transfer.seconds / 1e9)


def test_transfers_come_in_order_and_other_calls_after_them(stream):
    made = engine(stream)
    first = bits(made.gpu_cache)
    out = made.swap_out(pairs((6, 0)), non_blocking=True)
    back = made.swap_in(pairs((0, 5)), non_blocking=True)
    assert not stream.log.count(("wait_stream", 2, None))
    made.copy(pairs((5, 4)))
    assert [entry for entry in stream.log if entry != "wait_current"] == [
        ("wait_stream", 2, None),
        ("wait_stream", 4, None),
    ]
    for cache, before in zip(bits(made.gpu_cache), first, strict=True):
        assert torch.equal(cache[:, [4, 5]], before[:, [6, 6]])
    assert out.is_done() and back.is_done()
    again = made.swap_out(pairs((4, 1)), non_blocking=True)
    made.swap_in(pairs((1, 0)))
    assert again.is_done() and same([c[:, 0] for c in bits(made.gpu_cache)], [c[:, 6] for c in first])
    num_waits = len(stream.log)
    made.copy(pairs((0, 1)))
    made.swap_out(pairs((0, 1)))
    assert len(stream.log) == num_waits  # with nothing in flight there is nothing to wait for


def pools():
    gpu, cpu = BlockPool(NUM_GPU), BlockPool(NUM_CPU)
    gpu.allocate(NUM_GPU), cpu.allocate(3)
    return gpu, cpu


def counts(pool):
    return [pool.ref_count(i) for i in range(pool.num_blocks)]


def test_pins_are_given_back_once(stream):
    made, (gpu, cpu) = engine(stream), pools()
    transfer = made.swap_out(pairs((6, 0), (6, 1), (2, 2)), non_blocking=True, pools=(gpu, cpu))
    assert counts(gpu) == [1, 1, 2, 1, 1, 1, 3] and counts(cpu) == [2, 2, 2, 0, 0]
    gpu.release([6, 2])
    cpu.release([0])
    assert gpu.num_free == 0 and cpu.num_free == 2  # the owners are gone, and the blocks still not free
    transfer.wait()
    assert counts(gpu) == [1, 1, 0, 1, 1, 1, 0] and counts(cpu) == [0, 1, 1, 0, 0]
    for _ in range(2):
        transfer.wait()
        assert transfer.is_done() and made.poll() == 0
    assert counts(gpu) == [1, 1, 0, 1, 1, 1, 0] and counts(cpu) == [0, 1, 1, 0, 0]
    gpu.check(), cpu.check()


def test_a_dropped_transfer_is_finished_by_the_engines_next_call(stream):
    for finish in ("poll", "copy", "swap"):
        made, (gpu, cpu) = engine(stream), pools()
        made.swap_out(pairs((6, 0)), non_blocking=True, pools=(gpu, cpu))
        gc.collect()
        assert gpu.ref_count(6) == 2
        stream.run()
        assert gpu.ref_count(6) == 2  # nobody has looked yet
        if finish == "poll":
            assert made.poll() == 0
        elif finish == "copy":
            made.copy(pairs())
        else:
            made.swap_in(pairs(), non_blocking=True)
        assert counts(gpu) == [1] * 7 and counts(cpu) == [1, 1, 1, 0, 0]


def test_a_dropped_engine_finishes_its_transfers(stream):
    made, (gpu, cpu) = engine(stream), pools()
    done = []
    transfer = made.swap_out(pairs((6, 0)), non_blocking=True, pools=(gpu, cpu), on_done=done.append)
    host = made.cpu_cache
    expected = moved(made.gpu_cache, host, pairs((6, 0)), 1)
    del made
    until(lambda: stream.log[-1] == "closed")
    assert done == [transfer] and transfer.is_done()
    assert counts(gpu) == [1] * 7 and same(bits(host), expected)


def test_cached_blocks_are_protected_by_their_match(stream):
    made = engine(stream)
    gpu = BlockPool(NUM_GPU)
    tree = PrefixTree(gpu, 4)
    match = tree.insert(list(range(4)), gpu.allocate(1))
    with pytest.raises(ValueError, match="belongs to a prefix tree"):
        made.swap_out(pairs((0, 0)), non_blocking=True, pools=(gpu, None))
    assert not stream.line
    transfer = made.swap_out(pairs((0, 0)), non_blocking=True, on_done=lambda _: tree.release(match))
    assert tree.evict(1) == 0
    transfer.wait()
    assert match.is_released and tree.evict(1) == 1


def test_bad_calls_change_nothing(stream):
    made, (gpu, cpu) = engine(stream), pools()
    before = bits(made.gpu_cache), bits(made.cpu_cache), counts(gpu), counts(cpu)
    cases = [
        ({"src_to_dst": pairs((7, 0))}, r"source blocks in \[0, 7\), got 7"),
        ({"src_to_dst": pairs((0, 0), (1, 0))}, "each destination once"),
        ({"src_to_dst": torch.zeros(1, 2)}, "dtype must be torch.int64"),
        ({"src_to_dst": pairs((0, 3))}, "3"),  # free in the host's pool
        ({"non_blocking": False}, "pools, on_done and by_layer need non_blocking=True"),
        ({"non_blocking": False, "pools": (None, None), "by_layer": True}, "need non_blocking=True"),
        ({"non_blocking": False, "pools": (None, None), "on_done": print}, "need non_blocking=True"),
        ({"pools": (gpu, cpu, cpu)}, "pools must be a pair"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            made.swap_out(**({"src_to_dst": pairs((0, 0)), "non_blocking": True, "pools": (gpu, cpu)} | changes))
    with pytest.raises(TypeError, match="must be a torch.Tensor"):
        made.swap_in([[0, 1]], non_blocking=True)
    assert not stream.line and made.poll() == 0
    after = bits(made.gpu_cache), bits(made.cpu_cache), counts(gpu), counts(cpu)
    assert same(before[0], after[0]) and same(before[1], after[1]) and before[2:] == after[2:]


def test_pins_go_back_even_if_one_side_cannot(stream):
    made, (gpu, cpu) = engine(stream), pools()
    transfer = made.swap_out(pairs((6, 0)), non_blocking=True, pools=(gpu, cpu))
    cpu.release([0, 0])  # somebody's bug: one reference too many
    with pytest.raises(ValueError, match="0"):
        transfer.wait()
    assert counts(gpu) == [1] * 7


class Failing(FlashBackend):
    """An out-of-tree backend whose swap fails in the layers of its choice."""

    fail_at: set = set()
    calls = 0

    @staticmethod
    def swap_blocks(src, dst, block_mapping):
        Failing.calls += 1
        if Failing.calls - 1 in Failing.fail_at:
            raise KeyError(f"call {Failing.calls - 1}")


@pytest.fixture
def failing(stream):
    Failing.calls, Failing.fail_at = 0, {1}
    name = f"test-{uuid.uuid4()}"
    register_backend(name, Failing)
    return engine(stream, backend=name)


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_error_reaches_the_transfer_and_the_pins_go_back(stream, failing, by_layer):
    (gpu, cpu), done = pools(), []
    transfer = failing.swap_out(
        pairs((6, 0)), non_blocking=True, pools=(gpu, cpu), on_done=done.append, by_layer=by_layer
    )
    later = failing.swap_in(pairs((0, 1)), non_blocking=True)
    stream.run()
    assert Failing.calls == 2 + 3  # after the failure the rest of that transfer is left out
    assert transfer.is_done() and done == [transfer] and counts(gpu) == [1] * 7
    for _ in range(2):
        with pytest.raises(KeyError, match="call 1"):
            transfer.wait()
    with pytest.raises(KeyError, match="call 1"):
        transfer.wait_stream()
    if by_layer:
        with pytest.raises(KeyError, match="call 1"):
            transfer.layer_ready(0)
        with pytest.raises(KeyError, match="call 1"):
            transfer.wait_layer(2)
    assert transfer.seconds is None and transfer.gigabytes_per_second is None
    later.wait()
    assert failing.poll() == 0
    failing.copy(pairs((0, 1)))  # the engine lives on


def test_an_error_that_nobody_asks_for_is_a_warning(stream, failing):
    failing.swap_out(pairs((6, 0)), non_blocking=True)
    stream.run()
    with pytest.warns(RuntimeWarning, match=r"failed, and no call has raised its error: KeyError\('call 1'\)"):
        failing.poll()
        gc.collect()


@pytest.mark.parametrize("refuse_at", [0, 1, 2])
def test_a_stream_that_refuses(stream, refuse_at):
    """The call raises, the pins are back at once, and what was submitted before does nothing when its time comes."""
    made, (gpu, cpu) = engine(stream), pools()
    stream.refuse_at = refuse_at
    before = bits(made.cpu_cache)
    with pytest.raises(RuntimeError, match="no more"):
        made.swap_out(pairs((6, 0)), non_blocking=True, pools=(gpu, cpu), by_layer=True)
    assert counts(gpu) == [1] * 7 and made.poll() == 0
    stream.run()
    assert same(bits(made.cpu_cache), before)


def test_a_device_that_fails(stream):
    made, (gpu, cpu) = engine(stream), pools()
    polled = made.swap_out(pairs((6, 0)), non_blocking=True, pools=(gpu, cpu))
    waited = made.swap_out(pairs((5, 1)), non_blocking=True, pools=(gpu, cpu))
    stream.broken = True
    assert polled.is_done()
    for transfer in (polled, waited):
        with pytest.raises(RuntimeError, match="the device is gone"):
            transfer.wait()
    assert counts(gpu) == [1] * 7 and made.poll() == 0


def test_on_done_may_use_the_engine(stream):
    """It starts the next transfer, asks this one and polls: nothing is settled before its time, or twice."""
    made, chained = engine(stream), []

    def next_one(transfer):
        assert transfer.is_done() and transfer.seconds == 1
        chained.append(made.swap_in(pairs((0, 5)), non_blocking=True))
        assert made.poll() >= 1

    made.swap_out(pairs((6, 0)), non_blocking=True, on_done=next_one)
    stream.run()
    assert made.poll() == 1 and not chained[0].is_done()
    stream.run()
    assert made.poll() == 0 and len(chained) == 1 and chained[0].is_done()
    assert same([c[:, 5] for c in bits(made.gpu_cache)], [c[:, 6] for c in bits(made.gpu_cache)])


def test_what_on_done_raises_wait_raises(stream):
    made, (gpu, cpu) = engine(stream), pools()

    def fail(transfer):
        raise LookupError("mine")

    transfer = made.swap_out(pairs((6, 0)), non_blocking=True, pools=(gpu, cpu), on_done=fail)
    stream.run()
    assert made.poll() == 0 and counts(gpu) == [1] * 7
    with pytest.raises(LookupError, match="mine"):
        transfer.wait()


def test_threads_settle_a_transfer_once(stream):
    made, (gpu, cpu) = engine(stream), pools()
    done = []
    transfer = made.swap_out(pairs((6, 0)), non_blocking=True, pools=(gpu, cpu), on_done=done.append)
    stream.run()
    start = threading.Barrier(8)
    calls = [transfer.wait, transfer.is_done, made.poll, lambda: transfer.seconds] * 2
    threads = [threading.Thread(target=lambda call=call: (start.wait(), call())) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [transfer] and counts(gpu) == [1] * 7


def test_layers_arrive_one_by_one(stream):
    made = engine(stream)
    expected = moved(made.cpu_cache, made.gpu_cache, pairs((2, 3), (0, 6)), 1)
    old = bits(made.gpu_cache)
    transfer = made.swap_in(pairs((2, 3), (0, 6)), non_blocking=True, by_layer=True)
    stream.step()
    for layer in range(3):
        assert [transfer.layer_ready(i) for i in range(3)] == [i < layer for i in range(3)]
        transfer.wait_layer(layer, None)
        assert stream.log[-1] == ("wait_stream", 2 + layer, None)
        assert same(bits(made.gpu_cache), expected[: layer + 1] + old[layer + 1 :])
    assert transfer.is_done()
    for layer in (-1, 3):
        for call in (transfer.layer_ready, transfer.wait_layer):
            with pytest.raises(ValueError, match=rf"layer must be in \[0, 3\), got {layer}"):
                call(layer)
    whole = made.swap_in(pairs((2, 3)), non_blocking=True)
    for call in (whole.layer_ready, whole.wait_layer):
        with pytest.raises(ValueError, match="made with by_layer=True"):
            call(0)


def test_no_stream_before_the_first_transfer():
    made = CacheEngine(CacheConfig(4, 2, 2), MODEL, None, DeviceConfig("cpu"), make_stream=lambda device: 1 / 0)
    made.swap_in(pairs((0, 1)))
    made.copy(pairs((0, 1)))
    assert made.poll() == 0
    host, device = BlockPool(2), BlockPool(2)
    host.allocate(2), device.allocate(2)
    with pytest.raises(ZeroDivisionError):
        made.swap_in(pairs((0, 1)), non_blocking=True, pools=(host, device))
    assert counts(host) == counts(device) == [1, 1] and made.poll() == 0
