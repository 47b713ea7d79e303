"""Two `kvpage serve` behind vllm-router. `tests/integrations/run.sh vllm_router` runs this; elsewhere it skips."""

import importlib.util
import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.launched import Launched, answer
from support.model_folder import make_model_folder
from support.ports import free_port
from support.prefix_trace import Ask, make_trace, oracle_found

if importlib.util.find_spec("vllm_router") is None:
    pytest.skip("needs vllm-router: tests/integrations/run.sh vllm_router", allow_module_level=True)
pytestmark = pytest.mark.routers
B = 16


class Server:
    """A `kvpage serve`, where it publishes events, and its process."""

    def __init__(self, launched: Launched, model: Path, name: str) -> None:
        port, self.events, self.replay = free_port(), *(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.url = f"http://127.0.0.1:{port}"
        words = ["python", "-m", "kvpage", "serve", str(model), "--port", str(port), "--served-model-name", "tiny"]
        words += ["--block-size", str(B), "--num-gpu-blocks", "1024"]
        words += ["--events", self.events, "--events-replay", self.replay]
        self.process = launched.start(name, words, OMP_NUM_THREADS="1")

    def is_up(self) -> bool:
        return "tiny" in answer(f"{self.url}/v1/models")


def complete(url: str, prompt: Any, max_tokens: int = 1, **fields: Any) -> dict[str, Any]:
    """Ask for a completion."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    done = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert done.status_code == 200, done.text
    answered: dict[str, Any] = done.json()
    return answered


def num_cached(answered: dict[str, Any]) -> int:
    return int(answered["usage"]["prompt_tokens_details"]["cached_tokens"])


def streamed(url: str, prompt: list[int], max_tokens: int) -> str:
    """Return the text of a streamed completion."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        lines = b"".join(response.iter_bytes()).split(b"\n")
    for line in lines:
        if line.startswith(b"data: {"):
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert lines[-3:] == [b"data: [DONE]", b"", b""]
    return text


class Fleet:
    """Two servers, and routers before them."""

    def __init__(self, launched: Launched, model: Path, name: str) -> None:
        self._launched, self._name = launched, name
        self.servers = [Server(launched, model, f"{name}-server-{i}") for i in range(2)]
        for server in self.servers:
            launched.wait_for(server.is_up, "a server")

    def start_router(self, policy: str) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a router; return its URL and its process."""
        port, metrics = free_port(), free_port()
        words = ["vllm-router", "--port", str(port), "--prometheus-port", str(metrics), "--policy", policy]
        words += ["--worker-urls", *(server.url for server in self.servers)]
        if policy == "kv_aware":
            for server in self.servers:
                words += ["--kv-event-source", f"{server.url}={server.events}"]
                words += ["--kv-event-replay-source", f"{server.url}={server.replay}"]
            words += ["--kv-event-block-size", str(B), "--kv-event-model", "tiny"]
        process = self._launched.start(f"{self._name}-router-{policy}-{port}", words)
        url = f"http://127.0.0.1:{port}"
        self._launched.wait_for(lambda: "tiny" in answer(f"{url}/v1/models"), "the router")
        time.sleep(1)  # it subscribes to events in its own time
        return url, process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with Launched(tmp_path_factory.mktemp("fleet")) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(launched: Launched, model: Path) -> Fleet:
    return Fleet(launched, model, "fleet")


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> str:
    return fleet.start_router("kv_aware")[0]


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 300) for _ in range(count)]


def found(url: str, asks: list[Ask]) -> int:
    """Ask one after the other; return how many tokens of the prompts were cached."""
    count = 0
    for ask in asks:
        count += num_cached(complete(url, list(ask.tokens)))
        time.sleep(0.05)  # events pass to the router
    return count


def test_prefixes_that_were_warmed_without_the_router_are_found(fleet, router):
    prefixes = [tokens_of(seed, (2 + seed % 5) * B) for seed in range(8)]
    for seed, prefix in enumerate(prefixes):
        complete(fleet.servers[random.Random(seed).randrange(2)].url, prefix)
    time.sleep(0.5)
    counts = [num_cached(complete(router, [*prefix, *tokens_of(100, 9)])) for prefix in prefixes]
    print(f"\nwarmed without the router, found by it: {sum(map(bool, counts))} of {len(prefixes)} prefixes")
    assert counts == [len(prefix) for prefix in prefixes]


def test_prefixes_are_found_as_by_an_oracle_that_keeps_everything(fleet, router):
    round_robin, _ = fleet.start_router("round_robin")
    asks = make_trace(B)
    num_tokens, most = sum(len(ask.tokens) for ask in asks), sum(oracle_found(asks, B))
    counts = {"round robin": found(round_robin, asks), "oracle": most}
    others = [Ask(tuple(token + 1 for token in ask.tokens), None) for ask in asks]  # no server knows these
    counts["by prefix"] = found(router, others)
    shares = {name: f"{count / num_tokens:.1%}" for name, count in counts.items()}
    print(f"\nfound of {num_tokens} prompt tokens: {shares}")
    assert counts["by prefix"] == most > counts["round robin"]


def test_answers_are_those_of_a_server(fleet, router):
    for number in range(4):
        prompt = tokens_of(1000 + number, 40)
        (text,) = {complete(url, prompt, 12)["choices"][0]["text"] for url in (router, *(s.url for s in fleet.servers))}
        assert text == streamed(router, prompt, 12)


def test_a_server_that_was_killed_is_left_out(launched, model):
    fleet = Fleet(launched, model, "killed")
    router, _ = fleet.start_router("kv_aware")
    prompts = [tokens_of(2000 + number, 50) for number in range(8)]
    texts = [complete(router, prompt, 6)["choices"][0]["text"] for prompt in prompts]
    fleet.servers[0].process.send_signal(signal.SIGKILL)
    fleet.servers[0].process.wait(30)
    assert [complete(router, prompt, 6)["choices"][0]["text"] for prompt in prompts] == texts
