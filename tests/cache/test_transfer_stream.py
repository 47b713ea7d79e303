"""The streams that asynchronous swaps run on: a thread here, CUDA streams on a GPU."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from support.swap_pairs import MODEL, pairs
from support.waiting import until

from kvpage import BlockPool, CacheConfig, CacheEngine, DeviceConfig
from kvpage.cache.transfer_stream import CudaStream, HostStream


def engine(**names) -> CacheEngine:
    made = CacheEngine(CacheConfig(4, 7, 5, **names), MODEL, None, DeviceConfig("cpu"))
    for layer, cache in enumerate(made.gpu_cache):
        for block in range(7):
            cache.select(made.layout.block_dim, block).fill_(10 * layer + block + 1)
    return made


def transfer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvpage-transfer")}


class Gate:
    """Work that has begun and ends when it is told to."""

    def __init__(self):
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.open.wait(60)


def test_work_runs_beside_the_caller_and_in_order():
    stream, gate, log = HostStream(), Gate(), []
    begin = stream.record()
    stream.submit(gate)
    held = stream.record()
    stream.submit(lambda: log.append(threading.current_thread().name))
    end = stream.record()
    assert gate.begun.wait(60)
    begin.wait()
    assert begin.is_done() and not held.is_done() and not end.is_done() and log == []
    gate.open.set()
    end.wait()
    assert held.is_done() and end.is_done() and len(log) == 1 and log[0].startswith("kvpage-transfer")
    assert end.seconds_since(begin) >= end.seconds_since(held) >= 0
    end.wait_stream(None)
    stream.close(lambda: log.append("last"))
    assert log[1:] == ["last"]


def test_a_forgotten_stream_ends_its_thread():
    before = transfer_threads()
    stream = HostStream()
    stream.record().wait()
    assert len(transfer_threads() - before) == 1
    del stream
    gc.collect()
    until(lambda: not transfer_threads() - before)


def test_no_thread_before_the_first_transfer_and_none_after_the_engine():
    before = transfer_threads()
    made = engine()
    made.swap_out(pairs((0, 0)))
    made.copy(pairs((0, 1)))
    assert not transfer_threads() - before
    transfer = made.swap_out(pairs((0, 0)), non_blocking=True)
    assert len(transfer_threads() - before) == 1
    gone = weakref.ref(made)
    del made
    assert gone() is None
    until(transfer.is_done)
    until(lambda: not transfer_threads() - before)


def test_the_garbage_collector_waits_for_nothing():
    """It may run where a lock is held that the engine's end needs."""
    made, pool, lock = engine(), BlockPool(7), threading.Lock()
    pool.allocate(7)
    made.swap_out(pairs(), non_blocking=True).wait()
    made._transfers._stream.submit(lambda: lock.acquire() and lock.release())
    with lock:
        transfer = made.swap_out(pairs((6, 0)), non_blocking=True, pools=(pool, None))
        made.itself, gone = made, weakref.ref(made)
        del made
        gc.collect()
        assert gone() is None and not transfer.is_done() and pool.ref_count(6) == 2
    until(transfer.is_done)
    assert pool.ref_count(6) == 1


def test_an_engine_of_a_cycle_collected_on_its_own_thread():
    """Its last references lie in a cycle that the transfer's thread happens to collect."""
    made, pool = engine(), BlockPool(7)
    pool.allocate(7)
    made.swap_out(pairs(), non_blocking=True).wait()
    gate, stream, collected = Gate(), made._transfers._stream, threading.Event()
    stream.submit(lambda: (gate(), gc.collect()))
    transfer = made.swap_out(pairs((6, 0)), non_blocking=True, pools=(pool, None), on_done=lambda _: collected.set())
    made.itself = made
    gone = weakref.ref(made)
    gc.disable()
    try:
        assert gate.begun.wait(60)
        del made
        assert gone() is not None
        gate.open.set()
        assert collected.wait(60)
    finally:
        gc.enable()
    assert gone() is None and pool.ref_count(6) == 1 and transfer.is_done()


