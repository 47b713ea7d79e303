"""What an engine tells of its cache: events to a router, residency, transfers, metrics; and nothing unless asked."""

import subprocess
import sys
import threading
import time

import pytest
import zmq
from house.test_import import HIDE
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.insides import stream_of
from support.latent_models import make_latent_model
from support.mirror_router import MirrorRouter, expected_hashes
from support.models import make_model, make_prompts
from support.state_models import make_state_model

from kvpage import CacheConfig
from kvpage.blend import BlendConfig
from kvpage.blocks.config import HostPolicy
from kvpage.blocks.pins import UserPins
from kvpage.cache.cache_engine import CacheEngine
from kvpage.integrations.prometheus import EngineCollector
from kvpage.layout.config import ModelConfig
from kvpage.observe.events import EventConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams

B = 4
FREE = "tcp://127.0.0.1:*"
PARAMS = SamplingParams(max_tokens=10)
STEM = make_prompts([4 * B + 2], seed=3)[0]
PROMPTS = [STEM + tail for tail in make_prompts([1, 3, B + 1, 2 * B, 7, 2], seed=4)] + make_prompts([5 * B, B + 1, 2])


def make_engine(num_blocks: int = 14, num_host_blocks: int = 12, **options: object) -> Engine:
    config = CacheConfig(block_size=B, num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks)
    options = {"max_num_batched_tokens": 24, "load_or_compute": False, "pin_quota": 4, **options}
    return Engine.from_model(make_model("llama"), EngineConfig(config, **options))


class Subscriber:
    """A router on real sockets, which asks for everything from the first batch on."""

    def __init__(self, engine: Engine) -> None:
        self.context = zmq.Context()
        _, self.endpoint = engine.telemetry.event_endpoints
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.rcvtimeo = 20_000
        self.socket.connect(self.endpoint)
        self.router = MirrorRouter()

    def read(self, num_batches: int) -> None:
        """Asks until so many batches have come in all."""
        deadline = time.monotonic() + 120
        while self.router.last_seq + 1 < num_batches and time.monotonic() < deadline:
            self.socket.send_multipart([b"", (self.router.last_seq + 1).to_bytes(8, "big")])
            while (frames := self.socket.recv_multipart())[2] != b"\xff" * 8:
                self.router.take(int.from_bytes(frames[2], "big"), frames[3])
        assert self.router.last_seq + 1 == num_batches

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *error: object) -> None:
        self.context.destroy(linger=0)


@pytest.mark.parametrize("after_hits", [None, 1])
def test_a_router_knows_after_every_step_what_the_engine_holds(after_hits) -> None:
    engine = make_engine(events=EventConfig(FREE, FREE), host_policy=HostPolicy(after_hits))
    with Subscriber(engine) as subscriber:
        follow(engine, subscriber)
    engine.close()


@pytest.mark.parametrize("backend, kind", [("flash", "full_attention"), ("mla", "mla_attention")])
def test_stored_blocks_name_the_kind_of_their_cache(backend, kind) -> None:
    cache = CacheConfig(block_size=B, num_gpu_blocks=14, backend=backend)
    config = EngineConfig(cache, events=EventConfig(FREE, FREE))
    engine = Engine.from_model(make_latent_model("deepseek_v3"), config)
    stored = []
    stream_of(engine.telemetry).publisher.publish = lambda events: stored.extend(events) or True
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=2))
    assert stored and {event.kv_cache_spec_kind for event in stored} == {kind}
    engine.close()


def follow(engine: Engine, subscriber: Subscriber) -> None:
    stream, num_batches = stream_of(engine.telemetry), 0
    published = stream.publisher.publish

    def count(events) -> bool:
        nonlocal num_batches
        num_batches += 1
        return published(events)

    stream.publisher.publish = count
    subscriber.read(1)  # the first says that nothing is cached
    for round_ in range(3):
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, PARAMS, namespace=b"tenant" if i % 3 == 2 else b"")
        while engine.has_unfinished:
            engine.step()
            subscriber.read(num_batches + 1)
            tree, held = engine.manager.tree, subscriber.router.held
            assert (len(held["GPU"]), len(held["CPU"])) == (tree.num_cached, tree.num_host_cached)
        if round_ == 1:
            engine.manager.space.pin(STEM, ttl=100)
            engine.manager.space.drop(PROMPTS[6])
            engine.manager.tree.clear()
            assert engine.step() == []  # tells what has happened since
            subscriber.read(num_batches + 1)
            assert len(subscriber.router.held["GPU"]) == engine.manager.tree.num_cached
    space = engine.stats().blocks.space
    assert min(space.demoted_blocks, space.promoted_blocks, space.host_evicted_blocks, space.evicted_blocks) > 5, space
    held, num_found = subscriber.router.held, 0
    for i, prompt in enumerate(PROMPTS):
        namespace = b"tenant" if i % 3 == 2 else b""
        match = engine.manager.tree.match(prompt, namespace)
        hashes = expected_hashes(namespace, tuple(prompt[: match.num_tokens]), B)
        assert all(h in held["GPU"] for h in hashes[: match.num_device_blocks])
        assert all(h in held["CPU"] for h in hashes[match.num_device_blocks :])
        num_found += len(hashes)
        engine.manager.tree.release(match)
    assert num_found > 5


