"""Measure the cost of a whole-sequence slot: to allocate it, to find it by tokens, and to fill it from another.

Bounds, in the same run: pop and append of a Python list; memcmp over the prompt's tokens, all in cache; one `copy_` of
as many bytes. Beside them a trie in plain Python with one node a token, which is how the small engines do it. Medians
with their quartiles. Targets, with the call from Python included: alloc and free 0.2 us together; insert and find of a
prompt of 8,192 tokens 30 us each, given as an array; copy_kv at half the speed of `copy_`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpage.benchmarks.cells import show_all
from kvpage.benchmarks.figure import Figure, in_turns, seconds
from kvpage.benchmarks.pictures import curve, drawn
from kvpage.benchmarks.script import Options, finish
from kvpage.extras.slots import PrefixCacheManager, SlotAllocator

NUM_TOKENS, NUM_SHARED, NUM_PROMPTS = 8192, 6144, 100
KINDS = {"int32": lambda a: a.astype(np.int32), "int64": lambda a: a.astype(np.int64), "list": lambda a: a.tolist()}


class PythonTrie:
    """One dict a token; each node knows the last slot that came by."""

    def __init__(self) -> None:
        self.root: dict[int | str, Any] = {}

    def insert(self, tokens: Iterable[int], slot: int, version: int) -> None:
        node = self.root
        for token in tokens:
            node = node.setdefault(token, {})
            node["slot"] = (slot, version)

    def find(self, tokens: Iterable[int]) -> tuple[Any, ...]:
        node, n = self.root, 0
        for token in tokens:
            if token not in node:
                break
            node, n = node[token], n + 1
        return n, *node["slot"]


def loops(calls: dict[str, Callable[[int], object]], number: int, rounds: int = 15) -> dict[str, Figure]:
    """Microseconds: each call runs its own loop of `number` cycles."""
    runs = {name: (lambda call=call: call(number)) for name, call in calls.items()}
    return {name: Figure.of(taken, 1e6 / number) for name, taken in in_turns(runs, rounds).items()}


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 128_000, NUM_SHARED)
    return [np.concatenate([shared, rng.integers(0, 128_000, NUM_TOKENS - NUM_SHARED)]) for _ in range(NUM_PROMPTS)]


def timed(call: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> Figure:
    """Microseconds a call, each argument once."""
    return Figure.of((seconds(functools.partial(call, *argument)) for argument in arguments), 1e6)


def allocator_row() -> dict[str, Any]:
    slots = SlotAllocator(1 << 20)
    assert [slots.alloc() for _ in range(5000)] == list(range(5000))
    free = list(range(1 << 20))

    def ours(number: int) -> None:
        for _ in range(number):
            slots.free(slots.alloc())

    def bound(number: int) -> None:
        for _ in range(number):
            free.append(free.pop())

    found = loops({"ours": ours, "bound": bound}, 200_000)
    return {"what": "alloc and free", "us": found["ours"], "target_us": 0.2, "bound_us": found["bound"]}


def tree_rows(kind: str) -> list[dict[str, Any]]:
    given = [KINDS[kind](prompt) for prompt in prompts()]
    cache, trie = PrefixCacheManager(1 << 40), PythonTrie()
    numbered = [(tokens, i, 1) for i, tokens in enumerate(given)]
    insert = timed(cache.insert, numbered)
    find = timed(cache.find, [(tokens,) for tokens in given])
    assert [cache.find(tokens) for tokens in given] == [(NUM_TOKENS, i, 1) for i in range(NUM_PROMPTS)]
    cache.check()
    lists = [(prompt.tolist(), i, 1) for i, prompt in enumerate(prompts()[:9])]
    python = {"insert": timed(trie.insert, lists), "find": timed(trie.find, [(tokens,) for tokens, *_ in lists])}
    a, b = (np.asarray(given[0]).tobytes() for _ in "ab")
    bound = Figure.of((seconds(lambda: a == b, 500) for _ in range(50)), 1e6)
    target = None if kind == "list" else 30
    return [
        {"what": f"{name}, {kind}", "us": us, "target_us": target, "bound_us": bound, "python_us": python[name]}
        for name, us in (("insert", insert), ("find", find))
    ]


def copy_row() -> dict[str, Any]:
    """2,048 tokens of 16 layers, 8 heads of 64 in 2 bytes, in a cache of 8 slots: 64 MiB a copy."""
    kv = torch.randn(16, 2, 8, 2048, 8, 64).to(torch.bfloat16)
    cache, tokens = PrefixCacheManager(1 << 40), np.arange(2048)
    cache.insert(tokens, 0, 1)
    assert cache.copy_kv(tokens, 1, kv, 16) == 2048 and torch.equal(kv[:, :, 1], kv[:, :, 0])
    flat = kv.view(-1)[: kv[:, :, 0].numel()]
    copy_kv = timed(cache.copy_kv, [(tokens, target, kv, 16) for target in (1, 2, 3) * 5])
    other = torch.zeros_like(flat)
    copy = timed(other.copy_, [(flat,)] * 15)
    return {"what": "copy_kv, 64 MiB", "us": copy_kv, "target_us": 2 * copy.median, "bound_us": copy}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    shown = [row for row in rows if "python_us" in row]
    with drawn(path, size=(6.4, 4.8)) as axes:
        for key, label in (("python_us", "one dict a token"), ("us", "PrefixCacheManager"), ("bound_us", "memcmp")):
            curve(axes, shown, "what", key, "o", label=label)
        axes.axhline(30, color="gray", linestyle=":", label="target")
        axes.set(yscale="log", ylabel=f"us a prompt of {NUM_TOKENS} tokens")
        axes.tick_params(axis="x", rotation=20)
        axes.legend()


def main() -> None:
    options = Options("slots", __doc__).parse()
    rows = [allocator_row(), *(row for kind in KINDS for row in tree_rows(kind)), copy_row()]
    show_all("{what:<16} {us:>26.2f} {target_us:>10.2f} {bound_us:>26.2f} {python_us:>24.0f}", rows)
    met = all(row["target_us"] is None or row["us"].median <= row["target_us"] for row in rows)
    finish(options, functools.partial(plot, rows), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