class PlayedCuda:
    """torch.cuda's streams and events, as far as CudaStream uses them: a log of what was called on which stream."""

    def __init__(self, monkeypatch):
        self.log, self.capturing, self.currents = [], set(), ["null"]
        played = self

        class Stream:
            device = torch.device("cuda", 0)

            def __init__(self, device=None, name="side"):
                self.name = name

            def wait_stream(self, other):
                played.log.append((self.name, "waits for the work of", other.name))

            def wait_event(self, event):
                played.log.append((self.name, "waits for", event))

            def synchronize(self):
                played.log.append((self.name, "synchronized"))

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                self.at = None

            def record(self, stream):
                self.at = len(played.log)
                played.log.append((stream.name, "records"))

            def query(self):
                assert not played.capturing
                return True

            def synchronize(self):
                assert not played.capturing

            def elapsed_time(self, later):
                return 1000.0 * (later.at - self.at)

        @contextlib.contextmanager
        def stream(chosen):
            played.currents.append(chosen.name)
            yield
            played.currents.pop()

        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": stream,
            "device": lambda device: contextlib.nullcontext(),
            "current_stream": lambda device: Stream(name=played.currents[-1]),
            "is_current_stream_capturing": lambda: played.currents[-1] in played.capturing,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_what_a_cuda_stream_calls(monkeypatch):
    cuda = PlayedCuda(monkeypatch)
    stream = CudaStream(torch.device("cuda", 0))
    stream.wait_current()
    begin = stream.record()
    stream.submit(lambda: cuda.log.append(("work on", cuda.currents[-1])))
    end = stream.record()
    end.wait_stream(None)
    end.wait_stream(torch.cuda.Stream(name="other"))
    stream.close(lambda: cuda.log.append("last"))
    assert cuda.log == [
        ("side", "waits for the work of", "null"),
        ("side", "records"),
        ("work on", "side"),
        ("side", "records"),
        ("null", "waits for", end._event),
        ("other", "waits for", end._event),
        ("side", "synchronized"),
        "last",
    ]
    assert begin.is_done() and end.seconds_since(begin) == 2
    end.wait()


def test_a_cuda_stream_touches_no_capture(monkeypatch):
    """Not by a query either, which would end the capture with an error; only what waits on another stream goes on."""
    cuda = PlayedCuda(monkeypatch)
    stream = CudaStream(torch.device("cuda", 0))
    event = stream.record()
    cuda.capturing.add("null")
    num_calls = len(cuda.log)
    for call in (
        stream.wait_current,
        event.wait,
        lambda: event.wait_stream(None),
        lambda: CudaStream(torch.device("cuda")),
    ):
        with pytest.raises(ValueError, match="must not be capturing"):
            call()
    assert not event.is_done() and len(cuda.log) == num_calls
    event.wait_stream(torch.cuda.Stream(name="other"))
    assert cuda.log[num_calls:] == [("other", "waits for", event._event)]
    cuda.capturing = {"other"}
    with pytest.raises(ValueError, match="must not be capturing"):
        event.wait_stream(torch.cuda.Stream(name="other"))


USE = """
import os, threading, torch, kvpage
engine = kvpage.CacheEngine(kvpage.CacheConfig(4, 7, 5), kvpage.ModelConfig(8, 2, ("full_attention",)), None,
                            kvpage.DeviceConfig("cpu"))
pairs = torch.tensor([[6, 0]])
"""


def run(code, folder) -> str:
    done = subprocess.run([sys.executable, "-c", USE + code], text=True, capture_output=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_interpreter_ends_after_the_transfers(tmp_path):
    text = run(
        "import time\n"
        "engine.swap_out(pairs[:0], non_blocking=True)\n"
        "engine._transfers._stream.submit(lambda: time.sleep(0.3))\n"
        "engine.swap_out(pairs, non_blocking=True, on_done=lambda t: print('done', t.seconds is not None))\n",
        tmp_path,
    )
    assert text == "done True\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_starts_anew(tmp_path):
    """The parent's transfer hangs at the fork. The child swaps on a thread of its own and ends, the parent goes on."""
    text = run(
        "gate = threading.Event()\n"
        "engine.swap_out(pairs[:0], non_blocking=True).wait()\n"
        "engine._transfers._stream.submit(gate.wait)\n"
        "held = engine.swap_out(pairs, non_blocking=True)\n"
        "engine.gpu_cache[0][:, 6] = 3\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    other = engine.swap_out(torch.tensor([[6, 1]]), non_blocking=True)\n"
        "    other.wait()\n"
        "    print(engine.cpu_cache[0][:, 1].unique().tolist(), engine.poll(), flush=True)\n"
        "    raise SystemExit\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), held.is_done())\n"
        "gate.set(); held.wait()\n"
        "print(engine.cpu_cache[0][:, 0].unique().tolist(), engine.cpu_cache[0][:, 1].unique().tolist())\n",
        tmp_path,
    )
    assert text.splitlines() == ["[3.0] 0", "0 False", "[3.0] [0.0]"]
