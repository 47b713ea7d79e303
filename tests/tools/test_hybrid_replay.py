"""The replay of traces for models with states, against a plain simulation that keeps every checkpoint."""

import json

import pytest

typer = pytest.importorskip("typer")
from tools.test_replay import BLOCK, HASH_TOKENS, make_trace  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from kvpage.tools.cli import app  # noqa: E402
from kvpage.tools.replay import ReplayConfig, TraceRequest  # noqa: E402
from kvpage.tools.replays.hybrid_replay import HybridReplay, replay_of  # noqa: E402
from kvpage.tools.replays.replay_report import Sweep, _draw_sweep, figures, with_policies  # noqa: E402

AMPLE = {"block_size": BLOCK, "hash_tokens": HASH_TOKENS, "state_slots": 4000}


class Kept:
    """All that was cached, and all checkpoints, as paths of blocks."""

    def __init__(self):
        self.cached, self.states = set(), set()

    def request(self, request, every=None):
        """Return (tokens found, tokens with K and V)."""
        names = [(one, i) for one in request.hash_ids for i in range(HASH_TOKENS // BLOCK)]
        paths = [tuple(names[:end]) for end in range(1, request.input_length // BLOCK + 1)]
        stop = min(len(paths), max(request.input_length - 1, 0) // BLOCK)
        found = max((end for end in range(1, stop + 1) if paths[end - 1] in self.states), default=0)
        reach = max((end for end in range(1, stop + 1) if paths[end - 1] in self.cached), default=0)
        marks = {reach, stop, *(range(0, len(paths) + 1, every // BLOCK) if every else ())}
        self.states |= {paths[end - 1] for end in marks if end > found}
        self.cached |= set(paths)
        return found * BLOCK, reach * BLOCK


@pytest.mark.parametrize("every", [None, 16])
@pytest.mark.parametrize("seed", range(3))
def test_with_ample_slots_every_checkpoint_is_found(seed, every):
    kept, trace = Kept(), make_trace(seed)
    replay = replay_of(ReplayConfig(10_000, checkpoint_every=every, **AMPLE))
    assert isinstance(replay, HybridReplay)
    totals = [0, 0]
    for request in trace:
        totals = [a + b for a, b in zip(totals, kept.request(request, every), strict=True)]
        replay.step(request)
        replay.manager.check()
        assert [replay.report.device_hit_tokens, replay.report.kv_tokens] == totals
    report = replay.finish()
    assert 0 < totals[0] < totals[1] and report.kept_states == len(kept.states)
    assert report.evicted_states == report.host_hit_tokens == 0


@pytest.mark.parametrize("policy", ["on_eviction", "at_once"])
def test_states_and_blocks_go_to_the_host_and_back(policy):
    sizes = {"host_blocks": 300, "state_slots": 4, "host_state_slots": 20, "block_bytes": 10, "state_bytes": 1}
    replay = replay_of(ReplayConfig(60, policy=policy, **{**AMPLE, **sizes}))
    report = replay.run(make_trace(3))
    assert report.host_hit_tokens > 0 and report.evicted_states > 0 and report.restored_states > 0
    assert report.loaded_bytes % 10 and report.stored_bytes % 10  # states, too
    found = report.device_hit_tokens + report.host_hit_tokens
    assert report.computed_tokens == report.prompt_tokens - found
    assert found <= report.kv_tokens and report.skipped == 0


def test_fewer_slots_find_less_and_never_more_than_k_and_v():
    trace = make_trace(1)
    reports = [replay_of(ReplayConfig(400, **{**AMPLE, "state_slots": slots})).run(trace) for slots in (1, 4, 400)]
    rates = [report.hit_rate for report in reports]
    assert rates[0] < rates[1] < rates[2] <= reports[2].kv_tokens / reports[2].prompt_tokens


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_prompts_about_as_long_as_a_block(length):
    replay = replay_of(ReplayConfig(8, with_outputs=True, **AMPLE))
    for _ in range(3):
        replay.step(TraceRequest(0, length, 3, [7]))
        replay.manager.check()
    assert replay.report.device_hit_tokens == 2 * (max(length - 1, 0) // BLOCK) * BLOCK
    assert replay.manager.num_free_blocks == 8


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"state_slots": -1}, "state_slots must be an integer of at least 0, got -1"),
        ({"state_slots": 1, "checkpoint_every": 12}, "checkpoint_every must be a multiple of block_size=8, got 12"),
        ({"state_slots": 1, "checkpoint_every": 0}, "checkpoint_every must be a multiple of block_size=8, got 0"),
        ({"state_slots": 0, "checkpoint_every": 8}, "state_slots must be positive where"),
        ({"state_slots": 0, "host_state_slots": 8}, "state_slots must be positive where"),
    ],
)
def test_bad_options_are_named(options, reason):
    with pytest.raises(ValueError, match=reason):
        ReplayConfig(8, **{**AMPLE, **options})


def test_a_sweep_draws_a_curve_for_each_policy():
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    sweep, trace = Sweep.parse("state-slots=1:4"), make_trace(0)
    configs = [one for policy in with_policies(ReplayConfig(400, **AMPLE), [16, 64]) for one in sweep.configs(policy)]
    _draw_sweep(axes, sweep, [figures(config, replay_of(config).run(trace)) for config in configs])
    assert [line.get_label() for line in axes.get_lines()] == [
        "K and V are cached",
        "checkpoints at ends and splits",
        "and one every 16 tokens",
        "and one every 64 tokens",
    ]
    assert {len(line.get_xdata()) for line in axes.get_lines()} == {3}


def test_the_command_sweeps_slots(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": r.timestamp, "input_length": r.input_length, "output_length": 1, "hash_ids": r.hash_ids}
        for r in make_trace(2, num_requests=40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    options = ["--device-blocks", "400", "--block-size", "8", "--hash-tokens", "32", "--checkpoint-every", "16"]
    drawn = ["--sweep", "state-slots=2:4", "--plot", str(tmp_path / "drawn.png"), "--json"]
    done = CliRunner().invoke(app, ["replay", str(path), *options, *drawn])
    assert done.exit_code == 0, done.output
    rows = json.loads(next(line for line in done.output.splitlines() if line.startswith("[")))
    assert [(row["state_slots"], row["checkpoint_every"]) for row in rows] == [(2, 0), (4, 0), (2, 16), (4, 16)]
    assert (tmp_path / "drawn.png").stat().st_size > 0
    wrong = CliRunner().invoke(app, ["replay", str(path), "--device-blocks", "9", "--checkpoint-every", "16"])
    assert wrong.exit_code != 0
