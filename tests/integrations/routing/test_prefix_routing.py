"""Routing by prefixes: hashes as events name them, digests of bounded size, and the replica that holds most."""

import random

import pytest
from support.mirror_router import expected_hashes
from support.models import make_model, make_prompts

from kvpage import CacheConfig
from kvpage.integrations.routing import CacheDigest, Candidate, DigestReport, PrefixIndex, rank
from kvpage.integrations.routing.prefix_index import GRACE
from kvpage.observe.events.block_hashes import block_hashes
from kvpage.serving import Engine, EngineConfig, SamplingParams

B = 4


@pytest.mark.parametrize("num_tokens", [0, 1, B - 1, B, B + 1, 5 * B])
@pytest.mark.parametrize("namespace", [b"", b"tenant"])
def test_hashes_are_those_of_events(num_tokens: int, namespace: bytes) -> None:
    tokens = list(range(num_tokens))
    assert block_hashes(tokens, B, namespace) == expected_hashes(namespace, tuple(tokens[: num_tokens // B * B]), B)


def test_hashes_refuse_bad_arguments() -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hashes([1], 0)
    with pytest.raises(TypeError):
        block_hashes("text", B)


# --- digests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def followed() -> tuple[Engine, CacheDigest]:
    cache = CacheConfig(block_size=B, num_gpu_blocks=24, num_cpu_blocks=8)
    engine = Engine.from_model(make_model("llama"), EngineConfig(cache, load_or_compute=False))
    digest = CacheDigest(B, max_blocks=16)
    engine.telemetry.follow(digest)
    return engine, digest


def test_a_digest_names_what_the_engine_finds(followed) -> None:
    engine, digest = followed
    engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=2)
    for prompt in make_prompts([5 * B + 1, 3 * B, 9 * B + 2, 2 * B, 12 * B, 1]):  # more than all blocks: some leave
        engine.generate([prompt], params)
        tree = engine.manager.tree
        match = tree.match(prompt, b"", num_left_over=0)
        held = match.num_tokens // B
        tree.release(match)
        report = digest.report()
        index = PrefixIndex()
        index.take_report("a", report)
        whole = held // report.stride * report.stride
        assert index.num_matched("a", block_hashes(prompt, B)) == whole
        assert len(report.hashes) <= 16
    engine.reset_prefix_cache()
    assert digest.report().hashes == frozenset()


def test_a_late_follower_gets_all_that_is_cached(followed) -> None:
    engine, digest = followed
    (prompt,) = make_prompts([3 * B + 1])
    engine.generate([prompt], SamplingParams(max_tokens=1))
    late = CacheDigest(B)
    engine.telemetry.follow(late)
    engine.telemetry.tell()
    assert late.report().hashes >= set(block_hashes(prompt, B))


def test_a_report_crosses_the_wire() -> None:
    report = DigestReport(16, 2, frozenset([0, 5, 2**64 - 1]))
    assert DigestReport.from_wire(report.to_wire()) == report
    assert DigestReport.from_wire({}) is None
    assert len(DigestReport(16, 1, frozenset(range(4096))).to_wire()["hashes"]) == 32_768


# --- the index -------------------------------------------------------------------------------------------------------


def test_the_last_known_block_decides() -> None:
    index = PrefixIndex()
    assert index.num_matched("a", [1, 2, 3]) == 0
    index.take_report("a", DigestReport(B, 2, frozenset([2, 4])))
    assert [index.num_matched("a", list(range(1, n + 1))) for n in range(6)] == [0, 0, 2, 2, 4, 4]
    index.note_routed("a", [1, 2, 3, 4, 5])
    assert index.num_matched("a", [1, 2, 3, 4, 5, 6]) == 5
    index.keep_only(["b"])
    assert index.num_matched("a", [1, 2, 3]) == 0


def test_routed_prompts_must_be_reported_in_time() -> None:
    now = [0.0]
    index = PrefixIndex(clock=lambda: now[0])
    index.note_routed("a", [1, 2])
    now[0] = GRACE / 2
    index.note_routed("a", [7])
    index.take_report("a", DigestReport(B, 1, frozenset()))
    assert index.num_matched("a", [1, 2]) == 2
    now[0] = GRACE + 1
    index.take_report("a", DigestReport(B, 2, frozenset()))
    assert index.num_matched("a", [1, 2]) == 2  # a report with gaps says nothing of them
    index.take_report("a", DigestReport(B, 1, frozenset([1])))
    assert index.num_matched("a", [1, 2]) == 1 and index.num_matched("a", [7]) == 1


def test_memory_is_bounded() -> None:
    index = PrefixIndex(max_routed=10)
    for start in range(0, 1000, 5):
        index.note_routed("a", range(start, start + 5))
    assert index.num_matched("a", [994]) == 1 and index.num_matched("a", [989]) == 0


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "matched, loads, first",
    [
        ([0, 3, 2], [0, 0, 0], 1),
        ([0, 3, 3], [0, 4, 2], 2),
        ([0, 9, 0], [0, 8, 1], 1),
        ([0, 9, 0], [0, 9, 1], 0),  # much busier
        ([5, 9, 0], [1, 20, 0], 0),
        ([0, 0, 0], [3, 1, 2], 1),
    ],
)
def test_the_one_that_holds_most_unless_it_is_much_busier(matched, loads, first) -> None:
    candidates = [Candidate(i, *pair) for i, pair in enumerate(zip(matched, loads, strict=True))]
    for _ in range(5):
        random.shuffle(candidates)
        ranked = rank(candidates, imbalance=8)
        assert ranked[0].replica == first and set(ranked) == set(candidates)
    assert rank([], 8) == []