def test_what_a_step_that_raises_has_evicted_is_told() -> None:
    engine = make_engine(events=EventConfig(FREE, FREE), num_host_blocks=0)
    told: list = []
    stream_of(engine.telemetry).publisher.publish = lambda events: told.extend(events) or True
    engine.generate(PROMPTS[:2], PARAMS)
    num_told, num_cached = len(told), engine.manager.tree.num_cached
    engine.add_request(PROMPTS[7] * 6, PARAMS)
    forward = engine.debug.runner.forward
    engine.debug.runner.forward = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    removed = [block_hash for event in told[num_told:] for block_hash in event.block_hashes]
    assert len(removed) == num_cached - engine.manager.tree.num_cached > 0
    engine.debug.runner.forward = forward
    while engine.has_unfinished:
        engine.step()
    engine.close()


def test_closing_tells_what_is_left_and_the_engine_goes_on() -> None:
    engine = make_engine(events=EventConfig(FREE))
    told: list = []
    stream_of(engine.telemetry).publisher.publish = lambda events: told.append(events) or True
    engine.generate(PROMPTS[:2], PARAMS)
    num_told = len(told)
    engine.manager.tree.clear()
    engine.close()
    assert len(told) == num_told + 1 and engine.stats().num_lost_events == 0
    engine.close()
    engine.generate(PROMPTS[:1], PARAMS)
    assert len(told) == num_told + 1 and engine.manager.tree.num_cached > 0


def test_nothing_listens_or_records_unless_asked() -> None:
    engine = make_engine()
    assert engine.telemetry.event_endpoints is None
    assert not any(thread.name == "kvpage-events" for thread in threading.enumerate())
    with pytest.raises(ValueError, match="log_changes must be called"):
        engine.manager.tree.take_changes()
    stats = engine.stats()
    assert stats.residency is None and stats.num_lost_events is None
    engine.close()


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match="sample_rate must be in"):
        make_engine(residency_sample_rate=2.0)


def test_a_missing_extra_is_named(tmp_path) -> None:
    code = HIDE.format(hidden=["zmq", "prometheus_client"]) + (
        "from kvpage import BlockPool, PrefixTree\n"
        "from kvpage.observe.events import EventConfig\n"
        "from kvpage.observe.telemetry import Telemetry\n"
        "tree = PrefixTree(BlockPool(1), 1)\n"
        "prometheus = 'kvpage.integrations.prometheus'\n"
        "for make in (lambda: Telemetry(tree, EventConfig(), 0.0), lambda: __import__(prometheus)):\n"
        "    try:\n"
        "        make()\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout.splitlines() == [
        "events need the extra 'events': pip install 'kvpage[events]'",
        "metrics need the extra 'metrics': pip install 'kvpage[metrics]'",
    ], done.stderr


