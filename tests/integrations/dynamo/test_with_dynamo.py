"""Workers behind ai-dynamo itself. `tests/integrations/run.sh dynamo` runs this; elsewhere it skips."""

import asyncio
import importlib.util
import inspect
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import httpx
import pytest
from integrations.dynamo.cluster import Cluster, Frontend
from support import fake_dynamo
from support.launched import Launched
from support.model_folder import make_model_folder
from support.prefix_trace import make_trace, oracle_found
from support.redis_server import RedisServer, needs_redis

if importlib.util.find_spec("dynamo") is None:
    pytest.skip("needs ai-dynamo: tests/integrations/run.sh dynamo", allow_module_level=True)
pytestmark = pytest.mark.routers
B = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with Launched(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(launched: Launched, model: Path) -> Cluster:
    made = Cluster(launched, model)
    for _ in range(2):
        made.start_worker()
    return made


@pytest.fixture(scope="module")
def by_prefix(cluster: Cluster) -> Frontend:
    frontend = cluster.start_frontend("--router-mode", "kv")
    frontend.wait(2)
    return frontend


def test_the_fakes_of_the_quick_tests_are_like_the_wheel(monkeypatch):
    from dynamo.common.backend.engine import LLMEngine

    from kvpage.integrations.dynamo import DynamoWorker

    for name, members in fake_dynamo.MODULES.items():
        module = importlib.import_module(name)
        for member in members:
            real = getattr(module, member.__name__)
            if is_dataclass(member) and member is not fake_dynamo.WorkerConfig:
                known = {field.name for field in fields(real)}
                assert {field.name for field in fields(member)} <= known, member.__name__
    ours = {name for name, member in inspect.getmembers(DynamoWorker) if not name.startswith("_")}
    theirs = {name for name, member in inspect.getmembers(LLMEngine) if not name.startswith("_")}
    assert LLMEngine.__abstractmethods__ <= ours
    assert ours - theirs == {"serve"}  # nothing that the runtime would not call


@pytest.mark.parametrize("salts", [(None,), ("a", "b", None)])
def test_prefixes_are_found_as_by_an_oracle_that_keeps_everything(cluster, by_prefix, salts):
    round_robin = cluster.start_frontend("--router-mode", "round-robin")
    round_robin.wait(2)
    asks = make_trace(B, salts=salts)
    num_tokens, most = sum(len(ask.tokens) for ask in asks), oracle_found(asks, B)
    found = {}
    for name, frontend in (("round robin", round_robin), ("by prefix", by_prefix)):
        cluster.forget()
        time.sleep(0.5)
        counts = frontend.found(asks)
        assert all(count <= limit for count, limit in zip(counts, most, strict=True))
        found[name] = sum(counts)
    shares = {name: f"{count / num_tokens:.1%}" for name, count in {**found, "oracle": sum(most)}.items()}
    print(f"\nfound of {num_tokens} prompt tokens, {salts=}: {shares}")
    assert found["by prefix"] == sum(most) > found["round robin"]


def test_answers(by_prefix):
    done = by_prefix.complete([5, 6, 7], max_tokens=4, logprobs=2, ignore_eos=True)
    choice = done.json()["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["logprobs"]["token_logprobs"]) == 4
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    form = by_prefix.complete([5, 6, 7], max_tokens=8, guided_choice=["yes", "no"]).json()["choices"][0]
    assert form["text"] in ("yes", "no") and form["finish_reason"] == "stop"
    messages = [{"role": "user", "content": "the quick brown fox"}]
    chat = by_prefix.chat(messages=messages, max_tokens=5, temperature=0.0)
    assert chat.json()["usage"]["completion_tokens"] <= 5
    text = by_prefix.complete([5, 6, 7], max_tokens=40, ignore_eos=True).json()["choices"][0]["text"]
    stop = text[10:12]
    stopped = by_prefix.complete([5, 6, 7], max_tokens=40, stop=[stop]).json()["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["text"] == text[: text.index(stop)]


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 90_000}, {"tokens": [1] * 5000}, {"tokens": [100_000]}, {"temperature": 1.0, "n": 2}],
)
def test_bad_requests_get_a_client_error(by_prefix, wrong):
    done = by_prefix.complete(**{"tokens": [5, 6, 7], **wrong})
    assert 400 <= done.status_code < 500, done.text
    assert by_prefix.complete([5, 6, 7]).status_code == 200


def test_a_client_that_goes_ends_its_request(cluster, by_prefix, launched):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{by_prefix.url}/v1/completions",
            json={"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True},
            timeout=0.5,
        )
    launched.wait_for(
        lambda: all(worker.num_running == 0 for worker in cluster.workers),
        "the end of the request",
    )


