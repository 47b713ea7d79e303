"""Measure the cost of a path of 8,192 tokens in a token trie, to add and to evict; it must not grow with the depth.

Bounds, in the same run: making as many bare nodes, and cloning as many slices, which owning their bytes asks for.
Beside them a trie whose every new token stamps all its ancestors, and whose eviction counts the whole trie again for
each node, as written at first by those who write one. Targets: 30 ms to add 8,192 tokens, with and without K and V (two
layers of two heads of 16), log_softmax not counted; eviction of 1,000 nodes at most four times as slow in a trie 16
times as large. Medians with their quartiles.
"""

import functools
import gc
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

from kvpage.benchmarks.cells import show_all
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.script import Options, finish
from kvpage.extras.token_trie import DynamicTokenTrie, TokenTrie

NUM_TOKENS, NUM_EVICTED, VOCAB = 8192, 1000, 32
TOKENS = range(NUM_TOKENS)


T = TypeVar("T")


class Stamping:
    """The quadratic one."""

    def __init__(self, parent: "Stamping | None" = None) -> None:
        self.children: dict[int, Stamping] = {}
        self.parent, self.kv, self.last_access = parent, None, 0.0

    def extend_cache(self, token_ids: Iterable[int]) -> None:
        node = self
        for token_id in token_ids:
            child = node.children[token_id] = Stamping(node)
            now, above = time.time(), cast("Stamping | None", child)
            while above is not None:
                above.last_access, above = now, above.parent
            node = child


def times_ms(make: Callable[[], T], call: Callable[[T], object], repeat: int = 15) -> list[float]:
    """Return the milliseconds of each call, on a fresh result of `make`; the collector runs between, not within."""
    times = []
    for _ in range(repeat):
        given = make()
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        call(given)
        times.append((time.perf_counter() - start) * 1e3)
        gc.enable()
    return times


def ms(make: Callable[[], T], call: Callable[[T], object], repeat: int = 15) -> Figure:
    return Figure.of(times_ms(make, call, repeat))


def verify(kv: torch.Tensor, logits: torch.Tensor) -> None:
    root, plain = DynamicTokenTrie(), TokenTrie()
    node, end = root, root.extend_cache(0, TOKENS, None, kv)
    plain_node, plain_end = plain, plain.extend_cache(0, TOKENS, logits, 0)
    for i in TOKENS:
        node, plain_node = node.get_token(i), plain_node.get_token(i)
        assert torch.equal(node.past_key_values, kv[:, :, :, i : i + 1])
        torch.testing.assert_close(plain_node.logprobs, torch.log_softmax(logits[i], 0))
    assert node is end and plain_node is plain_end
    root.evict_lru_kv(10)
    assert [n.depth for n in root.collect_nodes_with_kv()] == list(range(1, 11))


def trie_of(num_paths: int) -> DynamicTokenTrie:
    root = DynamicTokenTrie()
    for path in range(num_paths):
        node = root
        for i in range(NUM_EVICTED):
            node = node.add_token(path * NUM_EVICTED + i, None, "kv")
    return root


def token_by_token() -> None:
    node = DynamicTokenTrie()
    for token_id in TOKENS:
        node = node.add_token(token_id)


def measure() -> list[dict[str, Any]]:
    kv, logits = torch.randn(2, 2, 2, NUM_TOKENS, 16), torch.randn(NUM_TOKENS, VOCAB)
    verify(kv, logits)
    softmax = ms(lambda: None, lambda _: torch.log_softmax(logits, 1))
    pieces = [torch.empty(2, 2, 2, 1, 16) for _ in range(64)]
    rows = [logits[i].clone() for i in range(64)]
    copies = NUM_TOKENS // 64

    def clone(kept: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
        for _ in range(copies):
            kept.extend(map(torch.clone, parts))

    nodes = times_ms(lambda: None, lambda _: [DynamicTokenTrie() for _ in TOKENS])
    clones = times_ms(list, lambda kept: clone(kept, pieces))
    row_clones = ms(list, lambda kept: clone(kept, rows))
    extend = times_ms(TokenTrie, lambda trie: trie.extend_cache(0, TOKENS, logits, 0))
    return [
        {
            "what": "TokenTrie, without log_softmax",
            "ms": Figure.of(each - softmax.median for each in extend),
            "bound_ms": row_clones,
        },
        {
            "what": "DynamicTokenTrie, no K and V",
            "ms": ms(DynamicTokenTrie, lambda trie: trie.extend_cache(0, TOKENS)),
            "bound_ms": Figure.of(nodes),
            "quadratic_ms": ms(Stamping, lambda trie: trie.extend_cache(TOKENS), 3),
        },
        {
            "what": "DynamicTokenTrie, K and V",
            "ms": ms(DynamicTokenTrie, lambda trie: trie.extend_cache(0, TOKENS, None, kv)),
            "bound_ms": Figure.of(map(sum, zip(nodes, clones, strict=True))),
        },
        {
            "what": "DynamicTokenTrie, add_token",
            "ms": ms(lambda: None, lambda _: token_by_token()),
            "bound_ms": Figure.of(nodes),
        },
    ]


def evictions() -> list[dict[str, Any]]:
    def evict(root: DynamicTokenTrie) -> None:
        root.evict_lru_kv(root.count_kv_size() - NUM_EVICTED)

    return [
        {"what": f"evict {NUM_EVICTED} of {n * NUM_EVICTED}", "ms": ms(functools.partial(trie_of, n), evict, 7)}
        for n in (2, 32)
    ]


def main() -> None:
    options = Options("token_trie", __doc__, has_plot=False).parse()
    rows, evicted = measure(), evictions()
    print(f"{NUM_TOKENS} tokens")
    show_all("{what:>31} {ms:>22.2f} {bound_ms:>22.2f} {quadratic_ms:>22.0f}", [*rows, *evicted])
    few, many = (row["ms"].median for row in evicted)
    met = all(row["ms"].median <= 30 for row in rows) and many <= 4 * few
    finish(options, rows=rows + evicted, targets_met=met)


if __name__ == "__main__":
    main()