def test_a_process_that_does_not_close_ends_all_the_same(tmp_path) -> None:
    code = (
        "from kvpage import BlockPool, PrefixTree\n"
        "from kvpage.observe.events import EventConfig\n"
        "from kvpage.observe.telemetry import Telemetry\n"
        f"telemetry = Telemetry(PrefixTree(BlockPool(1), 1), EventConfig({FREE!r}, {FREE!r}), 0.0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


# --- numbers ---


def busy_engine() -> Engine:
    engine = make_engine(residency_sample_rate=1.0, host_policy=HostPolicy(1))
    for _ in range(2):
        engine.generate(PROMPTS, PARAMS)
    engine.manager.space.pin(STEM)
    engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    return engine


def test_stats_hold_together() -> None:
    engine = busy_engine()
    stats = engine.stats()
    space, tree = stats.blocks.space, engine.manager.tree
    assert stats.num_preemptions > 0 and stats.num_running == 1
    found = space.device_hit_tokens + space.host_hit_tokens + space.part_hit_tokens
    assert found + space.miss_tokens == space.query_tokens and space.host_hit_tokens > 0
    config = CacheConfig(block_size=B, num_gpu_blocks=14, num_cpu_blocks=12)
    model_config = ModelConfig.from_hf(engine.debug.runner.model.config, engine.debug.runner.model.dtype)
    block_bytes = CacheEngine.get_cache_block_size(config, model_config)
    for kind, transfer in stats.transfers.items():
        assert transfer.num_blocks > 0 and transfer.seconds > 0, kind
        assert transfer.num_bytes == transfer.num_blocks * block_bytes
    assert stats.transfers["swap_in"].num_blocks >= space.promoted_blocks > 0
    assert stats.transfers["swap_out"].num_blocks >= space.demoted_blocks + space.written_blocks > 0
    residency = stats.residency
    # A block that comes to the host and leaves it within one eviction is never copied, and no number of the space.
    assert residency["device"].lifetime.count == space.evicted_blocks > 0
    assert residency["host"].lifetime.count >= space.host_evicted_blocks > 0
    assert residency["device"].idle_time.count == space.evicted_blocks
    assert residency["device"].idle_time.total <= residency["device"].lifetime.total
    assert tree.num_host_cached == space.num_cached_host_blocks


def samples(engine: Engine, **labels: str) -> dict[tuple, float]:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, labels))
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_the_stats() -> None:
    engine = busy_engine()
    stats = engine.stats()
    space, blocks = stats.blocks.space, stats.blocks
    expected = {
        ("blocks", "tier=device state=used"): blocks.num_used_blocks,
        ("blocks", "tier=device state=evictable"): blocks.num_evictable_blocks,
        ("blocks", "tier=device state=free"): blocks.num_free_blocks,
        ("blocks", "tier=host state=used"): 12 - space.num_free_host_blocks - space.num_cached_host_blocks,
        ("blocks", "tier=host state=cached"): space.num_cached_host_blocks,
        ("blocks", "tier=host state=free"): space.num_free_host_blocks,
        ("pinned_blocks", ""): space.num_pinned_blocks,
        ("requests", "state=running"): 1,
        ("requests", "state=waiting"): 0,
        ("query_tokens_total", ""): space.query_tokens,
        ("hit_tokens_total", "tier=device"): space.device_hit_tokens,
        ("hit_tokens_total", "tier=host"): space.host_hit_tokens,
        ("hit_tokens_total", "tier=part"): space.part_hit_tokens,
        ("miss_tokens_total", ""): space.miss_tokens,
        ("refused_tokens_total", ""): space.refused_tokens,
        ("computed_tokens_total", ""): stats.num_computed_tokens,
        ("generated_tokens_total", ""): stats.num_generated_tokens,
        ("steps_total", ""): stats.num_steps,
        ("finished_requests_total", ""): stats.num_finished,
        ("preemptions_total", "kind=swap"): stats.num_swaps,
        ("preemptions_total", "kind=recompute"): stats.num_preemptions - stats.num_swaps,
        ("evicted_blocks_total", "tier=device"): space.evicted_blocks,
        ("evicted_blocks_total", "tier=host"): space.host_evicted_blocks,
        ("demoted_blocks_total", ""): space.demoted_blocks,
        ("written_blocks_total", ""): space.written_blocks,
        ("promoted_blocks_total", ""): space.promoted_blocks,
        ("sessions", "state=all"): 0,
        ("sessions", "state=paused"): 0,
        ("session_tokens", ""): 0,
        ("session_blocks", ""): 0,
        ("session_events_total", "kind=opened"): 0,
        ("session_events_total", "kind=restored"): 0,
        ("session_events_total", "kind=forgotten"): 0,
        ("session_refusals_total", ""): 0,
    }
    for kind, transfer in stats.transfers.items():
        expected["transfer_blocks_total", f"kind={kind}"] = transfer.num_blocks
        expected["transfer_bytes_total", f"kind={kind}"] = transfer.num_bytes
        expected["transfer_seconds_total", f"kind={kind}"] = transfer.seconds
    for tier, residency in stats.residency.items():
        for name, of in (("lifetime", residency.lifetime), ("idle", residency.idle_time)):
            expected[f"block_{name}_seconds_count", f"tier={tier}"] = of.count
            expected[f"block_{name}_seconds_sum", f"tier={tier}"] = of.total
            for i, bound in enumerate([*map(str, of.bounds), "+Inf"]):
                expected[f"block_{name}_seconds_bucket", f"le={bound} tier={tier}"] = sum(of.counts[: i + 1])
    labelled = {
        (f"kvpage_{name}", *sorted(tuple(pair.split("=")) for pair in f"model=m {labels}".split())): value
        for (name, labels), value in expected.items()
    }
    assert samples(engine, model="m") == labelled
    assert (
        sum(value for (name, labels), value in expected.items() if (name, labels[:11]) == ("blocks", "tier=device"))
        == 14
    )


