"""Policies of eviction on small traces: the bound is one, hints come near it, and the tree's LRU is LRU."""

import json
import statistics

import pytest
from typer.testing import CliRunner

from kvpage.tools.cli import app
from kvpage.tools.replay import TraceRequest
from kvpage.tools.replays.agent_trace import AgentTraceConfig, agent_trace
from kvpage.tools.replays.eviction_replay import NAMES, figures, replay_eviction
from kvpage.tools.replays.eviction_rules import LastUse, RuleCache

HASH_TOKENS = 8192


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    return agent_trace(AgentTraceConfig(num_sessions=25, seconds=600, hash_tokens=HASH_TOKENS, seed=3))


def test_a_generated_trace_has_the_published_statistics():
    requests = agent_trace(AgentTraceConfig(num_sessions=80, hash_tokens=4096, seed=1))
    assert 120_000 < statistics.median(request.input_length for request in requests) < 170_000
    assert 380 < statistics.median(request.output_length for request in requests) < 510
    assert requests == agent_trace(AgentTraceConfig(num_sessions=80, hash_tokens=4096, seed=1))
    last = {request.session for request in requests if request.is_last}
    assert last == {request.session for request in requests}
    assert all((request.next_use is None) == request.is_last for request in requests)


def test_hints_come_near_the_bound(trace):
    results = {name: replay_eviction(name, trace, 220, HASH_TOKENS) for name in NAMES}
    best = results["belady"].hit_tokens
    assert all(result.hit_tokens <= best for result in results.values())
    rows = {row["name"]: row for row in figures(list(results.values()))}
    assert rows["exact"]["part_of_belady"] > 0.98 and rows["hinted"]["misses_saved"] > 0.1
    assert rows["hinted"]["job_speedup"] > 1 and rows["lru"]["misses_saved"] == 0
    assert results["cost"].hit_tokens > 0.995 * results["lru"].hit_tokens


def test_the_trees_lru_finds_what_lru_finds(trace):
    rule, num_found = RuleCache(150, LastUse()), 0
    for index, request in enumerate(fitting := [r for r in trace if len(r.hash_ids) <= 150]):
        num_found += rule.serve(index, request)
    result = replay_eviction("lru", fitting, 150, HASH_TOKENS)
    assert result.hit_tokens == num_found * HASH_TOKENS


def test_the_command_compares(tmp_path):
    line = {"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [1, 2]}
    other = line | {"timestamp": 1, "hash_ids": [3, 4]}
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, [line, other, line])))
    words = ["replay", str(path), "--device-blocks", "3", "--block-size", "16", "--hash-tokens", "16"]
    shown = CliRunner().invoke(app, [*words, "--eviction", "lru,belady", "--json"])
    assert [row["hit_tokens"] for row in json.loads(shown.stdout)] == [16, 16]
    sweep = [*words[:2], "--sweep", "device-blocks=2:4", *words[4:], "--plot", str(tmp_path / "a.png")]
    assert "belady" in CliRunner().invoke(app, [*sweep, "--eviction", "lru,belady"]).stdout
    assert (tmp_path / "a.png").stat().st_size > 0
    refused = CliRunner().invoke(app, [*words, "--eviction", "mru"])
    assert refused.exit_code == 1 and "eviction must be one of lru, slru" in str(refused.exception)
