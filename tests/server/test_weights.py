"""Other weights by HTTP, for operators; adapters by the name of a model."""

import asyncio

import pytest
from support.lora_files import merged, targets, write_adapter
from support.models import generate_each
from support.server_app import NAME, Server, make_tokenizer, running_server
from support.step_gate import StepGate
from support.weight_versions import WeightVersions

from kvpage.server import ServerConfig
from kvpage.serving import SamplingParams

KEY = {"x-operator-key": "secret"}
BODY = {"prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
PROMPT = BODY["prompt"]


async def tokens_by(server: Server, model: str) -> list[int]:
    response = await server.post("/v1/completions", {**BODY, "model": model})
    return response.json()["choices"][0]["token_ids"]


@pytest.fixture
def versions(tmp_path) -> WeightVersions:
    made = WeightVersions(vocab_size=len(make_tokenizer()))
    for name in ("v1", "v2"):
        made.of(name).save_pretrained(tmp_path / "weights" / name)
    return made


def test_operators_change_weights_and_nobody_else_does(tmp_path, versions):
    config = ServerConfig([NAME], weights_folder=tmp_path / "weights", operator_key="secret")

    async def life(server: Server) -> None:
        assert await tokens_by(server, NAME) == versions.answer("", PROMPT, 5)
        for running in ("finish", "restart", "stale"):
            for version in ("v1", "v2"):
                asked = {"version": version, "running": running, "drop_last": running == "stale"}
                response = await server.post("/weights", asked, **KEY)
                assert response.json()["version"] == version
                assert await tokens_by(server, NAME) == versions.answer(version, PROMPT, 5)
        assert (await server.get("/weights", **KEY)).json()["num_updates"] == 6
        for headers, body, status in (
            ({}, {"version": "v1"}, 403),
            ({"x-operator-key": "other"}, {"version": "v1"}, 403),
            (KEY, {"version": "v2"}, 400),
            (KEY, {"version": "../weights/v1"}, 400),
            (KEY, {"version": "v3"}, 400),
            (KEY, {"version": "v1", "running": "abort"}, 400),
        ):
            response = await server.post("/weights", body, **headers)
            assert response.status_code == status and str(tmp_path) not in response.text, response.text
            assert body["version"] != "v3" or "'v3' is no such folder" in response.text
        assert (await server.get("/weights")).status_code == 403

    with running_server(config, model=versions.model) as server:
        asyncio.run(life(server))
    with running_server() as server:
        assert asyncio.run(server.post("/weights", {"version": "v1"}, **KEY)).status_code == 404
    with pytest.raises(ValueError, match="operator_key"):
        ServerConfig(weights_folder=tmp_path)
    assert "secret" not in repr(config)


def test_two_updates_at_once_drop_both_versions_and_one_without_its_client_is_withdrawn(
    tmp_path, versions, monkeypatch
):
    config = ServerConfig([NAME], weights_folder=tmp_path / "weights", operator_key="secret")

    async def life(server: Server) -> None:
        await tokens_by(server, NAME)
        await server.live.update_weights("v0")
        await tokens_by(server, NAME)
        asked = [{"version": version, "drop_last": True} for version in ("v1", "v2")]
        responses = await asyncio.gather(*[server.post("/weights", body, **KEY) for body in asked])
        assert [response.status_code for response in responses] == [200, 200]
        assert server.engine.manager.tree.names(9) == [b""]
        gate, asked_engine, update = StepGate(server.live, 2), asyncio.Event(), server.live.update_weights

        async def noted(*args: object, **options: object) -> None:
            asked_engine.set()
            await update(*args, **options)

        monkeypatch.setattr(server.live, "update_weights", noted)
        live = server.live.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
        reader = aiter(live)  # a reader that goes aborts its request
        await anext(reader)
        last = server.engine.weights_version
        other = "v1" if last == "v2" else "v2"
        posting = asyncio.ensure_future(server.post("/weights", {"version": other, "running": "finish"}, **KEY))
        await asked_engine.wait()
        assert await gate.ask(lambda engine: engine.loop.is_due_later)
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)
        assert not await gate.ask(lambda engine: engine.loop.is_due_later)
        gate.open()
        live.abort()
        assert await tokens_by(server, NAME) == versions.answer(last, PROMPT, 5)

    with running_server(config, model=versions.model) as server:
        asyncio.run(life(server))


def test_requests_finish_while_their_tokens_are_read(tmp_path, versions):
    config = ServerConfig([NAME], weights_folder=tmp_path / "weights", operator_key="secret")

    async def life(server: Server) -> None:
        live = server.live.submit(PROMPT, namespace=b"x")
        other = server.live.submit(PROMPT)
        async for _ in live:
            break
        other.abort()
        await server.live.update_weights("v1", lambda: versions.load("v1"), running="finish")
        assert live.output is not None or server.engine.stats().num_running == 0
        async for _ in live:
            pass
        num_tokens = len(live.output.token_ids)
        assert live.output.token_ids == versions.answer("", PROMPT, num_tokens)
        with pytest.raises(ValueError, match="current"):
            await server.live.update_weights("v1")

    with running_server(config, model=versions.model) as server:
        asyncio.run(life(server))


def test_the_name_of_a_model_asks_for_an_adapter(tmp_path):
    config = ServerConfig([NAME], adapter_names=["sql"])
    with running_server(config) as server:
        model = server.engine.debug.runner.model
        folder = write_adapter(tmp_path / "sql", model, targets(model))
        server.live.call(lambda engine: engine.load_adapter("sql", folder)).result()

        async def life() -> None:
            for _ in range(2):
                for name, each in ((NAME, model), ("sql", merged(model, folder))):
                    assert await tokens_by(server, name) == generate_each(each, [PROMPT], 5)[0]
            cards = (await server.get("/v1/models")).json()["data"]
            assert [(card["id"], card["parent"]) for card in cards] == [(NAME, None), ("sql", NAME)]
            assert (await server.get("/v1/models/sql")).json()["root"] == "sql"
            assert (await server.post("/v1/completions", {**BODY, "model": "other"})).status_code == 404
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "model": "sql"}
            assert (await server.post("/v1/chat/completions", chat)).json()["model"] == "sql"

        asyncio.run(life())
    with pytest.raises(ValueError, match="adapter_names must differ"):
        ServerConfig([NAME], adapter_names=[NAME])
