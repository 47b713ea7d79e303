"""A cluster of Dynamo on this machine: frontends, workers, discovery by files, events by ZeroMQ; no etcd, no NATS."""

import asyncio
import json
import random
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families
from support.launched import Launched, answer
from support.ports import free_port
from support.prefix_trace import Ask

PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


class Worker(NamedTuple):
    """A worker's process, and the port of its numbers and controls."""

    process: subprocess.Popen[bytes]
    port: int

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric; -1 if it is not there yet."""
        families = text_string_to_metric_families(answer(f"http://127.0.0.1:{self.port}/metrics"))
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return next((one.value for one in samples if labels.items() <= one.labels.items()), -1.0)

    @property
    def num_running(self) -> float:
        """Requests that it computes now."""
        return self.metric("kvpage_requests", state="running")

    def forget(self) -> None:
        """Empty its cache."""
        done = httpx.post(f"http://127.0.0.1:{self.port}/engine/control/clear_kv_blocks", json={}, timeout=30)
        assert done.json() == {"status": "ok"}


def low_port() -> int:
    """Return a free port that fits into 15 bits: Dynamo reads that of its numbers so."""
    while True:
        port = random.randrange(20_000, 2**15)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) != 0:
                return port


class Cluster:
    """Workers and frontends that find each other by the files of one folder."""

    def __init__(self, launched: Launched, model: Path, name: str = "cluster") -> None:
        self._launched, self._model, self._name = launched, model, name
        self._environment = {"DYN_FILE_KV": str(launched.folder / name), "DYN_LOG": "warn", "OMP_NUM_THREADS": "1"}
        self.workers: list[Worker] = []

    def start_worker(self, *options: str) -> Worker:
        """Start a worker; it answers later."""
        port = low_port()
        words = ["python", "-m", "kvpage.integrations.dynamo", "--model", str(self._model), *PLANES, *options]
        name = f"{self._name}-worker-{len(self.workers)}"
        worker = Worker(self._launched.start(name, words, DYN_SYSTEM_PORT=str(port), **self._environment), port)
        self.workers.append(worker)
        return worker

    def start_frontend(self, *options: str) -> "Frontend":
        """Start a frontend; it answers later."""
        port = free_port()
        words = ["python", "-m", "dynamo.frontend", "--http-port", str(port), *PLANES, *options]
        self._launched.start(f"{self._name}-frontend-{port}", words, **self._environment)
        return Frontend(port, self._launched, self)

    def forget(self) -> None:
        """Empty the caches of all workers."""
        for worker in self.workers:
            worker.forget()


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects of a stream; {} for an error. Lines of events end with a line feed and nothing else."""
    left = b""
    async for more in response.aiter_bytes():
        *lines, left = (left + more).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"event: error"):
                yield {}


class Frontend:
    """What clients talk to."""

    def __init__(self, port: int, launched: Launched, cluster: Cluster) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._launched, self._cluster = launched, cluster

    def wait(self, num_workers: int) -> None:
        """Wait until it sends requests to so many workers."""
        self._launched.wait_for(lambda: "tiny" in answer(f"{self.url}/v1/models"), "the model")
        seen: set[Any] = set()

        def sees_all() -> bool:
            done = self.complete([7] * 3, max_tokens=1, nvext={"extra_fields": ["worker_id"]}, seed=len(seen))
            if done.status_code == 200:
                seen.add(json.dumps(done.json().get("nvext")))
            return (
                sum(worker.metric("kvpage_generated_tokens_total") >= 0 for worker in self._cluster.workers)
                >= num_workers
            )

        self._launched.wait_for(sees_all, f"{num_workers} workers")
        time.sleep(1)  # the router reads what workers tell of themselves in its own time

    def complete(self, tokens: Any, max_tokens: int = 8, **fields: Any) -> httpx.Response:
        """Ask for a completion."""
        body = {"model": "tiny", "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0.0, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def chat(self, **fields: Any) -> httpx.Response:
        """Ask for a chat's next message."""
        return httpx.post(f"{self.url}/v1/chat/completions", json={"model": "tiny", **fields}, timeout=60)

    def found(self, asks: list[Ask]) -> list[int]:
        """Ask one after the other; return how many tokens of each prompt were cached."""
        counts = []
        for ask in asks:
            salt = {} if ask.salt is None else {"nvext": {"cache_salt": ask.salt}}
            done = self.complete(ask.tokens, max_tokens=1, ignore_eos=True, **salt)
            assert done.status_code == 200, done.text
            counts.append(done.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            time.sleep(0.03)  # events pass through the worker and the router
        return counts

    async def stream(self, client: httpx.AsyncClient, tokens: Any, max_tokens: int, **fields: Any) -> str | int:
        """Return the text of a streamed completion; the status, or -1, where it is no whole answer."""
        body = {"model": "tiny", "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        text, is_whole = "", False
        try:
            async with client.stream("POST", f"{self.url}/v1/completions", json={**body, **fields}) as response:
                if response.status_code != 200:
                    return response.status_code
                async for event in events(response):
                    if "choices" not in event:
                        return -1
                    text += "".join(choice["text"] for choice in event["choices"])
                    is_whole |= any(choice.get("finish_reason") for choice in event["choices"])
        except httpx.HTTPError:
            return -1
        return text if is_whole else -1

    async def streams(self, prompts: list[Any], max_tokens: int, **fields: Any) -> list[str | int]:
        """Stream all at once. TimeoutError if one hangs."""
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=100)) as client:
            several = [self.stream(client, tokens, max_tokens, **fields) for tokens in prompts]
            return list(await asyncio.wait_for(asyncio.gather(*several), 120))
