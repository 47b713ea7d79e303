"""Counters under random lives, beside what an onlooker sees: each prompt counts once, and no counter falls.

Requests come, are preempted, swapped, forked, aborted and tried again. The onlooker knows the requests, and nothing of
blocks.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from support.dict_store import DictStore
from support.engines import PATIENCE
from support.managers import manager_of_states
from support.models import make_model
from support.scheduler_steps import B

from kvpage import BlockManager, CacheConfig, Window
from kvpage.blocks.config import HostPolicy
from kvpage.checks.errors import OutOfBlocks
from kvpage.integrations.prometheus import EngineCollector
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Scheduler

STATES = {"num_host_blocks", "num_free_host_blocks", "num_cached_host_blocks", "num_pinned_blocks", "eviction"}
MANAGERS: dict[str, Callable[[int, int], BlockManager]] = {
    "device": lambda blocks, _: BlockManager(blocks, B),
    "parts": lambda blocks, _: BlockManager(blocks, B, share_parts=False),
    "host": lambda blocks, host: BlockManager(blocks, B, num_host_blocks=host),
    "copies": lambda blocks, host: BlockManager(blocks, B, num_host_blocks=host, host_policy=HostPolicy(0)),
    "hits": lambda blocks, host: BlockManager(blocks, B, num_host_blocks=host, host_policy=HostPolicy(2)),
    "states": lambda blocks, host: manager_of_states(
        blocks, B, num_slots=7, num_host_slots=4, num_checkpoints=3, num_host_blocks=host
    ),
    "windows": lambda blocks, _: BlockManager(blocks, B, groups=[Window(6, 12)]),
}


def num_common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


class Onlooker:
    """Sees which requests come and are preempted, and that a call which is refused changes nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.manager = scheduler, scheduler.manager
        self.calls: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.before: dict[str, int] = {}
        for name in ("allocate", "swap_in", "swap_out", "fork"):
            setattr(self.manager, name, self.counted(name, getattr(self.manager, name)))
        scheduler.preempt_last = self.counted("preempt_last", scheduler.preempt_last)

    def counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **named: Any) -> Any:
            before = None if name == "preempt_last" else self.manager.stats()
            try:
                result = call(*args, **named)
            except OutOfBlocks:
                assert self.manager.stats() == before, f"{name} was refused, and has changed something"
                raise
            self.calls[name] += 1
            return result

        return wrapper

    def counters(self) -> dict[str, int]:
        stats, scheduler = self.manager.stats(), self.scheduler
        counters = {name: value for name, value in asdict(stats.space).items() if name not in STATES}
        if stats.slots is not None:
            counters |= {
                name: getattr(stats.slots, name) for name in ("kept", "restored", "evicted", "demoted", "lost")
            }
        counters |= {"miss": stats.space.miss_tokens, "query": stats.query_tokens, "hit": stats.hit_tokens}
        counters |= {"preemptions": scheduler.preemptions.num, "swaps": scheduler.preemptions.num_swaps}
        counters["recomputes"] = scheduler.preemptions.num - scheduler.preemptions.num_swaps
        return counters | {"prompt": scheduler.num_prompt_tokens, "cached": scheduler.num_cached_tokens}

    def check(self) -> None:
        counters = self.counters()
        for name, count in counters.items():
            assert count >= self.before.get(name, 0) >= 0, f"{name} fell from {self.before.get(name, 0)} to {count}"
        self.before = counters
        admitted = [request for request in self.requests if request.group.num_cached_tokens is not None]
        assert counters["query"] == counters["prompt"] == sum(request.num_prompt_tokens for request in admitted)
        assert counters["hit"] == counters["cached"] == sum(one.group.num_cached_tokens or 0 for one in admitted)
        assert (counters["preemptions"], counters["swaps"]) == (self.calls["preempt_last"], self.calls["swap_out"])
        assert self.calls["swap_in"] <= self.calls["swap_out"]

    def check_hits(self) -> None:
        """No prompt has found more than it shares with another one, nor more than is there without its last token."""
        for request in self.requests:
            others = [one.tokens[: one.num_tokens] for one in self.requests if one.group is not request.group]
            most = max((num_common(request.prompt, other) for other in others), default=0)
            assert (request.group.num_cached_tokens or 0) <= min(most, request.num_prompt_tokens - 1)