def test_metrics_of_states_are_the_stats() -> None:
    config = EngineConfig(CacheConfig(B, 32), max_num_seqs=4)
    engine = Engine.from_model(make_state_model("lfm2"), config)
    assert not any("window" in key[0] for key in samples(engine))
    for _ in range(2):
        engine.generate([STEM], SamplingParams(max_tokens=2))
    engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    stats, found = engine.stats(), samples(engine)
    slots, num_blocks = stats.blocks.slots, engine.cache.num_gpu_blocks
    block_bytes = sum(layer.nbytes for layer in engine.cache.gpu_cache) // num_blocks
    assert stats.slot_bytes == engine.states.layout.slot_bytes + block_bytes
    numbers = {"used": 1, "checkpoint": slots.num_checkpoints, "free": slots.num_slots - slots.num_checkpoints - 1}
    for state, number in numbers.items():
        labels = (("state", state), ("tier", "device"))
        assert found[("kvpage_state_slots", *labels)] == number
        assert found[("kvpage_state_bytes", *labels)] == number * stats.slot_bytes
        assert found["kvpage_state_slots", ("state", state), ("tier", "host")] == 0
    for name in ("kept", "restored", "evicted", "demoted", "lost"):
        assert found["kvpage_checkpoints_total", ("event", name)] == getattr(slots, name)
    assert slots.kept >= 2 and slots.restored == 2


def test_metrics_of_windows_are_the_stats() -> None:
    config = EngineConfig(CacheConfig(B, 32), num_window_blocks=16, max_num_seqs=4)
    engine = Engine.from_model(make_model("gemma3"), config)
    assert not any("state_" in key[0] for key in samples(engine))
    engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    found, (window, *_) = samples(engine), engine.stats().windows
    size = ("window", str(window.num_tokens))
    assert window.num_used_blocks > 0
    for state in ("used", "evictable", "free"):
        assert found["kvpage_window_blocks", ("state", state), size] == getattr(window, f"num_{state}_blocks")
    assert found["kvpage_evicted_window_blocks_total", size] == window.evicted_blocks


def test_metrics_of_an_engine_with_events_count_losses() -> None:
    engine = make_engine(events=EventConfig(FREE))
    stream_of(engine.telemetry).publisher.num_lost = 3
    assert samples(engine)["kvpage_lost_event_batches_total",] == 3
    engine.close()


def test_metrics_of_blending_are_the_stats() -> None:
    assert not any("blend" in key[0] for key in samples(make_engine()))
    engine = make_engine(num_blocks=40, blend=BlendConfig(ratio=0.5, check_layer=1))
    first, second = make_prompts([6, 9], seed=31)
    engine.warm_segments([first, second])
    parts = [[3, 7], second, [5, 5, 5], first]
    tokens = [token for part in parts for token in part] + [1]
    engine.add_request(tokens, PARAMS, blend=True, segments=[len(part) for part in parts])
    while engine.has_unfinished:
        engine.step()
    expected = {
        ("blends_total", ""): 1,
        ("blend_tokens_total", "kind=reused"): 15 - 7,
        ("blend_tokens_total", "kind=recomputed"): 7,
        ("blend_lookup_tokens_total", "outcome=found"): 15,
        ("blend_lookup_tokens_total", "outcome=missing"): 15 + 2 + 3,  # they were looked up to be kept, too
        ("blend_kept_segments_total", ""): 3,  # and [3, 7], which nothing that was blended stands before
        ("blend_kept_tokens_total", ""): 15 + 2,
        ("blend_trouble_total", "kind=late"): 0,
        ("blend_trouble_total", "kind=error"): 0,
    }
    found = samples(engine)
    for (name, labels), value in expected.items():
        assert found[(f"kvpage_{name}", *(tuple(pair.split("=")) for pair in labels.split()))] == value, (name, labels)
    stats = engine.stats().blend
    assert (stats.num_blends, stats.num_kept_segments, stats.num_kept_tokens) == (1, 3, 17)


def test_the_global_registry_is_left_alone() -> None:
    EngineCollector(make_engine())
    assert not any(family.name.startswith("kvpage") for family in REGISTRY.collect())


def test_metrics_can_be_read_in_another_thread_while_the_engine_works() -> None:
    engine = make_engine(residency_sample_rate=0.5)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    is_done, errors, num_reads = threading.Event(), [], 0

    def read() -> None:
        nonlocal num_reads
        while not is_done.is_set():
            try:
                generate_latest(registry)
            except Exception as error:
                errors.append(error)
            num_reads += 1

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(3):
        handle = engine.manager.space.pin(PROMPTS[0])
        engine.generate(PROMPTS[:3], PARAMS)
        engine.manager.space.unpin(handle)
    is_done.set()
    thread.join()
    assert not errors and num_reads > 3
    assert isinstance(engine.manager.space.pins, UserPins)
