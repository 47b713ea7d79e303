"""The replay of traces against simulations of their own: an LRU cache of blocks, written down plainly."""

import io
import json
import random

import pytest

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from kvpage.tools.cli import app  # noqa: E402
from kvpage.tools.replay import Replay, ReplayConfig, TraceError, TraceRequest, read_trace  # noqa: E402
from kvpage.tools.replays.replay_report import Sweep, _draw_sweep, figures  # noqa: E402

HASH_TOKENS, BLOCK = 32, 8


def make_trace(seed, num_requests=200, num_prefixes=12):
    """Conversations that share system prompts and come back longer."""
    rng = random.Random(seed)
    fresh = iter(range(10**6))
    conversations = [[next(fresh) for _ in range(rng.randrange(1, 4))] for _ in range(num_prefixes)]
    requests = []
    for at in range(num_requests):
        history = rng.choice(conversations)[:4]
        hash_ids = history + [next(fresh) for _ in range(rng.randrange(0, 4))]
        length = max(1, len(hash_ids) * HASH_TOKENS - rng.choice([0, 0, 1, 5, 8, 20, 31]))
        requests.append(TraceRequest(at * 100, length, rng.randrange(1, 50), hash_ids))
        if rng.random() < 0.5:
            whole = hash_ids[: length // HASH_TOKENS]
            if whole:
                conversations[rng.randrange(num_prefixes)] = whole
    return requests


class Simulation:
    """Blocks by their whole prefix, in lists by last use: the least recently used first."""

    def __init__(self, num_device, num_host, policy):
        self.num_device, self.num_host, self.policy = num_device, num_host, policy
        self.device, self.host, self.order = set(), set(), []
        self.evicted = self.stored = 0

    def forget(self, path):
        for other in [p for p in self.order if p[: len(path)] == path]:
            self.order.remove(other)
            self.device.discard(other)
            self.host.discard(other)

    def room_on_host(self):
        if len(self.host) < self.num_host:
            return True
        on_host = [path for path in self.order if path in self.host]
        if not on_host:
            return False
        victim = on_host[-1] if on_host[-1] in self.device else on_host[0]  # copies first, the newest first
        if victim in self.device:
            self.host.discard(victim)
        else:
            self.forget(victim)
        return True

    def evict_one(self):
        victim = next(p for p in self.order if p in self.device)
        self.evicted += 1
        if victim not in self.host and self.num_host and self.room_on_host():
            self.host.add(victim)
            self.demoted.append(victim)
        if victim in self.host:
            self.device.discard(victim)
        else:
            self.forget(victim)

    def request(self, length, hash_ids):
        """(tokens found on the device, on the host), or None if the prompt does not fit."""
        needed = -(-length // BLOCK)
        if needed > self.num_device:
            return None
        keys = [(h, i) for h in hash_ids for i in range(HASH_TOKENS // BLOCK)][: length // BLOCK]
        paths = [tuple(keys[: i + 1]) for i in range(len(keys))]
        findable = (length - 1) // BLOCK
        found = 0
        while found < findable and paths[found] in self.device | self.host:
            found += 1
        on_device = sum(path in self.device for path in paths[:found])
        pinned = paths[:found]
        self.order = [path for path in self.order if path not in pinned]
        self.demoted = []
        while self.num_device - len(self.device) < needed - on_device:
            self.evict_one()
        self.stored += sum(path in self.host for path in self.demoted)  # what was lost at once is not copied
        self.device.update(paths)  # a prompt that is cached whole keeps the block that the tree has
        pinned = paths
        self.order = [path for path in self.order if path not in pinned]
        if self.policy == "at_once" and self.num_host:
            for path in paths:
                if path in self.host:
                    continue
                if not self.room_on_host():
                    break
                self.host.add(path)
                self.stored += 1
        self.order += pinned[::-1]
        return on_device * BLOCK, (found - on_device) * BLOCK


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_device, num_host", [(40, 0), (30, 15), (30, 120), (60, 40), (5000, 0)])
@pytest.mark.parametrize("policy", ["on_eviction", "at_once"])
def test_a_replay_equals_a_plain_simulation(seed, num_device, num_host, policy):
    config = ReplayConfig(num_device, num_host, BLOCK, HASH_TOKENS, policy, block_bytes=100)
    replay, simulation = Replay(config), Simulation(num_device, num_host, policy)
    for request in make_trace(seed):
        device, host = replay.report.device_hit_tokens, replay.report.host_hit_tokens
        replay.step(request)
        replay.tree.check([], [])
        found = replay.report.device_hit_tokens - device, replay.report.host_hit_tokens - host
        assert found == (simulation.request(request.input_length, request.hash_ids) or (0, 0))
        assert replay.tree.num_cached == len(simulation.device)
        assert replay.tree.num_host_cached == len(simulation.host)
    report = replay.finish()
    assert report.evicted_blocks == simulation.evicted and report.stored_bytes == simulation.stored * 100
    assert report.requests == 200 and (num_device > 500) == (report.evicted_blocks == 0)
    assert report.skipped < 20


def test_first_tokens_take_the_time_of_loading_and_computing():
    config = ReplayConfig(10, 10, 8, 8, block_bytes=1000, prefill_tokens_per_second=100.0, host_bytes_per_second=5e3)
    replay = Replay(config)
    for at, hash_ids in enumerate([list(range(9)), list(range(20, 29)), list(range(9))]):
        replay.step(TraceRequest(at * 1000, 72, 1, hash_ids))
    report = replay.finish()
    assert report.first_token_seconds == pytest.approx([0.72, 0.72, 7 * 1000 / 5e3 + 0.08])
    assert report.queued_seconds == pytest.approx([0.72, 0.72, 1.48])
    assert (report.device_hit_tokens, report.host_hit_tokens, report.loaded_bytes) == (8, 56, 7000)
    assert report.bytes_per_second == pytest.approx((7000 + report.stored_bytes) / 2.0)
    assert report.computed_tokens == 72 + 72 + 8 and report.computed_tokens_per_second == pytest.approx(76.0)
    assert report.busy_share == pytest.approx((0.72 + 0.72 + 1.48) / 2)


def test_without_a_speed_of_prefill_there_are_no_times():
    report = Replay(ReplayConfig(10, 0, 8, 8)).run(
        [TraceRequest(0, 72, 1, list(range(9))), TraceRequest(500, 8, 1, [9])]
    )
    assert (report.first_token_seconds, report.queued_seconds, report.busy_share) == ([], [], 0.0)
    assert report.computed_tokens_per_second == 160.0


@pytest.mark.parametrize("num_host, labels", [(0, ["device"]), (50, ["both tiers", "device", "host"])])
def test_a_sweep_draws_no_curve_that_hides_another(num_host, labels):
    from matplotlib.figure import Figure

    sweep = Sweep.parse("device-blocks=25:50")
    configs = sweep.configs(ReplayConfig(25, num_host, BLOCK, HASH_TOKENS))
    columns = [figures(config, Replay(config).run(make_trace(0))) for config in configs]
    axes = Figure().add_subplot()
    _draw_sweep(axes, sweep, columns)
    assert [line.get_label() for line in axes.get_lines()] == labels


def test_outputs_take_blocks_only_if_asked():
    requests = [TraceRequest(0, 64, 64, [0]), TraceRequest(1, 64, 64, [1])]
    for with_outputs, evicted in ((False, 0), (True, 4)):
        report = Replay(ReplayConfig(20, 0, 8, 64, with_outputs=with_outputs)).run(requests)
        assert report.evicted_blocks == evicted and report.skipped == 0
    assert Replay(ReplayConfig(12, 0, 8, 64, with_outputs=True)).run(requests).skipped == 2


LINE = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "line 2 of the trace is malformed"),
        ("[]", "must be an object, got list"),
        (json.dumps({**LINE, "input_length": -1}), "input_length must be a number of at least 0, got -1"),
        (json.dumps({**LINE, "timestamp": "now"}), "timestamp must be a number"),
        (json.dumps({**LINE, "hash_ids": [1.5]}), "hash_ids must be a list of integers"),
        (json.dumps({k: v for k, v in LINE.items() if k != "output_length"}), "it lacks 'output_length'"),
    ],
)
def test_malformed_lines_are_named(line, reason):
    with pytest.raises(TraceError, match=reason):
        list(read_trace(io.StringIO(json.dumps(LINE) + "\n" + line + "\n")))
    assert list(read_trace(io.StringIO("\n" + json.dumps(LINE) + "\n\n"))) == [TraceRequest(0, 10, 1, [0])]


def test_bad_configurations_raise():
    for wrong in ({"device_blocks": 0}, {"block_size": 3}, {"policy": "never"}, {"prefill_tokens_per_second": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong)).replace("block_size", "hash_tokens")):
            ReplayConfig(**{"device_blocks": 5, **wrong})
    with pytest.raises(ValueError, match="hash_ids must name 2 runs of 512 tokens"):
        Replay(ReplayConfig(100)).step(TraceRequest(0, 600, 1, [1]))