class Life(Onlooker):
    """A scheduler whose tokens count as computed. Half of the prompts share nothing, the others begin alike."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = random.Random(seed)
        num_blocks = self.rng.randrange(8, 20)
        manager = MANAGERS[kind](num_blocks, self.rng.choice([2, 8, 40]))
        super().__init__(Scheduler(manager, self.rng.randrange(2, 8), self.rng.choice([3, 7, 64])))
        self.most, self.unfinished = num_blocks * B, dict[Any, Request]()

    def arrive(self) -> None:
        rng, number = self.rng, len(self.requests)
        length = rng.randrange(1, self.most // 3)
        prompt = np.array(
            [rng.choice([5, 1000 + number]), *(int(rng.random() < 0.04) for _ in range(length))], np.int32
        )
        max_tokens = rng.randrange(1, self.most - len(prompt) + 2)
        n = rng.choice([1, 1, 1, rng.randint(1, self.scheduler.max_num_seqs)])
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, n=n)
        request = Request(f"r{number}", prompt, params, number, priority=rng.choice([0, 0, 0, -1, 1]))
        self.requests.append(request)
        self.scheduler.add(request)
        self.unfinished[request.seq_id] = request

    def end(self, request: Request) -> None:
        self.scheduler.finish(self.unfinished.pop(request.seq_id))

    def step(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        batch = scheduler.schedule()
        self.manager.take_moves()
        self.take_other_moves()
        if rng.random() < 0.05:
            scheduler.requeue(batch.requests)
        else:
            due = [portion.request for portion in batch.portions if portion.is_last]
            forks = {request: request.forks() for request in due}
            scheduler.complete(batch)
            for request, each in forks.items():
                scheduler.fork(request, each)
                self.unfinished |= {fork.seq_id: fork for fork in each}
                due += each
            for request in due:
                if request.append(int(rng.random() < 0.04), now=0.0):
                    self.end(request)
        if self.unfinished and rng.random() < 0.05:
            self.end(rng.choice(list(self.unfinished.values())))
        self.check()

    def take_other_moves(self) -> None:
        if self.manager.states is not None:
            self.manager.states.do_moves(lambda move: None)
        for window in self.manager.windows:
            window.blocks.do_moves(lambda move: None)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.rng.random() < 0.5 and len(self.unfinished) < 12:
                self.arrive()
            self.step()
        self.manager.check()
        self.check_hits()


@pytest.mark.parametrize("kind", MANAGERS)
def test_each_prompt_counts_once_and_no_counter_falls(kind: str) -> None:
    calls: Counter[str] = Counter()
    for seed in range(4):
        life = Life(kind, seed)
        life.run(150)
        calls += life.calls
    assert calls["preempt_last"] > 9
    assert (calls["swap_out"] > 9) == (kind not in ("device", "parts", "windows"))
    assert (calls["fork"] > 2) == (kind != "states")  # without a slot, a fork begins again


# --- an engine with a store ------------------------------------------------------------------------------------------


def numbers_of(registry: CollectorRegistry) -> dict[Any, float]:
    """All counters, also those of histograms, by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if family.type == "counter" or (family.type == "histogram" and not sample.name.endswith("_sum"))
    }


def engine_of(store: DictStore, num_blocks: int, num_host_blocks: int = 0) -> Engine:
    cache = CacheConfig(block_size=B, num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks)
    options = {"load_or_compute": False, "max_num_seqs": 4, "save_generated": True, "residency_sample_rate": 1.0}
    return Engine.from_model(make_model("llama"), EngineConfig(cache, **{**PATIENCE, **options}), store=store)


@pytest.mark.parametrize("num_host_blocks", [0, 30])
def test_metrics_of_an_engine_with_a_store(num_host_blocks: int) -> None:
    rng, store = random.Random(num_host_blocks), DictStore()
    stems = [[number + 5, *(rng.randrange(5, 190) for _ in range(23))] for number in range(6)]
    engine = engine_of(store, 64)
    engine.generate(stems, SamplingParams(max_tokens=1))
    engine.close()
    engine = engine_of(store, 26, num_host_blocks)
    registry, before = CollectorRegistry(), dict[Any, float]()
    registry.register(EngineCollector(engine))
    prompts, num_added = dict[str, list[int]](), 0
    found: dict[str, int] = {}
    for step in range(150):
        if rng.random() < 0.4 and step < 110:
            own = [rng.randrange(5, 190) for _ in range(rng.randrange(1, 20))]
            prompt = [*rng.choice(stems)[: rng.choice([0, 8, 24])], *own]
            params = SamplingParams(max_tokens=rng.randrange(1, 20), n=rng.choice([1, 1, 2]), temperature=1.0, seed=1)
            num_added += 1
            prompts[engine.add_request(prompt, params, priority=rng.choice([0, 0, -1]))] = prompt
        for output in engine.step():
            if output.output is not None:
                found[output.request_id] = output.output.num_cached_tokens
        waiting = [state.request_id for state in engine.request_states(100) if state.request_id not in found]
        if waiting and rng.random() < 0.05:
            aborted = engine.abort(rng.choice(waiting))
            found[aborted.request_id] = aborted.num_cached_tokens
        numbers = numbers_of(registry)
        assert all(value >= before.get(name, 0) >= 0 for name, value in numbers.items()), (before, numbers)
        before = numbers
    while engine.has_unfinished:
        found |= {one.request_id: one.output.num_cached_tokens for one in engine.step() if one.output is not None}
    stats = engine.stats()
    assert stats.store is not None and stats.num_preemptions > 3 and stats.store.num_loads > 2
    assert stats.num_finished == len(found) == len(prompts) == num_added
    assert stats.blocks.query_tokens == stats.num_prompt_tokens <= sum(map(len, prompts.values()))
    assert stats.blocks.hit_tokens == stats.num_cached_tokens == sum(found.values())
    assert stats.store.num_lookups <= num_added
    assert stats.store.num_found_tokens <= stats.store.num_lookup_tokens <= sum(map(len, prompts.values()))
    engine.close()
    engine.manager.check()
