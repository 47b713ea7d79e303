"""Ctrl-C amid the calls of a KVStore: no thread writes into the caller's tensors afterwards, no record stays pinned,
and the store works and closes.
"""

import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from support.ctrl_c import CtrlC, pythons_handler  # noqa: F401, a fixture for all that is here
from support.insides import nobody_reads, stack_of
from support.store_engines import TOKENS, C, make_engine, tokens_of

from kvpage import CacheEngine
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.disk.disk_tier import SLOT_BYTES, DiskTier
from kvpage.store.load.layer_chunks import Pin
from kvpage.store.tiers.memory_tier import MemoryTier

NUM_TRIALS = 50
TABLE, OTHER = [5, 0, 23, 7, 9, 2, 11, 3], [1, 22, 4, 17, 6, 8, 19, 10]
MEMORY_BYTES = 1 << 14  # fewer than are stored


class Subject:
    """A store of two tiers, and an engine whose K and V go there and come back."""

    def __init__(self, path: Path) -> None:
        self.source, self.target = make_engine(seed=1), make_engine(seed=2)
        disk = DiskTier([path], 64 * SLOT_BYTES, segment_bytes=32 * SLOT_BYTES)
        self.memory = MemoryTier(MEMORY_BYTES, pin_memory=False)
        config = KVStoreConfig(C, num_threads=2)
        self.store = KVStore(config, metadata_of(self.source, "m"), [self.memory, disk])

    def work(self) -> None:
        store, wanted = self.store, tokens_of(self.source, TABLE, 0, len(TOKENS))
        store.store_blocks(TOKENS, self.source, TABLE)
        store.store(TOKENS[:C], store.retrieve(TOKENS[:C], return_tuple=False)[0], skip_existing=False).result()
        store.flush()
        with store.pin(TOKENS) as pin:
            assert pin.num_tokens == store.lookup(TOKENS) == len(TOKENS)
        for load in (self.load_blocks, self.load_layers):
            load()
            assert torch.equal(tokens_of(self.target, OTHER, 0, len(TOKENS)), wanted)
            fill(self.target)
        store.remove(TOKENS)
        assert store.lookup(TOKENS) == 0

    def load_blocks(self) -> None:
        assert self.store.load_blocks(TOKENS, self.target, OTHER) == len(TOKENS)

    def load_layers(self) -> None:
        with self.store.load_layers(TOKENS, self.target, OTHER) as load:
            assert load.result() == len(TOKENS)

    def check(self, place: str) -> None:
        fill(self.target)
        before = tokens_of(self.target, OTHER, 0, len(TOKENS)).clone()
        self.memory.check()
        assert nobody_reads(self.memory), place
        assert torch.equal(tokens_of(self.target, OTHER, 0, len(TOKENS)), before), place
        self.work()
        closing = threading.Thread(target=self.store.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), place


def fill(engine: CacheEngine) -> None:
    for layer in engine.gpu_cache:
        layer.fill_(3)


def test_the_store_works_and_closes_after_ctrl_c(tmp_path: Path) -> None:
    rng, num_raised, num_lines = random.Random(0), 0, 0
    for trial in range(NUM_TRIALS + 2):  # the first runs what is run once in a process, the second is counted
        subject = Subject(tmp_path / str(trial))
        with CtrlC(rng.randint(1, num_lines) if num_lines else None) as ctrl_c:
            try:
                subject.work()
            except KeyboardInterrupt:
                num_raised += 1
        num_lines = num_lines or (ctrl_c.num_lines if trial else 0)
        subject.check(ctrl_c.place)
    assert num_raised > NUM_TRIALS / 2  # threads decide how many lines there are


def test_a_pin_is_released_though_ctrl_c_comes_before_its_release(tmp_path: Path, monkeypatch) -> None:
    subject = Subject(tmp_path / "s")
    subject.store.store_blocks(TOKENS, subject.source, TABLE)
    release, calls = Pin.release, []

    def interrupted_once(pin: Pin) -> None:
        calls.append(pin)
        if len(calls) == 1:
            raise KeyboardInterrupt
        release(pin)

    monkeypatch.setattr(Pin, "release", interrupted_once)
    with pytest.raises(KeyboardInterrupt), subject.store.pin(TOKENS):
        assert not nobody_reads(subject.memory)
    assert nobody_reads(subject.memory)
    subject.store.close()


def test_a_handler_that_closes_what_is_being_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As one of SIGTERM does."""
    subject = Subject(tmp_path / "s")
    begun, go = threading.Event(), threading.Event()
    stack_of(subject.store).threads.later(lambda: begun.set() or go.wait(60))
    begun.wait()
    handler = signal.signal(signal.SIGUSR1, lambda *call: go.set() or subject.store.close())
    timer = threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1])
    try:
        timer.start()
        subject.store.close()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert not caplog.records
