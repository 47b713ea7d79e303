"""ExplainLife: random questions to an engine, beside an oracle that computes anew, and the requests that follow.

    prompt ─► explain ─► by the oracle: the cached blocks as the tree lists them, compared token by token
                     └─► by the engine: what a request with this prompt then finds

The oracle knows no edge, hash or walk: it has a tuple of tokens for each cached block.
"""

import random
from concurrent.futures import wait
from typing import Any

import torch
from support.engines import PATIENCE, B
from support.models import make_model
from support.naive_tree import common_prefix

from kvpage import CacheConfig
from kvpage.blocks.explain import Ending, Explanation, GroupReach, StoreVerdict
from kvpage.blocks.namespaces import WeightsName
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.store import KVStore, KVStoreConfig, metadata_of

C, NUM_TOKENS = 2 * B, 3  # tokens of a chunk; ids of a prompt are less
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
NAMESPACES = b"", b"ann", b"bob"
VERSIONS = "v1", "v2", "v3"
MOST_ENTRIES = 10_000
WORLDS: list[dict[str, Any]] = [
    {"num_blocks": 10},
    {"num_blocks": 12, "share_parts": False},
    {"num_blocks": 8, "num_host_blocks": 8},
    {"num_blocks": 10, "has_store": True},
    {"num_blocks": 64, "num_host_blocks": 16, "has_store": True},
]
Block = tuple[bytes, tuple[int, ...]]
"""A namespace, and the tokens of a path up to the end of a block."""


