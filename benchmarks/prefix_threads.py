"""Calls of several Python threads that share a tree or a pool, compared with the calls of one thread.

The rows "control" run a loop of plain Python that calls nothing of kvpage. Python lets one thread run at a time (the
GIL), and passing it on costs something. So the ratio of "control" is the bound for every call that keeps the GIL:
allocate(1) keeps it, and a long match releases it.

Each thread has prompts of its own. So what n threads do is compared with one thread that does the work of all n in
turns, and touches as much memory:

    threads    thread 0: [ work 0 | work 0 | ... ]     thread 1: [ work 1 | work 1 | ... ]
    alone      thread 0: [ work 0 | work 1 | work 0 | work 1 | ... ]
"""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpage import BlockPool, PrefixTree
from kvpage.benchmarks.cells import shown
from kvpage.benchmarks.figure import Figure

B = 16
NUM_THREADS = (1, 2, 4)
NUM_PROMPTS = 8  # each thread has its own
CONTROL = "control"
Call = Callable[[], int]
"""Repeated by a thread; returns its number of calls."""
Work = Callable[[int], Call]
"""Makes the function that a thread repeats, of the thread's number."""


def in_turns(work: Work, num_works: int) -> Work:
    """Return the work of one thread that takes turns at the work of several."""

    def all_works(_: int) -> Call:
        calls = itertools.cycle([work(thread) for thread in range(num_works)])
        return lambda: next(calls)()

    return all_works


def repeated(call: Callable[[], object], number: int = 20) -> Call:
    """Return a loop of a number of calls."""

    def loop() -> int:
        for _ in range(number):
            call()
        return number

    return loop


def rate(work: Work, num_threads: int, seconds: float) -> float:
    """Return the calls a second of all threads together: one of each thread at least."""
    counts = [0] * num_threads
    ended = threading.Event()
    barrier = threading.Barrier(num_threads + 1)

    def run(thread: int) -> None:
        call = work(thread)
        barrier.wait()
        counts[thread] = call()  # one at least, however late the thread runs
        while not ended.is_set():
            counts[thread] += call()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    time.sleep(seconds)
    ended.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def shared_tree(num_tokens: int) -> tuple[BlockPool, PrefixTree, list[np.ndarray]]:
    prompts = [np.arange(num_tokens, dtype=np.int32) for _ in range(NUM_PROMPTS)]
    for i, prompt in enumerate(prompts):
        prompt[num_tokens // 2 :] += 1_000_000 * i
    pool = BlockPool(4 * NUM_PROMPTS * num_tokens // B)
    tree = PrefixTree(pool, B)
    for prompt in prompts:
        tree.release(tree.insert(prompt, pool.allocate(num_tokens // B), priority=1))
    return pool, tree, prompts


def counting(num_steps: int) -> Work:
    """Count in plain Python, without a call of kvpage: the bound that the GIL itself sets."""

    def count() -> None:
        number = 0
        for step in range(num_steps):
            number += step

    return lambda _: repeated(count)


def matching(num_tokens: int) -> Work:
    """Match and release a cached prompt."""
    _, tree, prompts = shared_tree(num_tokens)

    return lambda thread: repeated(lambda: tree.release(tree.match(prompts[thread])))


def inserting(num_tokens: int) -> Work:
    """Match, insert 16 new blocks after the match, release, and evict the new blocks, of the lowest priority."""
    pool, tree, prompts = shared_tree(num_tokens)

    def work(thread: int) -> Call:
        prompt, rest = prompts[thread], np.full(16 * B, -1 - thread, np.int32)

        def call() -> None:
            match = tree.match(prompt, num_left_over=0)
            tree.release(tree.insert(rest, pool.allocate(16), after=match))
            tree.evict(16)

        return repeated(call, 1)

    return work


def pooling(num_blocks: int) -> Work:
    """Allocate and release."""
    pool = BlockPool(1 << 16)
    return lambda _: repeated(lambda: pool.release(pool.allocate(num_blocks)))


CASES: dict[str, Callable[[], Work]] = {
    CONTROL: lambda: counting(20),
    "match of 2,048": lambda: matching(2048),
    "match of 8,192": lambda: matching(8192),
    "match of 32,768": lambda: matching(32_768),
    "match of 131,072": lambda: matching(131_072),
    "match and insert": lambda: inserting(8192),
    "allocate(1)": lambda: pooling(1),
    "allocate(100)": lambda: pooling(100),
}


def measure_threads(rounds: int = 9, seconds: float = 0.1) -> list[dict[str, Any]]:
    """Return a row for each case and number of threads, those of the control first.

    "alone": one thread that does all the work. Ratios are taken within a round, in which all of these follow one
    another.
    """
    rows = []
    for name, make in CASES.items():
        work = make()
        rates: dict[int, list[tuple[float, float]]] = {num: [] for num in NUM_THREADS}
        for _ in range(rounds):
            for num in NUM_THREADS:
                calls_s = rate(work, num, seconds)
                rates[num].append((calls_s, calls_s if num == 1 else rate(in_turns(work, num), 1, seconds)))
        for num in NUM_THREADS:
            shared, alone = zip(*rates[num], strict=True)
            figures = {"calls_s": Figure.of(shared), "alone_calls_s": Figure.of(alone)}
            rows.append({"case": name, "threads": num, **figures, "ratio": Figure.ratio(shared, alone)})
    return rows


def show_threads(rows: list[dict[str, Any]]) -> None:
    print("sharing a tree or a pool: calls a second of all threads")
    shown("{case:<19}{threads:>8}{calls_s.median:>16,.0f}{alone_calls_s.median:>22,.0f}{ratio:>24.2f}", rows)
    print("alone: one thread that does the work of all in turns")
    print("control: plain Python without a call of kvpage; its ratio is the bound that the GIL sets")
