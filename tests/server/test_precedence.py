"""Whose requests come first, whose blocks stay, and that a request which fails fails alone; over HTTP."""

import asyncio
import threading

import pytest
from server.test_access import hints
from server.test_bad_input import check_refused, state
from server.test_completions import ask
from support.models import make_model
from support.server_app import NAME, events_of, make_tokenizer, running_server
from support.waiting import until

from kvpage.server import ApiKey, ServerConfig
from kvpage.server.answers.transcript import Transcript

PATH = "/v1/completions"
GATEWAY = ServerConfig([NAME], [ApiKey("gateway", None)], tenant_pin_quota=3)


def test_lower_priorities_run_first():
    async def main(server) -> list[int]:
        order, held = [], threading.Event()
        server.live.call(lambda engine: held.wait())

        async def one(priority: int) -> None:
            body = {"prompt": f"the fox {priority}", "max_tokens": 3, "priority": priority}
            assert (await server.post(PATH, body)).status_code == 200
            order.append(priority)

        tasks = []
        for num_asked, priority in enumerate((5, 0, 9, -3), 1):
            tasks.append(asyncio.ensure_future(one(priority)))
            while server.live.stats().num_unfinished < num_asked:
                await asyncio.sleep(0.001)
        held.set()
        await asyncio.gather(*tasks)
        return order

    with running_server(max_num_seqs=1) as server:
        assert asyncio.run(main(server)) == [-3, 0, 5, 9]


def test_a_priority_before_the_least_is_refused():
    with running_server(ServerConfig([NAME], min_priority=-1)) as server:
        before = state(server)
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
            error = check_refused(asyncio.run(server.post(PATH, body | {"priority": -2})), param="priority")
            assert error["message"] == "priority must be at least -1 here, got -2"
        assert state(server) == before
        ask(server, prompt="x", max_tokens=1, priority=-1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_which_a_step_raises_fails_alone(stream):
    bad, tokenizer = 11, make_tokenizer()

    def raise_at_it(module, args) -> None:
        if bad in args[0].flatten().tolist():
            raise RuntimeError("boom")

    model = make_model("llama", vocab_size=len(tokenizer))
    with running_server(model=model) as server:
        handle = model.get_input_embeddings().register_forward_pre_hook(raise_at_it)

        async def main() -> list:
            prompts = [server.tokens("the quick fox"), [5, bad, 6], server.tokens("a lazy dog")]
            bodies = [{"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": stream} for prompt in prompts]
            return await asyncio.gather(*[server.post(PATH, body) for body in bodies])

        first, failed, last = asyncio.run(main())
        handle.remove()
        error = events_of(failed.text)[-1]["error"] if stream else check_refused(failed, 500)
        assert error["code"] == "request_failed" and error["type"] == "server_error" and "boom" in error["message"]
        for answer in (first, last):
            assert answer.status_code == 200
            end = events_of(answer.text)[-1] if stream else answer.json()
            assert end["choices"][0]["finish_reason"] == "length"
        ask(server, prompt=[5, bad, 6], max_tokens=1)


def test_an_error_of_the_servers_own_ends_a_stream_as_an_event(server, monkeypatch, caplog):
    def raise_it(self, outputs) -> list:
        raise ZeroDivisionError("a secret of the server")

    with monkeypatch.context() as patched:
        patched.setattr(Transcript, "take", raise_it)
        events = events_of(ask(server, prompt="the fox", max_tokens=30, stream=True).text)
    assert events[-1]["error"] == {
        "message": "the server has failed at this request", "type": "server_error", "param": None,
        "code": "internal_error",
    }  # fmt: skip
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)
    until(lambda: server.live.stats().num_unfinished == 0)
    assert server.app.state.service.open_requests.num_open == 0


def found(server, prompt: list[int]) -> int:
    usage = ask(server, prompt=prompt, max_tokens=1).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("most", [100, 0])
def test_what_is_retained_outlives_others(most):
    """256 blocks of 4 tokens: the fillers need all of them."""
    kept, plain = [[first, *range(2, 40)] for first in (100, 101)]
    retain = hints(("kv.retain", {"directives": [{"priority": 100}]}))
    with running_server(ServerConfig([NAME], max_retain_priority=most)) as server:
        ask(server, prompt=kept, max_tokens=1, **retain)
        ask(server, prompt=plain, max_tokens=1)
        for first in range(5):
            ask(server, prompt=[first + 1] * 230, max_tokens=1)
        assert found(server, plain) == 0
        assert found(server, kept) == (36 if most else 0)


def num_pinned(server) -> int:
    return server.live.call(lambda engine: engine.manager.stats().space.num_pinned_blocks).result()


def test_each_tenant_pins_within_its_own_quota():
    with running_server(GATEWAY, pin_quota=8) as server:

        def pin(tenant: str, first: int, ttl: float = 60.0) -> int:
            body = {"prompt": [first] * 9, "max_tokens": 1} | hints(("kv.pin", {"ttl_seconds": ttl}))
            headers = {"authorization": "Bearer gateway", "x-tenant-id": tenant}
            assert asyncio.run(server.post(PATH, body, **headers)).status_code == 200
            return num_pinned(server)

        assert [pin("ann", 1), pin("ann", 2), pin("bob", 3), pin("bob", 4)] == [2, 2, 4, 4]
        assert [pin("cat", 5), pin("dan", 6), pin("eve", 7)] == [6, 8, 8], "the quota of all holds, too"
        server.live.call(lambda engine: engine.manager.space.pins.clear()).result()
        assert pin("ann", 2) == 2