class ExplainLife:
    """An engine, its questions, and what was ever cached.

    figures: how often each ending was told.
    """

    def __init__(self, seed: int, num_blocks: int, num_host_blocks: int = 0, has_store: bool = False, **fields: Any):
        self.rng, self.share_parts = random.Random(seed), fields.get("share_parts", True)
        cache = CacheConfig(B, num_blocks, num_host_blocks)
        config = EngineConfig(cache, load_or_compute=False, **{**PATIENCE, "explains_requests": True, **fields})
        self.engine = Engine.from_model(make_model("llama"), config)
        self.store: KVStore | None = None
        if has_store:
            self.store = KVStore(KVStoreConfig(C, ("memory://?size=32KiB",)), metadata_of(self.engine.cache, "m"))
            self.engine.use_store(self.store)
        self.prompts: list[list[int]] = []
        self.ever: set[Block] = set()
        self.figures: dict[str, int] = {}

    def close(self) -> None:
        """Close the engine, then the store."""
        self.engine.close()
        if self.store is not None:
            self.store.close()

    def live(self, count: int) -> None:
        """Ask so many questions, each followed by its request."""
        for _ in range(count):
            self._change()
            self._ask(self._prompt(), self.rng.choice(NAMESPACES))

    # --- what happens ------------------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Seldom, forget all, or begin another version of the weights, which has the same numbers here."""
        draw = self.rng.random()
        if draw < 0.01:
            self.engine.reset_prefix_cache()
        elif draw < 0.03:
            self.engine.update_weights(self.rng.choice([v for v in VERSIONS if v != self.engine.weights_version]))

    def _prompt(self) -> list[int]:
        """Return a prompt: a new one, or the beginning of an earlier one with other tokens behind."""
        tail = [self.rng.randrange(NUM_TOKENS) for _ in range(self.rng.randrange(0, 3 * B + 2))]
        head = self.rng.choice(self.prompts) if self.prompts and self.rng.random() < 0.8 else []
        cut = self.rng.choice((len(head), self.rng.randrange(len(head) + 1)))
        prompt = [*head[:cut], *tail][: 6 * B + 1] or [1]
        self.prompts = [*self.prompts[-11:], prompt]
        return prompt

    def _ask(self, prompt: list[int], namespace: bytes) -> None:
        before = self.engine.stats()
        told = self.engine.explain(prompt, namespace)
        assert self.engine.stats() == before, "asking changes nothing"
        self._check(told, prompt, namespace)
        [output] = self._generated(prompt, namespace)
        loads = told.store is not None and told.store.verdict is StoreVerdict.LOADS
        expected = told.store.num_tokens if loads and told.store is not None else told.num_cached_tokens
        assert output.num_cached_tokens == expected, (output, told)
        self.figures["lacks_room"] = self.figures.get("lacks_room", 0) + told.lacks_room
        noted = output.explanation
        assert noted is not None and noted.num_cached_tokens == output.num_cached_tokens
        assert loads or noted.groups == told.groups
        self._count(loads, told.groups[0])

    def _generated(self, prompt: list[int], namespace: bytes) -> list[Any]:
        request_id = self.engine.add_request(prompt, ONE, namespace=namespace)
        outputs = []
        while not outputs:
            outputs = [step.output for step in self.engine.step() if step.request_id == request_id and step.output]
        wait(self.engine.saves_under_way())
        self.engine.step()  # which lets go of the blocks that were saved
        return outputs

    def _count(self, loads: bool, group: GroupReach) -> None:
        name = "loaded" if loads else group.ending.name.lower()
        self.figures[name] = self.figures.get(name, 0) + 1

    # --- the oracle --------------------------------------------------------------------------------------------------

    def _check(self, told: Explanation, prompt: list[int], namespace: bytes) -> None:
        blocks, kv_namespace = self._blocks(), self.engine.kv_namespace(namespace)
        self.ever |= blocks
        [group] = told.groups
        reach, nexts = self._reach(blocks, prompt, kv_namespace)
        most = len(prompt) - 1 if self.share_parts else (len(prompt) - 1) // B * B
        assert (told.num_tokens, group.num_tokens) == (len(prompt), reach if self.share_parts else reach // B * B)
        num_cached = min(group.num_tokens, most)
        assert told.num_cached_tokens == (num_cached // B * B if told.lacks_room else num_cached)
        assert not told.lacks_room or num_cached % B
        self._check_ending(group, prompt, kv_namespace, reach, nexts, group.num_tokens >= most)
        self._check_elsewhere(told, blocks, prompt, kv_namespace)

    def _blocks(self) -> set[Block]:
        """Return all cached blocks, from the tree's own list of them."""
        entries, paths, blocks = self.engine.manager.tree.entries(MOST_ENTRIES), [], set()
        for entry in entries:
            before = () if entry.parent is None else paths[entry.parent]
            paths.append((*before, *entry.tokens.tolist()))
            blocks |= {(entry.namespace, paths[-1][:end]) for end in range(len(before) + B, len(paths[-1]) + 1, B)}
        return blocks

    def _reach(self, blocks: set[Block], prompt: list[int], name: bytes) -> tuple[int, set[int]]:
        """Return how many tokens of a prompt are cached, and which tokens cached paths have after them."""
        paths = [path for owner, path in blocks if owner == name]
        most = max((common_prefix(path, prompt) for path in paths), default=0)
        return most, {path[most] for path in paths if len(path) > most and common_prefix(path, prompt) == most}

    def _check_ending(
        self, group: GroupReach, prompt: list[int], name: bytes, reach: int, nexts: set[int], is_all: bool
    ) -> None:
        if is_all:
            assert group.ending is Ending.PROMPT
        elif group.ending is Ending.KV_EVICTED:
            end = (reach // B + 1) * B
            assert (name, tuple(prompt[:end])) in self.ever - self._blocks() and group.eviction == "lru"
        else:
            assert group.ending is (Ending.DIFFERENT if nexts else Ending.NOT_CACHED)
        if group.cached_token is not None:
            assert group.differs_at == reach < len(prompt) and group.token == prompt[reach]
            assert group.cached_token in nexts and group.cached_token != group.token
        else:
            assert not nexts or reach == len(prompt)

    def _check_elsewhere(self, told: Explanation, blocks: set[Block], prompt: list[int], name: bytes) -> None:
        """Compare with the longest matches of all other namespaces, and of other versions of the caller's own."""
        reach = told.groups[0].num_tokens
        others = {other: self._reach(blocks, prompt, other)[0] for other, _ in blocks if other != name}
        longer = {other: count for other, count in others.items() if count > reach}
        if longer:
            assert told.elsewhere is not None and told.elsewhere[1] == longer[told.elsewhere[0]] == max(longer.values())
        else:
            assert told.elsewhere is None
        caller = WeightsName.split(name)[1]
        own = {WeightsName.split(other): count for other, count in longer.items()}
        versions = {weights.version: count for (weights, owner), count in own.items() if owner == caller}
        if versions:
            assert told.version is not None and told.version[1] == versions[told.version[0]] == max(versions.values())
        else:
            assert told.version is None


def run_lives(seed: int, count: int, advance: Any) -> dict[str, int | float]:
    """Ask `count` questions in lives of at most 200, in all worlds by turns."""
    figures: dict[str, int | float] = {}
    torch.manual_seed(0)
    for number, begin in enumerate(range(0, count, 200)):
        life = ExplainLife((seed << 32) + number, **WORLDS[(seed + number) % len(WORLDS)])
        try:
            life.live(min(200, count - begin))
        finally:
            life.close()
        for name, value in life.figures.items():
            figures[name] = figures.get(name, 0) + value
        advance(min(200, count - begin))
    return figures