PROMPTS = [[10 + random.Random(i).randrange(280) for _ in range(20 + i)] for i in range(24)]


def test_requests_of_a_killed_worker_go_on_at_another(launched, model):
    cluster = Cluster(launched, model, "killed")
    first, second = cluster.start_worker(), cluster.start_worker()
    frontend = cluster.start_frontend("--router-mode", "kv", "--migration-limit", "3")
    frontend.wait(2)
    whole = asyncio.run(frontend.streams(PROMPTS, 150, ignore_eos=True))
    assert all(isinstance(text, str) for text in whole)
    cluster.forget()

    async def kill() -> list[str | int]:
        under_way = asyncio.create_task(frontend.streams(PROMPTS, 150, ignore_eos=True))
        while not (first.num_running > 3 and second.num_running > 3):
            await asyncio.sleep(0.01)
        first.process.send_signal(signal.SIGKILL)
        return await under_way

    begin = time.monotonic()
    texts = asyncio.run(kill())
    num_whole = sum(text == expected for text, expected in zip(texts, whole, strict=True))
    seconds = time.monotonic() - begin
    print(f"\nkilled under load, migration_limit 3: {num_whole} of {len(texts)} whole and equal, {seconds:.1f} s")
    assert num_whole == len(texts)


def test_requests_of_a_killed_worker_fail_cleanly_without_migrations(launched, model):
    cluster = Cluster(launched, model, "failed")
    first, second = cluster.start_worker(), cluster.start_worker()
    frontend = cluster.start_frontend("--router-mode", "kv", "--migration-limit", "0")
    frontend.wait(2)

    async def kill() -> list[str | int]:
        under_way = asyncio.create_task(frontend.streams(PROMPTS, 150, ignore_eos=True))
        while not (first.num_running > 3 and second.num_running > 3):
            await asyncio.sleep(0.01)
        first.process.send_signal(signal.SIGKILL)
        return await under_way

    texts = asyncio.run(kill())
    num_failed = sum(not isinstance(text, str) for text in texts)
    print(f"\nkilled under load, migration_limit 0: {num_failed} of {len(texts)} failed, none hung")
    assert 0 < num_failed < len(texts)
    assert frontend.complete([5, 6, 7]).status_code == 200


def test_a_worker_that_ends_gives_its_requests_to_another(launched, model):
    cluster = Cluster(launched, model, "ended")
    first, _ = cluster.start_worker("--drain-timeout", "0.5"), cluster.start_worker("--drain-timeout", "0.5")
    frontend = cluster.start_frontend("--router-mode", "round-robin", "--migration-limit", "3")
    frontend.wait(2)

    async def end() -> list[str | int]:
        under_way = asyncio.create_task(frontend.streams(PROMPTS, 600, ignore_eos=True))
        while not first.num_running > 3:
            await asyncio.sleep(0.01)
        first.process.send_signal(signal.SIGTERM)
        return await under_way

    texts = asyncio.run(end())
    assert all(isinstance(text, str) for text in texts)
    assert first.process.wait(30) == 0


@needs_redis
@pytest.mark.parametrize("layers", [(), ("--layers-per-record", "1")])
def test_prefill_and_decode_apart_over_a_store(launched, model, tmp_path, layers):
    redis = RedisServer(tmp_path)
    store = ("--store", f"redis://127.0.0.1:{redis.port}/0", *layers)
    name = "whole" if not layers else "layers"  # workers of the test before may live on
    cluster, single = Cluster(launched, model, f"apart-{name}"), Cluster(launched, model, f"single-{name}")
    prefill = cluster.start_worker(*store, "--disaggregation-mode", "prefill")
    decode = cluster.start_worker(*store, "--disaggregation-mode", "decode")
    single.start_worker()
    apart = cluster.start_frontend("--router-mode", "kv", "--enforce-disagg")
    alone = single.start_frontend("--router-mode", "kv")
    apart.wait(2)
    alone.wait(1)
    prompts = [[10 + random.Random(i).randrange(280) for _ in range(40 * i + 130)] for i in range(6)]
    for tokens in prompts:
        answers = [one.complete(tokens, max_tokens=12, ignore_eos=True).json() for one in (apart, alone)]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    num_loaded = decode.metric("kvpage_store_tokens_total", kind="loaded")
    print(f"\ndecode worker loaded {num_loaded:.0f} of {sum(map(len, prompts))} tokens")
    assert num_loaded >= sum(len(tokens) // 64 * 64 for tokens in prompts)
    assert prefill.metric("kvpage_generated_tokens_total") >= len(prompts)
