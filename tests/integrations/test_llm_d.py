"""A server has what llm-d's router asks of it, by name; and the page's manifests are right."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import yaml
import zmq
from prometheus_client.parser import text_string_to_metric_families
from support.ports import free_port
from support.server_app import NAME, Server, running_server
from typer.testing import CliRunner

from kvpage.observe.events import EventConfig
from kvpage.server.command.loading import event_config
from kvpage.server.command.options import ServeOptions
from kvpage.tools.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "llm_d.md"
POD = "10.0.0.7"
FIELDS = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "group_idx", "kv_cache_spec_kind"}
GAUGES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def manifests() -> tuple[dict, dict]:
    deployment, router = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S))
    return deployment, router["router"]


def options_of(deployment: dict, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServeOptions:
    """Return the options that the command line reads of the container's arguments."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["kvpage", "serve"]
    words = [word.replace("/models/my-model", str(folder)).replace("$(POD_IP)", POD) for word in container["args"]]
    taken: list[ServeOptions] = []
    monkeypatch.setattr("kvpage.server.command.serve.serve", taken.append)
    done = CliRunner().invoke(app, ["serve", *words])
    assert done.exit_code == 0, done.output
    return taken[0]


def test_the_manifests_fit_the_command_and_each_other(manifests, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({}))
    deployment, router = manifests
    options = options_of(deployment, tmp_path, monkeypatch)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    plugins = yaml.safe_load(router["epp"]["pluginsCustomConfig"][router["epp"]["pluginsConfigFile"]])
    parameters = {plugin["type"]: plugin.get("parameters") for plugin in plugins["plugins"]}
    producer = parameters["precise-prefix-cache-producer"]
    assert producer["tokenProcessorConfig"]["blockSizeTokens"] == options.block_size
    assert producer["kvEventsConfig"]["podDiscoveryConfig"]["socketPort"] == ports["kv-events"]
    config = event_config(options)
    assert config.endpoint == f"tcp://*:{ports['kv-events']}"
    assert config.topic == f"kv@{POD}:{ports['http']}@{options.names[0]}"
    assert config.topic.startswith(producer["kvEventsConfig"]["topicFilter"])
    assert parameters["token-producer"]["modelName"] == options.names[0]
    assert router["modelServers"]["targetPorts"] == [{"number": options.port}] == [{"number": ports["http"]}]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert router["modelServers"]["matchLabels"].items() <= labels.items()
    assert options.drain_timeout < deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    named = {plugin["pluginRef"] for profile in plugins["schedulingProfiles"] for plugin in profile["plugins"]}
    assert named <= parameters.keys()


def test_a_topic_needs_events(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--events-topic needs --events"):
        ServeOptions(tmp_path, events_topic="kv@")


def messages(router: zmq.Socket, server: Server, body: dict) -> Iterator[list[bytes]]:
    """Yield messages of the server, which computes the same prompt again and again from an empty cache."""
    for _ in range(50):  # what was sent before the subscription had come is lost
        assert asyncio.run(server.post("/v1/completions", body)).status_code == 200
        while router.poll(100):
            yield router.recv_multipart()
        server.live.call(lambda engine: engine.reset_prefix_cache()).result()


def stored_in(payload: bytes) -> list[dict]:
    """Return the blocks of a batch that were stored."""
    return [event for event in msgpack.unpackb(payload)[1] if event["type"] == "BlockStored"]


def test_metrics_health_and_events_by_name():
    topic, endpoint = f"kv@{POD}:8000@{NAME}", f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.subscribe("kv@")
        router.connect(endpoint)
        with running_server(events=EventConfig(endpoint, topic=topic)) as server:
            body = {"model": NAME, "prompt": list(range(10, 30)), "max_tokens": 2}
            frames = next(sent for sent in messages(router, server, body) if stored_in(sent[2]))
            text, health = (asyncio.run(server.get(path)) for path in ("/metrics", "/health"))
    assert health.status_code == 200
    families = {family.name: family for family in text_string_to_metric_families(text.text)}
    for name in GAUGES:
        (sample,) = families[name].samples
        assert families[name].type == "gauge" and sample.labels["model_name"] == NAME and sample.value >= 0
    (info,) = families["vllm:cache_config_info"].samples
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("4", "256")
    assert frames[0].decode() == topic and len(frames[1]) == 8
    assert msgpack.unpackb(frames[2])[2] == 0
    stored = stored_in(frames[2])
    assert all(event.keys() >= FIELDS for event in stored)
    assert stored[0]["block_size"] == 4 and stored[0]["token_ids"][:4] == [10, 11, 12, 13]
