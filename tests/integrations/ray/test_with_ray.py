"""The application on a cluster of Ray's own: a head and two worker nodes on this machine, a tiny random model.

`pip install "kvpage[ray,test]"` installs Ray. This takes some minutes, most of them for Ray's processes.
"""

import asyncio
import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers as tf

pytest.importorskip("ray.serve")

from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from support.models import generate_each, make_model
from support.ray_cluster import RayCluster, save_model
from support.redis_server import RedisServer, needs_redis

from kvpage.integrations.ray import AppSettings, app, build_app
from kvpage.integrations.ray.application import deploy_replicas
from kvpage.integrations.ray.gateway import ServeWorkers, skeleton_of
from kvpage.integrations.remote import RemoteEngine, RemoteLoop, RemoteSettings
from kvpage.serving import AsyncEngine, Engine, SamplingParams

pytestmark = pytest.mark.routers
B, C = 4, 16
PARAMS = SamplingParams(max_tokens=4)
BASE = {"num_cpus": 0.5, "block_size": B, "num_gpu_blocks": 2048, "chunk_size": C, "digest_period": 0.5,
        "num_replicas": 2, "max_num_batched_tokens": 64, "min_prefill_tokens": 2 * C, "drain_timeout": 300,
        "imbalance": 2}  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    made = RayCluster(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield f"redis://127.0.0.1:{server.port}/0"
    server.kill()


def tokens_of(model: Path, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """The tokens of an Engine in this process, one prompt after the other."""
    made = tf.AutoModelForCausalLM.from_pretrained(model).eval()
    engine = Engine.from_model(made, AppSettings(model=str(model), **BASE).engine_config("both"))
    return [engine.generate([prompt], SamplingParams(max_tokens=num_tokens))[0].token_ids for prompt in prompts]


class Client:
    """Replicas without the API, and an AsyncEngine over them."""

    def __init__(self, settings: AppSettings) -> None:
        self.settings, self.name = settings, f"app-{random.randrange(10**9)}"
        self.handle = self.deploy(settings)
        loop = RemoteLoop(ServeWorkers(self.handle), None, RemoteSettings(max_tries=5))
        self.remote = RemoteEngine(skeleton_of(settings), settings.engine_config("both"), loop)
        self.engine = AsyncEngine(self.remote)

    def deploy(self, settings: AppSettings):
        target = deploy_replicas(settings, "kvpage", "both").bind(settings.model_dump())
        return serve.run(target, name=self.name, route_prefix=None)

    def stats(self) -> list:
        return asyncio.run(self.handle.broadcast("stats").results_async())

    def pids(self) -> list[int]:
        return pids_of(f"ray::ServeReplica:{self.name}:")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()
        serve.delete(self.name)


def pids_of(title: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_text().startswith(title):
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


def conversations(num: int, num_turns: int, seed: int) -> list[list[int]]:
    """Prompts of some conversations, mixed: each turn's prompt begins with the one before it."""
    draw = random.Random(seed)
    system = [draw.randrange(1, 190) for _ in range(6 * B)]
    states = [[*system, *(draw.randrange(1, 190) for _ in range(5 * B))] for _ in range(num)]
    prompts = []
    for _ in range(num_turns):
        order = list(range(num))
        draw.shuffle(order)
        for i in order:
            prompts.append(list(states[i]))
            states[i] += [draw.randrange(1, 190) for _ in range(2 * B + draw.randrange(B))]
    return prompts


def most_found(prompts: Sequence[Sequence[int]], replica_of: Sequence[int]) -> int:
    """The most tokens that these replicas could have cached, each prompt sent to its own: the oracle."""
    found = 0
    for number, prompt in enumerate(prompts):
        earlier = [p for p, r in zip(prompts[:number], replica_of, strict=False) if r == replica_of[number]]
        longest = max((len(os.path.commonprefix([p, prompt])) for p in earlier), default=0)
        found += min(longest, len(prompt) - 1)
    return found


def test_arguments_of_the_command_line_make_an_application(model) -> None:
    args = {"model": str(model), "num_replicas": "2", "store": "redis://a:1/0 memory://?size=1MiB"}
    assert isinstance(call_user_app_builder_with_args_if_necessary(app, args), serve.Application)


def test_tokens_hits_a_killed_replica_and_one_that_drains(cluster, model) -> None:
    settings = AppSettings(model=str(model), **BASE)
    prompts = conversations(num=8, num_turns=5, seed=1)
    with Client(settings) as client:
        outputs = [asyncio.run(client.engine.generate(prompt, PARAMS)) for prompt in prompts]
        assert [output.token_ids for output in outputs] == tokens_of(model, prompts, 4)
        assert [output.token_ids for output in outputs[:8]] == generate_each(make_model("llama"), prompts[:8], 4)
        found = sum(output.num_cached_tokens for output in outputs)
        best, alternating = most_found(prompts, [0] * len(prompts)), most_found(prompts, [i % 2 for i in range(40)])
        loads = [stats.num_prompt_tokens for stats in client.stats()]
        total = sum(map(len, prompts))
        print(f"\nfound {found} of {total} tokens; one replica of all {best}; round robin {alternating}; loads {loads}")
        assert found >= 0.95 * best > alternating

        # one of the same prefix, many at once: load is balanced
        burst = [[*prompts[0], 150 + i] for i in range(30)]
        before = client.stats()
        requests = [client.engine.submit(prompt, SamplingParams(max_tokens=40)) for prompt in burst]
        for request in requests:
            list(request)
        loads = sorted(b.num_finished - a.num_finished for a, b in zip(before, client.stats(), strict=True))
        print(f"a burst of 30 with one prefix went to both: {loads}")
        assert loads[0] >= 8

        # killed
        long = SamplingParams(max_tokens=600)
        alone = tokens_of(model, prompts[3:12], 600)
        requests = [client.engine.submit(prompts[3], long) for _ in range(4)]
        requests += [client.engine.submit(prompt, long) for prompt in prompts[4:12]]
        loop = client.remote.loop
        wait_until(lambda: len(loop.requests) == 12 and loop.num_waiting == 0)  # all have their first tokens
        os.kill(client.pids()[0], signal.SIGKILL)
        for request in requests:
            list(request)
        assert [request.output.error for request in requests] == [None] * 12
        assert [request.output.token_ids for request in requests] == [alone[0]] * 4 + alone[1:9]
        print(f"a replica was killed: {client.remote.loop.num_retries} of 12 requests began anew, none was lost")
        assert client.remote.loop.num_retries >= 3
        wait_until(lambda: len(client.stats()) == 2)

        # scaled down while requests run
        num_retries = loop.num_retries
        very_long = SamplingParams(max_tokens=900)
        requests = [client.engine.submit([*prompts[i], 7], very_long) for i in range(12)]
        wait_until(lambda: len(loop.requests) == 12 and loop.num_waiting == 0)
        fewer = threading.Thread(target=client.deploy, args=[settings.model_copy(update={"num_replicas": 1})])
        fewer.start()
        wait_until(lambda: len(client.stats()) == 1)  # of those that still take requests
        (staying,) = client.stats()
        draining = sum(request.output is None for request in requests) - staying.num_running - staying.num_waiting
        print(f"scaled down: the replica that goes had {draining} requests")
        for request in requests:
            list(request)
        fewer.join()
        assert draining >= 1 and [request.output.finish_reason for request in requests] == ["length"] * 12
        assert loop.num_retries == num_retries
        wait_until(lambda: len(client.pids()) == 1)


def test_replicas_come_with_load_and_go_without_a_loss(cluster, model) -> None:
    scaling = {"max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay": 1, "downscale_delay": 2}
    settings = AppSettings(model=str(model), **{**BASE, "num_replicas": 1, **scaling})
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    with Client(settings) as client:
        prompts = iter(conversations(num=2000, num_turns=1, seed=3))
        requests = []

        def load(num: int) -> None:
            """Keep so many requests under way."""
            running = sum(request.output is None for request in requests)
            requests.extend(client.engine.submit(next(prompts), long) for _ in range(num - running))

        wait_until(lambda: load(8) or len(client.pids()) == 2)
        print(f"\na second replica came after {len(requests)} requests")
        wait_until(lambda: load(1) or len(client.pids()) == 1, seconds=150)
        print(f"it was gone after {len(requests)}")
        for request in requests:
            list(request)
        assert {request.output.finish_reason for request in requests} == {"length"}
        assert client.remote.loop.num_retries == 0


def test_serves_own_router_finds_less(cluster, model) -> None:
    prompts = conversations(num=8, num_turns=5, seed=1)
    with Client(AppSettings(model=str(model), router="power_of_two", **BASE)) as client:
        outputs = [asyncio.run(client.engine.generate(prompt, PARAMS)) for prompt in prompts]
    found, best = sum(output.num_cached_tokens for output in outputs), most_found(prompts, [0] * len(prompts))
    print(f"\nServe's own router found {found} of {best}")
    assert found < 0.95 * best


def wait_until(holds, seconds: int = 60) -> None:
    for _ in range(10 * seconds):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it did not become true")


# --- the API, prefill and decode apart, a shared store ---------------------------------------------------------------


def ask(port: int, path: str, body: dict | None = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def complete(port: int, prompt: list[int], **fields: object) -> tuple[list[int], int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **fields}
    status, answer = ask(port, "/v1/completions", body)
    assert status == 200, answer
    found = json.loads(answer)
    return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@needs_redis
@pytest.mark.parametrize("layers_per_record", [None, 1])
def test_the_api_with_prefill_and_decode_apart(cluster, model, redis, layers_per_record: int | None) -> None:
    prompts = conversations(num=4, num_turns=2, seed=2)
    expected = tokens_of(model, prompts, 12)
    fields = {**BASE, "num_replicas": 1, "num_prefill_replicas": 1, "served_model_name": "tiny", "store": redis}
    fields["layers_per_record"] = layers_per_record
    target = build_app(model=str(model), **fields)
    serve.run(target, name="apart")
    port = cluster.port
    assert ask(port, "/health")[0] == 200
    assert json.loads(ask(port, "/v1/models")[1])["data"][0]["id"] == "tiny"
    answers = [complete(port, prompt) for prompt in prompts]
    assert [tokens for tokens, _ in answers] == expected
    assert all(cached >= (len(prompt) - 1) // B * B for prompt, (_, cached) in zip(prompts, answers, strict=True))

    status, events = ask(port, "/v1/completions", {"model": "tiny", "prompt": prompts[0], "max_tokens": 12,
                         "temperature": 0, "stream": True, "return_token_ids": True})  # fmt: skip
    lines = [line[6:] for line in events.decode().splitlines() if line.startswith("data: ")]
    assert status == 200 and lines[-1] == "[DONE]"
    pieces = [json.loads(line)["choices"] for line in lines[:-1]]
    assert [t for choices in pieces for one in choices for t in one.get("token_ids") or []] == expected[0]

    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 3}
    assert ask(port, "/v1/chat/completions", chat)[0] == 200
    assert ask(port, "/v1/completions", {"model": "other", "prompt": [1]})[0] == 404
    assert ask(port, "/v1/completions", {"model": "tiny", "prompt": [1], "temperature": "hot"})[0] == 400
    wait_until(lambda: b"vllm:prefix_cache_hits_total{" in ask(port, "/metrics")[1])

    for pid in pids_of("ray::ServeReplica:apart:kvpage-prefill"):
        os.kill(pid, signal.SIGKILL)
    (prompt,) = conversations(num=1, num_turns=1, seed=9)
    (alone,) = tokens_of(model, [prompt], 12)
    assert complete(port, prompt)[0] == alone  # whoever computes it
    serve.delete("apart")

    # other processes find what these have computed
    fields |= {"num_prefill_replicas": 0}
    serve.run(build_app(model=str(model), **fields), name="after")
    tokens, cached = complete(port, prompts[-1])
    assert tokens == expected[-1] and cached >= len(prompts[-1]) // C * C - C
    print(f"\na new replica found {cached} of {len(prompts[-1])} tokens in Redis")
    serve.delete("after")
