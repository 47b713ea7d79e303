"""Asynchronous swaps on a device that delays and reorders whatever it may: each block holds what was written for it."""

import contextlib
import gc
import random
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from battery import Advance, Battery, Figures
from fake_device import POISON, FakeDevice, FakeStream, OpaqueBackend

from kvpage import BlockPool, CacheConfig, CacheEngine, DeviceConfig, ModelConfig
from kvpage.cache.transfer import Transfer

NUM_LAYERS, NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_STEPS = 2, 6, 7, 25
MODEL = ModelConfig(2, 1, ("full_attention",) * NUM_LAYERS)


@dataclass(eq=False)
class Held:
    """What a key has: blocks in one tier, and the transfer that brings its content there."""

    key: int
    is_on_device: bool
    ids: list[int]
    generation: int = 0
    transfer: Transfer | None = None
    fails: bool = False  # the transfer does
    is_lost: bool = False  # or one before it has: nobody knows what is in the blocks
    leaving: list[Transfer] = field(default_factory=list)  # that read these blocks


class Schedule:
    """A server of a few keys over both tiers, which gives blocks back as soon as it may: while they are in flight."""

    def __init__(self, seed: int, make_stream: type[FakeStream] = FakeStream, with_pins: bool = True) -> None:
        self.rng = random.Random(seed)
        device = self.device = FakeDevice(seed, self.rng.random() < 0.3)
        self.engine = CacheEngine(
            CacheConfig(2, NUM_BLOCKS, NUM_HOST_BLOCKS, backend="opaque handles"),
            MODEL,
            None,
            DeviceConfig("cpu"),
            make_stream=lambda _: make_stream(device),  # the engine keeps it until it goes: it must not keep the engine
        )
        self.memory = {
            True: OpaqueBackend.adopt(self.device, True, self.engine.gpu_cache),
            False: OpaqueBackend.adopt(self.device, False, self.engine.cpu_cache),
        }
        self.pools = {True: BlockPool(NUM_BLOCKS), False: BlockPool(NUM_HOST_BLOCKS)}
        self.with_pins = with_pins
        self.held: list[Held] = []
        self.num_keys = self.num_transfers = self.num_done = self.num_failed = 0

    def run(self) -> None:
        operations = [self.compute, self.compute, self.move, self.move, self.move, self.read, self.read, self.rewrite]
        operations += [self.move_blocking, self.forget, self.ask, self.copy_within]
        for _ in range(NUM_STEPS):
            self.rng.choice(operations)()
            self.device.idle(self.rng.randrange(4))
        self.end()

    # --- content ---

    def content(self, held: Held, layer: int, place: int) -> np.ndarray:
        size = self.memory[True][layer].shape[1]
        first = (((held.key * 16 + held.generation) * NUM_LAYERS + layer) * 4 + place) * size
        return np.arange(first, first + size, dtype=np.float32)

    def write(self, held: Held) -> None:
        """By the computation."""
        for layer, memory in enumerate(self.memory[True]):
            values = [self.content(held, layer, place) for place in range(len(held.ids))]
            self.device.do(
                [lambda m=memory, i=i, v=v: np.copyto(m[i], v) for i, v in zip(held.ids, values, strict=True)]
            )

    def verify(self, held: Held, layer: int) -> None:
        for place, i in enumerate(held.ids):
            found, expected = self.memory[held.is_on_device][layer][i], self.content(held, layer, place)
            assert np.array_equal(found, expected), f"key {held.key}, layer {layer}, block {i}: {found} for {expected}"

    def verify_in_order(self, held: Held, layer: int) -> None:
        """By the computation, when its turn comes, as the key is now."""
        now = Held(held.key, True, list(held.ids), held.generation)
        self.device.do([lambda: self.verify(now, layer)])

    # --- blocks ---

    def allocate(self, on_device: bool, count: int) -> list[int] | None:
        """Poisoned ones; by the computation, or on the host at once: nothing may need them any more."""
        if self.pools[on_device].num_free < count:
            return None
        ids = self.pools[on_device].allocate(count).tolist()
        scrub = [lambda m=m, i=i: m[i].fill(POISON) for m in self.memory[on_device] for i in ids]
        if on_device:
            self.device.do(scrub)
        else:
            for step in scrub:
                step()
        return ids

    def release(self, held: Held) -> None:
        self.pools[held.is_on_device].release(held.ids)
        self.held.remove(held)

    def some(self, on_device: bool | None = None) -> Held | None:
        able = [held for held in self.held if on_device in (None, held.is_on_device)]
        return self.rng.choice(able) if able else None

    def has_failed(self, held: Held) -> bool:
        """Whether its content never came; then it is given up."""
        if held.fails and held.transfer:
            self.num_failed += 1
            with pytest.raises(RuntimeError, match="a copy has failed"):
                held.transfer.wait()
        if held.is_lost:
            self.release(held)
        return held.is_lost

    # --- operations ---

    def compute(self) -> None:
        ids = self.allocate(True, self.rng.randrange(1, 4))
        if ids:
            self.num_keys += 1
            self.held.append(Held(self.num_keys, True, ids))
            self.write(self.held[-1])

    def move(self) -> None:
        """To the other tier; the blocks here are given back at once, or kept."""
        held = self.some()
        ids = held and self.allocate(not held.is_on_device, len(held.ids))
        if not held or not ids:
            return
        pairs = torch.tensor(list(zip(held.ids, ids, strict=True)), dtype=torch.int64)
        fails = self.rng.random() < 0.03
        if fails:
            self.device.failing[held.is_on_device, tuple(zip(held.ids, ids, strict=True))] = self.rng.randrange(
                NUM_LAYERS
            )
        swap = self.engine.swap_out if held.is_on_device else self.engine.swap_in
        pools = (self.pools[held.is_on_device], self.pools[not held.is_on_device]) if self.with_pins else (None, None)
        by_layer = self.rng.random() < 0.4
        transfer = swap(pairs, non_blocking=True, pools=pools, on_done=self.count_done, by_layer=by_layer)
        moved = Held(held.key, not held.is_on_device, ids, held.generation, transfer, fails, fails or held.is_lost)
        pairs.fill_(-1)  # the caller's own again
        self.num_transfers += 1
        self.held.append(moved)
        if self.rng.random() < 0.7:
            self.release(held)
        else:
            held.leaving.append(transfer)

    def count_done(self, transfer: Transfer) -> None:
        assert transfer.is_done()
        self.num_done += 1

    def read(self) -> None:
        held = self.some()
        if not held or self.has_failed(held):
            return
        if not held.is_on_device:
            self.read_on_host(held)
            return
        by_layer = held.transfer is not None and held.transfer._layers is not None and self.rng.random() < 0.7
        if held.transfer and not by_layer:
            self.rng.choice([held.transfer.wait, held.transfer.wait_stream])()
        for layer in range(NUM_LAYERS):
            if by_layer:
                assert held.transfer
                held.transfer.wait_layer(layer)
            self.verify_in_order(held, layer)

    def read_on_host(self, held: Held) -> None:
        if held.transfer:
            held.transfer.wait()
        for layer in range(NUM_LAYERS):
            self.verify(held, layer)

    def rewrite(self) -> None:
        """What comes in and what goes out has to be waited for."""
        held = self.some(True)
        if not held or self.has_failed(held):
            return
        if held.transfer:
            self.rng.choice([held.transfer.wait, held.transfer.wait_stream])()
        for transfer in held.leaving:
            with contextlib.suppress(RuntimeError):  # its own concern
                self.rng.choice([transfer.wait, transfer.wait_stream])()
        held.leaving.clear()
        held.generation += 1
        self.write(held)

    def move_blocking(self) -> None:
        held = self.some()
        if not held or self.has_failed(held):
            return
        ids = self.allocate(not held.is_on_device, len(held.ids))
        if not ids:
            return
        pairs = torch.tensor(list(zip(held.ids, ids, strict=True)), dtype=torch.int64)
        (self.engine.swap_out if held.is_on_device else self.engine.swap_in)(pairs)
        self.device.run_until(self.device.computation.point())  # host memory may be read, and given back
        self.held.append(Held(held.key, not held.is_on_device, ids, held.generation))
        self.release(held)

    def copy_within(self) -> None:
        held = self.some(True)
        if not held or self.has_failed(held):
            return
        ids = self.allocate(True, len(held.ids))
        if not ids:
            return
        self.engine.copy(torch.tensor(list(zip(held.ids, ids, strict=True)), dtype=torch.int64))
        self.held.append(Held(held.key, True, ids, held.generation))
        self.release(held)

    def forget(self) -> None:
        if held := self.some():
            self.release(held)

    def ask(self) -> None:
        held = self.some()
        if self.rng.random() < 0.3 or not held or not held.transfer:
            assert self.engine.poll() >= 0
            return
        if held.transfer.is_done():
            assert held.transfer.seconds == (None if held.fails else 1)
        elif held.transfer._layers is not None and not held.fails:
            held.transfer.layer_ready(self.rng.randrange(NUM_LAYERS))

    def end(self) -> None:
        for held in list(self.held):
            if not self.has_failed(held) and held.transfer:
                held.transfer.wait()
        self.device.run()
        assert self.engine.poll() == 0
        assert self.num_done == self.num_transfers, f"{self.num_done} of {self.num_transfers} transfers are settled"
        for held in self.held:
            for layer in range(NUM_LAYERS):
                self.verify(held, layer)
        for on_device, pool in self.pools.items():
            owned = sorted(i for held in self.held if held.is_on_device == on_device for i in held.ids)
            counts = [pool.ref_count(i) for i in range(pool.num_blocks)]
            assert [i for i, count in enumerate(counts) if count] == owned, "a pin was lost or kept"
            assert max(counts) <= 1, "a pin was kept"

    def close(self) -> None:
        """Also after it went wrong."""
        self.device.computation.stop()
        self.device.transfers.stop()
        self.engine.poll()
        OpaqueBackend.forget([*self.engine.gpu_cache, *self.engine.cpu_cache])


def run(seed: int, count: int, advance: Advance) -> Figures:
    figures: Figures = {"transfers": 0, "failed": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of failures that nobody asked for
        for i in range(count):
            num_transfers, num_failed = run_schedule((seed << 32) + i)
            figures["transfers"] += num_transfers
            figures["failed"] += num_failed
            if i % 100 == 99 or i == count - 1:
                advance(i % 100 + 1)
        gc.collect()
    return figures


def run_schedule(seed: int) -> tuple[int, int]:
    """The numbers of its transfers, and of those that failed."""
    schedule = Schedule(seed)
    try:
        schedule.run()
    except Exception as error:
        raise AssertionError(f"the schedule of seed {seed} went wrong") from error
    finally:
        schedule.close()
    return schedule.num_transfers, schedule.num_failed


BATTERIES = [Battery("transfers", "schedules", 5_000, 1_000_000, run)]
