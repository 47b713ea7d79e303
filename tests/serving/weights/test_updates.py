"""update_weights: every request's tokens are those of a fresh model with the weights that its choice promises."""

import random
import time

import pytest
from support.models import make_prompts
from support.seeds import replay, seed_of
from support.weight_versions import WeightVersions

from kvpage import CacheConfig
from kvpage.blend import BlendConfig
from kvpage.blocks.namespaces import OF_WEIGHTS, WeightsName
from kvpage.checks.values import MAX_CALLER_NAMESPACE_BYTES
from kvpage.serving import Branches, Engine, EngineConfig, SamplingParams
from kvpage.serving.weights.engine_weights import MAX_VERSION_BYTES
from kvpage.store import KVStore, KVStoreConfig, metadata_of

B, NUM_TOKENS = 4, 6
PARAMS = SamplingParams(max_tokens=NUM_TOKENS)
STEM = make_prompts([6 * B], seed=1)[0]
PROMPTS = [STEM + tail for tail in make_prompts([0, 1, B - 1, B, B + 1], seed=2)]


def make_engine(versions: WeightVersions, num_blocks: int = 64, num_cpu_blocks: int = 0, **fields: object) -> Engine:
    config = EngineConfig(CacheConfig(B, num_blocks, num_cpu_blocks), load_or_compute=False, **fields)
    return Engine.from_model(versions.model, config)


