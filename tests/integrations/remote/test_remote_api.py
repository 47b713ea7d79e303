"""The API and the page over a RemoteEngine: what a gateway shows, and what it passes on to its workers."""

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from server.test_access import hints
from server.test_page import first_picture
from support.models import make_model
from support.server_app import NAME, Server, make_engine, make_tokenizer
from support.waiting import until

from kvpage.integrations.remote import GenerateCall, RemoteEngine, RemoteLoop, RemoteSettings, Worker
from kvpage.server import ServerConfig, create_app
from kvpage.serving import AsyncEngine, Guide, SamplingParams

PATH = "/v1/completions"


class Workers:
    """One worker, which may be held up, and may hold itself up once it has given tokens."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.calls, self.held = worker, [], threading.Event()
        self.held.set()
        self.stops_after_tokens = False

    async def stream(self, call):
        self.calls.append(call)
        await self._go()
        async for items in self.worker.stream(call):
            yield items
            if self.stops_after_tokens:
                self.held.clear()
            await self._go()

    async def _go(self) -> None:
        while not self.held.is_set():
            await asyncio.sleep(0.001)


class Gateway(Server):
    """A server over a RemoteEngine."""

    def __init__(self, workers: Workers) -> None:
        self.tokenizer = make_tokenizer()
        with torch.device("meta"):
            skeleton = make_model("llama", vocab_size=len(self.tokenizer))
        config = workers.worker.engine.engine.config
        self.engine = RemoteEngine(skeleton, config, RemoteLoop(workers, None, RemoteSettings()), self.tokenizer)
        self.workers, self.live = workers, AsyncEngine(self.engine)
        self.app = create_app(self.live, self.tokenizer, ServerConfig([NAME]))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with AsyncEngine(make_engine()) as live:
        made = Gateway(Workers(Worker(live)))
        with made.live:
            yield made
        made.app.state.service.close()


def test_a_gateways_page_shows_its_requests_and_no_prefixes(gateway):
    assert asyncio.run(gateway.get("/")).status_code == 200
    about = asyncio.run(gateway.get("/kvpage/about")).json()
    assert (about["model"], about["shows_prefixes"], about["block_size"]) == (NAME, False, 4)
    assert asyncio.run(gateway.get("/metrics")).status_code == 200
    gateway.workers.held.clear()
    request = gateway.live.submit([5, 6, 7], SamplingParams(max_tokens=3))
    until(lambda: len(gateway.engine.request_states(1)) == 1)
    picture = asyncio.run(first_picture(gateway))
    (lane,) = picture["requests"]
    assert (lane["id"], lane["stage"], lane["prompt"]) == (request.request_id, "waiting", 3)
    assert lane["computed"] == lane["generated"] == 0 and picture["prefixes"] == []
    gateway.workers.held.set()
    tokens = [one.token_id for outputs in request for one in outputs]
    assert len(tokens) == 3 and gateway.engine.request_states(9) == []
    with pytest.raises(ValueError, match="limit must be"):
        gateway.engine.request_states(-1)


def test_states_of_requests_with_tokens_come_first(gateway):
    gateway.workers.stops_after_tokens = True
    begun = gateway.live.submit([5, 6], SamplingParams(max_tokens=200))
    reader = iter(begun)
    next(reader)
    waits = gateway.live.submit([5, 6], SamplingParams(max_tokens=2))
    states = gateway.live.call(lambda engine: engine.request_states(9)).result()
    assert [(one.request_id, one.stage) for one in states] == [
        (begun.request_id, "decode"),
        (waits.request_id, "waiting"),
    ]
    assert states[0].num_generated_tokens > 0 == states[1].num_generated_tokens
    assert states[0].num_computed_tokens == 2 and states[0].first_token_time is not None
    assert gateway.live.call(lambda engine: engine.request_states(1)).result() == states[:1]
    gateway.workers.stops_after_tokens = False
    for one in (begun, waits):
        one.abort()
    until(lambda: not gateway.engine.loop.requests)
    gateway.workers.held.set()


def test_a_pin_that_a_gateway_cannot_follow_is_told_of(gateway, caplog):
    body = {"prompt": "the fox", "max_tokens": 1} | hints(("kv.pin", {"ttl_seconds": 60}))
    with caplog.at_level(logging.INFO, "kvpage"):
        assert asyncio.run(gateway.post(PATH, body)).status_code == 200
    assert "hints were not followed: the blocks are those of workers elsewhere" in caplog.text
    assert len(gateway.engine.manager.space.pins) == 0


def test_positions_for_others_reach_the_worker(gateway):
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "cache_at": [2]}
    assert asyncio.run(gateway.post(PATH, body)).status_code == 200
    assert gateway.workers.calls[-1].cache_at == (2,)
    answer = asyncio.run(gateway.post(PATH, body | {"cache_at": [4]}))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_at"


def test_a_form_is_compiled_beside_the_workers_event_loop(gateway, monkeypatch):
    worker, threads = gateway.workers.worker, []
    submit = worker.engine.submit
    monkeypatch.setattr(
        worker.engine, "submit", lambda *args, **named: threads.append(threading.get_ident()) or submit(*args, **named)
    )

    async def main(guide) -> None:
        params = SamplingParams(max_tokens=2, guide=guide)
        call = GenerateCall("call", torch.tensor([5, 6], dtype=torch.int32).numpy(), params)
        assert [one async for one in worker.stream(call)]

    for guide in (None, Guide.choice(["a", "b"])):
        asyncio.run(main(guide))
    assert threads[0] == threading.get_ident() != threads[1]
