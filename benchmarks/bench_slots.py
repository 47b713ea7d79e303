"""Measure the cost of a whole-sequence slot: to allocate it, to find it by tokens, and to fill it from another.

Bounds, in the same run: pop and append of a Python list; memcmp over the prompt's tokens, all in cache; one `copy_` of
as many bytes. Beside them a trie in plain Python with one node a token, which is how the small engines do it. Medians
with their quartiles. Targets, with the call from Python included: alloc and free 0.2 us together; insert and find of a
prompt of 8,192 tokens 30 us each, given as an array; copy_kv at half the speed of `copy_`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, seconds
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import finish, parse
from kvpage.extras.slots import PrefixCacheManager, SlotAllocator

NUM_TOKENS, NUM_SHARED, NUM_PROMPTS = 8192, 6144, 100
KINDS = {"int32": lambda a: a.astype(np.int32), "int64": lambda a: a.astype(np.int64), "list": lambda a: a.tolist()}
COLUMNS = "{what:<16} {us:>26.2f} {target_us:>10.2f} {bound_us:>26.2f} {python_us:>24.0f}"


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


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 128_000, NUM_SHARED)
    return [np.concatenate([shared, rng.integers(0, 128_000, NUM_TOKENS - NUM_SHARED)]) for _ in range(NUM_PROMPTS)]


def timed(call: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> Figure:
    """Return microseconds a call, each argument once."""
    return Figure.of((seconds(functools.partial(call, *argument)) for argument in arguments), 1e6)


def allocator_row() -> Row:
    """Return the time of a cycle, each call in a loop of its own."""
    slots, free, number = SlotAllocator(1 << 20), list(range(1 << 20)), 200_000
    assert [slots.alloc() for _ in range(5000)] == list(range(5000))

    def cycles() -> None:
        for _ in range(number):
            slots.free(slots.alloc())

    def bound() -> None:
        for _ in range(number):
            free.append(free.pop())

    times = in_turns({"us": cycles, "bound_us": bound}, 15)
    us = {name: Figure.of(spent, 1e6 / number) for name, spent in times.items()}
    return {"what": "alloc and free", "target_us": 0.2, **us}


def tree_rows(kind: str) -> Iterator[Row]:
    given = [KINDS[kind](prompt) for prompt in prompts()]
    cache, trie = PrefixCacheManager(1 << 40), PythonTrie()
    us = {"insert": timed(cache.insert, [(tokens, i, 1) for i, tokens in enumerate(given)])}
    us["find"] = timed(cache.find, [(tokens,) for tokens in given])
    assert [cache.find(tokens) for tokens in given] == [(NUM_TOKENS, i, 1) for i in range(NUM_PROMPTS)]
    cache.check()
    lists = [prompt.tolist() for prompt in prompts()[:9]]
    python = {"insert": timed(trie.insert, [(tokens, i, 1) for i, tokens in enumerate(lists)])}
    python["find"] = timed(trie.find, [(tokens,) for tokens in lists])
    a, b = (np.asarray(given[0]).tobytes() for _ in "ab")
    bound = Figure.of((seconds(lambda: a == b, 500) for _ in range(50)), 1e6)
    for name in us:
        row = {"what": f"{name}, {kind}", "us": us[name], "target_us": None if kind == "list" else 30}
        yield row | {"bound_us": bound, "python_us": python[name]}


def copy_row() -> Row:
    """2,048 tokens of 16 layers, 8 heads of 64 in 2 bytes, in a cache of 8 slots: 64 MiB a copy."""
    kv = torch.randn(16, 2, 8, 2048, 8, 64).to(torch.bfloat16)
    cache, tokens = PrefixCacheManager(1 << 40), np.arange(2048)
    cache.insert(tokens, 0, 1)
    assert cache.copy_kv(tokens, 1, kv, 16) == 2048 and torch.equal(kv[:, :, 1], kv[:, :, 0])
    flat = kv.view(-1)[: kv[:, :, 0].numel()]
    copy_kv = timed(cache.copy_kv, [(tokens, target, kv, 16) for target in (1, 2, 3) * 5])
    copy = timed(torch.zeros_like(flat).copy_, [(flat,)] * 15)
    return {"what": "copy_kv, 64 MiB", "us": copy_kv, "target_us": 2 * copy.median, "bound_us": copy}


def draw(rows: Sequence[Row], path: str) -> None:
    found = [row for row in rows if "python_us" in row]
    labels = {"one dict a token": "python_us", "PrefixCacheManager": "us", "memcmp": "bound_us"}
    series = {label: [row[key] for row in found] for label, key in labels.items()}
    grouped(path, [row["what"] for row in found], series, f"us a prompt of {NUM_TOKENS} tokens", [30], xscale="log")


def main() -> None:
    options = parse("slots", __doc__)
    rows = shown(COLUMNS, [allocator_row(), *(row for kind in KINDS for row in tree_rows(kind)), copy_row()])
    met = all(row["target_us"] is None or row["us"].median <= row["target_us"] for row in rows)
    finish(options, functools.partial(draw, rows), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