def tokens_of(outputs: list) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def answers(versions: WeightVersions, version: str, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [versions.answer(version, prompt, NUM_TOKENS) for prompt in prompts]


def test_versions_share_nothing_and_come_back():
    versions = WeightVersions()
    engine = make_engine(versions)
    for version in ("", "v1", "v2", "v1"):
        if version:
            engine.update_weights(version, lambda version=version: versions.load(version))
        outputs = engine.generate(PROMPTS, PARAMS)
        assert tokens_of(outputs) == answers(versions, version)
        assert engine.stats().weights.version == engine.weights_version == version
    assert all(output.num_cached_tokens == len(prompt) - 1 for output, prompt in zip(outputs, PROMPTS, strict=True))
    assert engine.stats().weights.num_updates == 3
    engine.manager.check()


def test_explain_names_the_version_that_has_the_prompt():
    versions = WeightVersions()
    engine = make_engine(versions)
    engine.generate(PROMPTS[:1], PARAMS)
    engine.update_weights("v1", lambda: versions.load("v1"))
    found = engine.explain(PROMPTS[0])
    assert (found.num_cached_tokens, found.version) == (0, ("", len(PROMPTS[0])))
    assert "the weights have changed: the version before any update has 24 tokens" in str(found)
    engine.generate(PROMPTS[:1], PARAMS)
    assert engine.explain(PROMPTS[0]).version is None
    assert engine.explain(PROMPTS[0], b"tenant").version is None


@pytest.mark.parametrize("num_cpu_blocks", [0, 32])
def test_a_dropped_version_is_gone_from_both_tiers_and_others_stay(num_cpu_blocks):
    versions = WeightVersions()
    engine = make_engine(versions, 24, num_cpu_blocks)
    for version in ("v1", "v2"):
        engine.update_weights(version, lambda version=version: versions.load(version))
        engine.generate(PROMPTS, PARAMS)
        engine.add_request(PROMPTS[0], PARAMS, namespace=b"tenant")
        while engine.has_unfinished:
            engine.step()
    tree = engine.manager.tree
    num_cached = tree.num_cached
    assert engine.drop_version("v1") == num_cached - tree.num_cached
    assert len(tree.names(9)) == 2 and engine.explain(PROMPTS[0]).num_cached_tokens == len(PROMPTS[0]) - 1
    assert engine.drop_version("v1") == engine.drop_version("never") == 0
    with pytest.raises(ValueError, match="current"):
        engine.drop_version("v2")
    engine.manager.check()


@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_requests_finish_on_the_weights_that_they_have(num_steps):
    versions = WeightVersions()
    engine = make_engine(versions, max_num_seqs=3)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    steps = [one for _ in range(num_steps) for one in engine.step()]
    with pytest.raises(ValueError, match="change must be a function"):
        engine.update_weights("v1", running="finish")
    begun = {request.request_id for request in engine.loop.requests.values() if request.group.is_admitted}
    assert 0 < len(begun) < len(PROMPTS)
    engine.update_weights("v1", lambda: versions.load("v1"), running="finish")
    assert engine.loop.num_begun == engine.stats().weights.num_restarted == 0
    while engine.has_unfinished:
        steps += engine.step()
    got = {output.request_id: output.output.token_ids for output in steps if output.output}
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        assert got[request_id] == versions.answer("" if request_id in begun else "v1", prompt, NUM_TOKENS)


def test_requests_cannot_finish_on_weights_that_have_changed():
    versions = WeightVersions()
    engine = make_engine(versions)
    engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    versions.load("v1")
    with pytest.raises(ValueError, match="have changed already"):
        engine.update_weights("v1", lambda: None, running="finish")
    assert engine.weights_version == "" and engine.stats().num_running == 1


@pytest.mark.parametrize("num_steps", [2, 4])
def test_stale_requests_go_on_and_nobody_finds_their_blocks(num_steps):
    versions = WeightVersions()
    engine = make_engine(versions)
    params = SamplingParams(max_tokens=4 * B)
    engine.add_request(PROMPTS[0], params)
    before = [one.token_id for _ in range(num_steps) for one in engine.step()]
    engine.update_weights("v1", lambda: versions.load("v1"), running="stale")
    assert (engine.stats().weights.num_stale, engine.stats().weights.num_restarted) == (1, 0)
    after = []
    while engine.has_unfinished:
        after += [one.token_id for one in engine.step()]
    known = [*PROMPTS[0], *before]
    assert after == versions.stale_answer("", "v1", known, len(known) - 1, 4 * B - num_steps)
    assert engine.manager.tree.names(9) == [b""], "only what was computed before the update is found, as such"
    assert engine.explain([*known, *after]).num_cached_tokens == 0
    assert tokens_of(engine.generate(PROMPTS, PARAMS)) == answers(versions, "v1")
    engine.manager.check()


def test_a_change_that_raises_leaves_the_version():
    versions = WeightVersions()
    engine = make_engine(versions)
    with pytest.raises(ZeroDivisionError):
        engine.update_weights("v1", lambda: 1 // 0)
    for wrong in ("", "v" * 129, "\u20ac" * 43, "\ud800"):
        with pytest.raises(ValueError, match="version"):
            engine.update_weights(wrong)
    with pytest.raises(ValueError, match="running"):
        engine.update_weights("v1", running="abort")
    with pytest.raises(RuntimeError, match="Branches"), Branches(engine) as branches:
        branches.start(PROMPTS[0])
        engine.update_weights("v1")
    assert engine.weights_version == "" and tokens_of(engine.generate(PROMPTS, PARAMS)) == answers(versions, "")


@pytest.mark.parametrize("changed_weights", ["error", "version"])
def test_the_longest_namespace_goes_to_the_longest_version(changed_weights):
    versions, version = WeightVersions(), "v" * MAX_VERSION_BYTES
    engine = make_engine(versions, changed_weights=changed_weights)
    longest = OF_WEIGHTS + b"x" * (MAX_CALLER_NAMESPACE_BYTES - len(OF_WEIGHTS))
    with pytest.raises(ValueError, match="at most 4096 bytes, got 4097"):
        engine.add_request(PROMPTS[0], PARAMS, namespace=longest + b"x")
    with KVStore(KVStoreConfig(B, ("memory://?size=64MiB",)), metadata_of(engine.cache, "tiny")) as store:
        engine.use_store(store)
        ids = [engine.add_request(prompt, PARAMS, namespace=longest) for prompt in PROMPTS]
        engine.step()
        versions.load("v1")
        if changed_weights == "error":
            engine.update_weights(version)
        outputs = {}
        while engine.has_unfinished:
            outputs |= {one.request_id: one.output for one in engine.step() if one.output}
        assert [outputs[request_id].finish_reason for request_id in ids] == ["length"] * len(ids)
        assert engine.weights_version == version or changed_weights == "version"
        engine.close()
        assert any(longest in one.namespace for one in store.records())
    assert engine.explain(PROMPTS[0], longest).num_cached_tokens == len(PROMPTS[0]) - 1


def test_a_namespace_that_cannot_be_made_leaves_all_requests_as_they_were(monkeypatch):
    versions = WeightVersions()
    engine = make_engine(versions)
    engine.generate(PROMPTS[:1], PARAMS)
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, PARAMS)
    engine.step()
    requests, num_begun = list(engine.loop.requests.values()), engine.loop.num_begun
    monkeypatch.setattr(requests[-1], "own_namespace", "no bytes")
    for running in ("restart", "stale"):
        with pytest.raises(TypeError, match="namespace must be bytes"):
            engine.update_weights("v1", running=running)
    assert engine.weights_version == "" and [one.namespace for one in requests] == [b""] * 2
    assert engine.loop.num_begun == num_begun > 0 and not any(one.is_stale for one in requests)


def test_a_pin_whose_time_is_over_keeps_no_block_of_an_old_version(monkeypatch):
    versions = WeightVersions()
    engine = make_engine(versions, pin_quota=32)
    engine.generate(PROMPTS[:1], PARAMS)
    session = engine.session("a")
    session.supersede(PROMPTS[0])
    session.retain(ttl=60)
    num_pinned, now = session.num_retained_blocks, time.monotonic()
    assert num_pinned > 0
    engine.update_weights("v1", lambda: versions.load("v1"))
    assert engine.drop_version("") < num_pinned
    monkeypatch.setattr(engine.manager.space.pins, "_clock", lambda: now + 100)
    assert session.num_retained_blocks == 0
    assert engine.drop_version("") == num_pinned and not engine.manager.tree.names(9)


def test_a_store_keeps_versions_apart_and_drops_their_records():
    versions = WeightVersions()
    engine = make_engine(versions)
    with KVStore(KVStoreConfig(B, ("memory://?size=64MiB",)), metadata_of(engine.cache, "tiny")) as store:
        engine.use_store(store)
        for version in ("v1", "v2"):
            engine.update_weights(version, lambda version=version: versions.load(version))
            assert tokens_of(engine.generate(PROMPTS, PARAMS)) == answers(versions, version)
        other = make_engine(versions)
        other.use_store(store)
        other.update_weights("v2")
        outputs = other.generate(PROMPTS, PARAMS)
        assert tokens_of(outputs) == answers(versions, "v2") and outputs[0].num_cached_tokens > 0
        num_of_v1 = len({one.key for one in store.records() if b"v1" in one.namespace})
        assert 0 < num_of_v1 < len(store.records())
        engine.drop_version("v1", records=True)
        assert not [one for one in store.records() if b"v1" in one.namespace] and store.records()
        for closing in (engine, other):
            closing.close()


def test_segments_of_other_versions_are_not_blended():
    versions, lead = WeightVersions(), make_prompts([3], seed=5)[0]
    engine = make_engine(versions, blend=BlendConfig())
    engine.warm_segments([STEM])
    engine.update_weights("v1", lambda: versions.load("v1"))
    for is_warm in (False, True):
        stream = engine.stream(lead + STEM, PARAMS, blend=True, segments=[len(lead), len(STEM)])
        tokens = list(stream)
        assert (stream.output.num_reused_tokens > 0) == is_warm
        assert is_warm or tokens == versions.answer("v1", lead + STEM, NUM_TOKENS)
        engine.drop_version("")
        engine.manager.space.drop([*lead, *STEM, *tokens], engine.kv_namespace())
        engine.warm_segments([STEM])
    engine.close()


class Life:
    """Requests, steps, updates and drops in random order. Each token is compared with a fresh model's."""

    def __init__(self, versions: WeightVersions, engine: Engine, seed: int) -> None:
        self.versions, self.engine, self.random = versions, engine, random.Random(seed)
        self.tokens: dict[str, list[int]] = {}
        self.asked: dict[str, list[int]] = {}
        self.fixed: dict[str, int | None] = {}  # tokens of older versions; None once it was stale
        self.finished: dict[str, str] = {}  # the version on which a request was to finish
        self.num_compared = self.num_stale = 0

    def run(self, num_ops: int) -> None:
        for _ in range(num_ops):
            self.random.choices([self.add, self.step, self.update, self.drop], [4, 8, 2, 1])[0]()
        self.drain()
        for _ in range(6):  # no update follows these: a life of many stale answers compares six at least
            self.add()
        self.drain()
        self.engine.manager.check()

    def drain(self) -> None:
        while self.asked:
            self.step()

    def add(self) -> None:
        if len(self.asked) < 6:
            request_id = self.engine.add_request(self.random.choice(PROMPTS), PARAMS)
            self.asked[request_id] = list(self.engine.loop.requests[request_id].prompt.tolist())
            self.tokens[request_id], self.fixed[request_id] = [], 0

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens[output.request_id].append(output.token_id)
            if output.output:
                version = self.finished.pop(output.request_id, self.engine.weights_version)
                self.compare(output.request_id, version)

    def compare(self, request_id: str, version: str) -> None:
        prompt, num_fixed = self.asked.pop(request_id), self.fixed.pop(request_id)
        tokens = self.tokens.pop(request_id)
        if num_fixed is None:
            self.num_stale += 1
            return
        known = prompt + tokens[:num_fixed]
        expected = self.versions.answer(version, known, NUM_TOKENS - num_fixed)
        assert tokens[num_fixed:] == expected, f"a stale answer: {replay()}"
        self.num_compared += 1

    def update(self) -> None:
        last = self.engine.weights_version
        version = self.random.choice([name for name in self.versions.states if name not in ("", last)])
        running = self.random.choice(["finish", "restart", "stale"])
        requests = list(self.engine.loop.requests.values())
        if running == "finish":
            self.finished |= {request.request_id: last for request in requests if request.group.is_admitted}
        self.engine.update_weights(version, lambda: self.versions.load(version), running=running)
        for request_id, request in self.engine.loop.requests.items():
            was_stale = self.fixed[request_id] is None
            self.fixed[request_id] = None if request.is_stale or was_stale else len(self.tokens[request_id])

    def drop(self) -> None:
        names = [name for name in self.versions.states if name != self.engine.weights_version]
        self.engine.drop_version(self.random.choice(names))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("llama", {"num_blocks": 14, "num_cpu_blocks": 24, "max_num_batched_tokens": 2 * B}),
        ("gemma3", {"num_blocks": 40, "num_window_blocks": 30}),
    ],
)
def test_random_lives(kind, fields):
    versions = WeightVersions(kind)
    life = Life(versions, make_engine(versions, **fields), seed_of(len(fields)))
    life.run(60)
    assert life.num_compared > 5


def test_the_life_notices_a_namespace_without_its_version(monkeypatch):
    monkeypatch.setattr(WeightsName, "within", lambda self, namespace: namespace)
    versions = WeightVersions()
    with pytest.raises(AssertionError, match="a stale answer"):
        for seed in range(20):
            Life(versions, make_engine(versions), seed).run(60)
