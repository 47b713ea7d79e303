"""Measure the cost of a path of 8,192 tokens in a token trie, to add and to evict; it must not grow with the depth.

Bounds, in the same run: making as many bare nodes, and cloning as many slices, which owning their bytes asks for.
Beside them a trie whose every new token stamps all its ancestors, and whose eviction counts the whole trie again for
each node, as written at first by those who write one. Targets: 30 ms to add 8,192 tokens, with and without K and V (two
layers of two heads of 16), log_softmax not counted; eviction of 1,000 nodes at most four times as slow in a trie 16
times as large. Medians with their quartiles.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns
from kvpage.benchmarks.script import finish, parse
from kvpage.extras.token_trie import DynamicTokenTrie, TokenTrie

NUM_TOKENS, NUM_EVICTED, VOCAB = 8192, 1000, 32
TOKENS = range(NUM_TOKENS)
COLUMNS = "{what:>31} {ms:>22.2f} {bound_ms:>22.2f} {quadratic_ms:>22.0f}"


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


def times_ms(call: Callable[[Any], object], make: Callable[[], Any] = lambda: None, repeat: int = 15) -> list[float]:
    """Return the milliseconds of each call, on a fresh result of `make`; the collector runs between, not within."""
    times = []
    for _ in range(repeat):
        times += in_turns({"call": functools.partial(call, make())}, 1, warmups=0)["call"]
    return [1e3 * spent for spent in times]


def ms(call: Callable[[Any], object], make: Callable[[], Any] = lambda: None, repeat: int = 15) -> Figure:
    return Figure.of(times_ms(call, make, repeat))


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


def add_each(node: DynamicTokenTrie) -> None:
    for token_id in TOKENS:
        node = node.add_token(token_id)


def cloning(part: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
    """Return a call that clones as many tensors as there are tokens, into a list, so that their memory is new."""
    parts = [part.clone() for _ in range(64)]
    return lambda kept: kept.extend(part.clone() for _ in range(NUM_TOKENS // 64) for part in parts)


def measure() -> list[Row]:
    kv, logits = torch.randn(2, 2, 2, NUM_TOKENS, 16), torch.randn(NUM_TOKENS, VOCAB)
    verify(kv, logits)
    softmax = ms(lambda _: torch.log_softmax(logits, 1)).median
    nodes = times_ms(lambda _: [DynamicTokenTrie() for _ in TOKENS])
    clones = times_ms(cloning(kv[:, :, :, :1]), list)
    extend = times_ms(lambda trie: trie.extend_cache(0, TOKENS, logits, 0), TokenTrie)
    plain = {"ms": Figure.of(each - softmax for each in extend)}
    plain["bound_ms"] = ms(cloning(logits[0]), list)
    dynamic = {"ms": ms(lambda trie: trie.extend_cache(0, TOKENS), DynamicTokenTrie), "bound_ms": Figure.of(nodes)}
    dynamic["quadratic_ms"] = ms(lambda trie: trie.extend_cache(TOKENS), Stamping, 3)
    with_kv = {"ms": ms(lambda trie: trie.extend_cache(0, TOKENS, None, kv), DynamicTokenTrie)}
    with_kv["bound_ms"] = Figure.of(map(sum, zip(nodes, clones, strict=True)))
    return [
        {"what": "TokenTrie, without log_softmax", **plain},
        {"what": "DynamicTokenTrie, no K and V", **dynamic},
        {"what": "DynamicTokenTrie, K and V", **with_kv},
        {"what": "DynamicTokenTrie, add_token", "ms": ms(add_each, DynamicTokenTrie), "bound_ms": Figure.of(nodes)},
    ]


def eviction(num_paths: int) -> Row:
    def evict(root: DynamicTokenTrie) -> None:
        root.evict_lru_kv(root.count_kv_size() - NUM_EVICTED)

    taken = ms(evict, functools.partial(trie_of, num_paths), 7)
    return {"what": f"evict {NUM_EVICTED} of {num_paths * NUM_EVICTED}", "ms": taken}


def main() -> None:
    options = parse("token_trie", __doc__, has_plot=False)
    print(f"{NUM_TOKENS} tokens")
    rows = shown(COLUMNS, [*measure(), *map(eviction, (2, 32))])
    few, many = (row["ms"].median for row in rows[-2:])
    met = all(row["ms"].median <= 30 for row in rows[:-2]) and many <= 4 * few
    finish(options, rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