# --- the command ---


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    rows = [{name: getattr(request, name) for name in names} for request in make_trace(0)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def invoke(*arguments, **given):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], **given)


def test_the_command_prints_what_the_replay_counts(trace, tmp_path):
    sizes = ["--block-size", BLOCK, "--hash-tokens", HASH_TOKENS, "--device-blocks", 25, "--host-blocks", 60]
    done = invoke(trace, *sizes, "--json", "--plot", tmp_path / "use.png")
    assert done.exit_code == 0, done.output
    (figures,) = json.loads(done.stdout)
    expected = Replay(ReplayConfig(25, 60, BLOCK, HASH_TOKENS)).run(make_trace(0))
    assert figures["hit_rate"] == expected.hit_rate > figures["device_hit_rate"] > 0
    assert (tmp_path / "use.png").stat().st_size > 1000
    table = invoke("-", *sizes, input=trace.read_text())
    assert table.exit_code == 0 and "host hit rate" in table.stdout
    assert "computed tokens per second" in table.stdout and "queued" not in table.stdout
    slow = invoke(trace, *sizes, "--prefill", 1)
    assert slow.exit_code == 0 and "queued seconds p99" in slow.stdout
    assert "one machine is too slow for this trace" in slow.stdout


def test_a_sweep_is_drawn_without_being_asked(trace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["--block-size", BLOCK, "--hash-tokens", HASH_TOKENS]
    done = invoke(trace, *sizes, "--sweep", "device-blocks=25:50", "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)) == 2 and (tmp_path / "kvpage-replay.png").stat().st_size > 1000


def test_the_command_sweeps_sizes(trace, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "torch_dtype": "bfloat16"})
    )  # fmt: skip
    block_bytes = 2 * 2 * BLOCK * 2 * 16 * 2
    first = 25 * block_bytes / 2**30
    done = invoke(
        trace, "--block-size", BLOCK, "--hash-tokens", HASH_TOKENS, "--model-config", config, "--json",
        "--sweep", f"device-gib={first:.12f}:{8 * first:.12f}", "--plot", tmp_path / "sweep.png",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rates = [figures["hit_rate"] for figures in json.loads(done.stdout)]
    assert len(rates) == 4 and rates[0] < rates[-1] and (tmp_path / "sweep.png").exists()


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--device-gib", 1], "device-gib needs a model config"),
        ([], "give --device-blocks"),
        (["--device-blocks", 5, "--device-gib", 1], "not both"),
        (["--sweep", "speed=1:2"], "sweep must be like"),
        (["--device-blocks", 5, "--policy", "never"], "policy must be one of"),
    ],
)
def test_the_command_explains_wrong_options(trace, arguments, reason):
    done = invoke(trace, *arguments)
    assert done.exit_code == 1 and reason in str(done.exception or done.output)
    assert invoke(trace.parent / "none.jsonl", "--device-blocks", 5).exit_code == 1
