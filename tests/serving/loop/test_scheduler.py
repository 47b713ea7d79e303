"""The scheduler against slots that remember which prefix was written into them; no model, no tensors."""

import random
from collections.abc import Hashable

import numpy as np
import pytest
from support.scheduler_steps import plan
from support.slot_memory import SlotMemory

from kvpage.blocks.manager import BlockManager
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Batch, Scheduler
from kvpage.serving.params.sampling import SamplingParams

B = 4


def make_request(number: int, prompt: list[int], max_tokens: int = 1, namespace: bytes = b"", n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, n=n)
    return Request(f"r{number}", np.array(prompt, np.int32), params, number, namespace=namespace)


def make_scheduler(
    num_blocks: int, max_num_seqs: int = 8, budget: int = 64, window: int | None = None, **options: object
) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, B, **options), max_num_seqs, budget, window)


def run_step(scheduler: Scheduler, new_token: int = 1) -> Batch:
    """Computes the next batch; whoever is due gets `new_token`, and leaves with its last one."""
    batch = scheduler.schedule()
    due = [portion.request for portion in batch.portions if portion.is_last]
    scheduler.complete(batch)
    for request in due:
        if request.append(new_token, now=0.0):
            scheduler.finish(request)
    return batch


class Simulation:
    """Random arrivals, forks, aborts and failed steps; each portion must find its prefix, or window, in its slots."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_blocks = self.rng.randrange(4, 24)
        self.budget = self.rng.choice([1, 3, 7, 64])
        self.window = self.rng.choice([None, None, 1, B, 2 * B + 1])
        options = {
            "num_host_blocks": self.rng.choice([0, 3, 40]),
            "enable_prefix_caching": self.rng.random() < (0.8 if self.window is None else 0.3),
        }
        self.scheduler = make_scheduler(self.num_blocks, self.rng.randrange(1, 6), self.budget, self.window, **options)
        self.memory = SlotMemory(B)
        self.num_swapped = self.num_forks = self.num_left = 0
        self.unfinished: dict[Hashable, Request] = {}
        self.num_arrivals = self.num_failures = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.rng.random() < 0.4:
                self.arrive()
            if self.unfinished and self.rng.random() < 0.03:
                self.scheduler.finish(self.unfinished.pop(self.rng.choice(list(self.unfinished))))
            self.step(self.rng.random() < 0.05)
        for _ in range(20_000):
            if not self.unfinished:
                break
            self.step(fails=False)
        assert not self.unfinished
        assert self.scheduler.manager.num_free_blocks == self.num_blocks

    def arrive(self) -> None:
        rng, most = self.rng, self.num_blocks * B
        length = rng.randrange(1, most + 1)
        prompt = [int(rng.random() < 0.05) for _ in range(length)]
        max_tokens = rng.randrange(1, most - length + 2)
        self.num_arrivals += 1
        n = rng.choice([1, 1, rng.randint(1, self.scheduler.max_num_seqs)])
        request = make_request(self.num_arrivals, prompt, max_tokens, rng.choice([b"", b"other"]), n)
        self.scheduler.add(request)
        self.unfinished[request.seq_id] = request

    def step(self, fails: bool) -> None:
        batch = self.scheduler.schedule()
        self.num_swapped += self.memory.do(self.scheduler.manager.take_moves())
        assert batch.num_tokens <= self.budget
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        assert bool(batch.portions) == bool(self.unfinished)
        assert len({portion.request.seq_id for portion in batch.portions}) == len(batch.portions)
        for portion in batch.portions:
            self.write(portion.request, portion.start, portion.end)
        for portion in batch.portions:
            self.read(portion.request, portion.end)
        if fails:
            self.scheduler.requeue(portion.request for portion in batch.portions)
            self.num_failures += 1
        else:
            self.complete(batch)
        self.scheduler.manager.check()
        arrivals = [(request.group.arrival, request.sample_index) for request in self.scheduler.waiting]
        assert arrivals == sorted(arrivals)

    def complete(self, batch: Batch) -> None:
        due = [portion.request for portion in batch.portions if portion.is_last]
        forks = {request: request.forks() for request in due}
        num_free = self.scheduler.manager.num_free_blocks
        self.scheduler.complete(batch)
        self.num_left += self.scheduler.manager.num_free_blocks > num_free
        for request, each in forks.items():
            self.scheduler.fork(request, each)
            assert request.num_forks_due == 0 and len(request.group.samples) in (1, request.params.n)
            self.unfinished |= {fork.seq_id: fork for fork in each}
            self.num_forks += len(each)
            due += each
        for request in due:
            if request.append(int(self.rng.random() < 0.05), now=0.0):
                self.scheduler.finish(request)
                del self.unfinished[request.seq_id]

    def write(self, request: Request, start: int, end: int) -> None:
        for position, slot in zip(range(start, end), self.slot_ids(request, start, end), strict=True):
            self.memory.device[slot] = self.prefix(request, position)

    def read(self, request: Request, end: int) -> None:
        start = 0 if self.window is None else max(end - self.window, 0)
        for position, slot in enumerate(self.slot_ids(request, start, end), start):
            assert self.memory.device[slot] == self.prefix(request, position), (request.request_id, position)

    def slot_ids(self, request: Request, start: int, end: int) -> list[int]:
        return self.scheduler.manager.slot_mapping(request.seq_id, start, end).tolist()

    def prefix(self, request: Request, position: int) -> tuple:
        return request.namespace, tuple(request.tokens[: position + 1].tolist())


@pytest.mark.parametrize("seed", range(30))
def test_every_request_finishes_and_finds_its_own_prefix(seed: int) -> None:
    Simulation(seed).run(150)


def test_the_simulation_preempts_swaps_caches_and_fails() -> None:
    simulations = [Simulation(seed) for seed in range(12)]
    for simulation in simulations:
        simulation.run(150)
    schedulers = [simulation.scheduler for simulation in simulations]
    assert (
        sum(scheduler.preemptions.num for scheduler in schedulers)
        > sum(s.preemptions.num_swaps for s in schedulers)
        > 10
    )
    assert sum(scheduler.num_cached_tokens for scheduler in schedulers) > 100
    assert sum(simulation.num_failures for simulation in simulations) > 10
    assert sum(simulation.num_swapped for simulation in simulations) > 100
    assert sum(simulation.num_forks for simulation in simulations) > 50
    assert sum(simulation.num_left for simulation in simulations) > 20


def test_decodes_come_first_then_running_prefills_then_new_ones() -> None:
    scheduler = make_scheduler(64, budget=10)
    scheduler.add(make_request(0, [1, 2, 3], max_tokens=5))
    assert plan(run_step(scheduler)) == [("r0", 0, 3)]
    scheduler.add(make_request(1, list(range(10, 30)), max_tokens=2))
    scheduler.add(make_request(2, [50, 51], max_tokens=2))
    assert plan(run_step(scheduler)) == [("r0", 3, 4), ("r1", 0, 9)]
    assert plan(run_step(scheduler)) == [("r0", 4, 5), ("r1", 9, 18)]
    assert plan(run_step(scheduler)) == [("r0", 5, 6), ("r1", 18, 20), ("r2", 0, 2)]


def test_a_prefix_that_is_being_computed_is_computed_once() -> None:
    scheduler = make_scheduler(64, budget=6)
    prefix = list(range(100, 100 + 2 * B))
    for number in range(3):
        scheduler.add(make_request(number, [*prefix, number], max_tokens=3))
    scheduler.add(make_request(3, [7], max_tokens=1))
    assert plan(run_step(scheduler)) == [("r0", 0, 6)]
    assert plan(run_step(scheduler)) == [("r0", 6, 9), ("r3", 0, 1)]  # r1 and r2 let r3 go before them
    assert plan(run_step(scheduler)) == [("r0", 9, 10), ("r1", 8, 9), ("r2", 8, 9)]


@pytest.mark.parametrize("other", [{"namespace": b"other"}, {"prompt": [9, 9, 9, 9, 1]}])
def test_requests_that_share_nothing_do_not_wait(other: dict) -> None:
    scheduler = make_scheduler(64)
    prompt = [1, 2, 3, 4, 5]
    scheduler.add(make_request(0, prompt))
    scheduler.add(make_request(1, **{"prompt": prompt, **other}))
    assert plan(run_step(scheduler)) == [("r0", 0, 5), ("r1", 0, 5)]


@pytest.mark.parametrize("length, max_tokens, fits", [(8, 1, True), (9, 1, False), (1, 8, True), (1, 9, False)])
def test_what_can_never_fit_is_refused(length: int, max_tokens: int, fits: bool) -> None:
    scheduler = make_scheduler(num_blocks=2)
    request = make_request(0, [1] * length, max_tokens)
    if fits:
        scheduler.add(request)
        while scheduler.running or scheduler.waiting:
            run_step(scheduler)
        assert request.finish_reason == "length"
    else:
        with pytest.raises(ValueError, match="must fit into 2 blocks of 4 tokens, got"):
            scheduler.check(request)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_limits_must_be_positive(name: str, value: object) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, name: value}
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1"):
        Scheduler(BlockManager(4, B), **limits)
