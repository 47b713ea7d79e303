"""Sessions over HTTP: an agent of 40 turns with branches and pauses, actions by id, limits; and hints on the cache."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.server_app import NAME, Server, running_server
from support.waiting import until

from kvpage.server import ServerConfig
from kvpage.server.config import ApiKey
from kvpage.serving import SessionConfig

COMPLETIONS = "/v1/completions"
B = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(pin_quota=200, sessions=SessionConfig(return_lead=0.01)) as made:
        yield made


def ask(server: Server, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = asyncio.run(server.post(path, body, **headers))
    assert answer.status_code == 200, answer.text
    return answer.json()


def call(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    async def go() -> Any:
        async with server.client(**headers) as client:
            return await client.request(method, path, json=body)

    answer = asyncio.run(go())
    return answer.status_code, answer.json()


def hints(*actions: tuple[str, dict[str, Any]], version: str = "1.0") -> dict[str, Any]:
    made = [
        {"action_id": str(index), "action_type": kind, "action_version": version, "payload": payload}
        for index, (kind, payload) in enumerate(actions)
    ]
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": made}}


def tokens_of(server: Server, session_id: str, branch: str = "main") -> list[int]:
    return server.live.in_session(session_id, lambda session: session.tokens(branch).tolist()).result()


def turn(server: Server, session_id: str, prompt: list[int], branch: str = "main", **fields: Any) -> int:
    """Ask for the next tokens of a branch; return how many tokens of the prompt were computed."""
    body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, "temperature": 0, "session_id": session_id, **fields}
    body |= {} if branch == "main" else {"session_branch": branch}
    usage = ask(server, COMPLETIONS, body)["usage"]
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def test_an_agent_of_forty_turns_computes_only_what_is_new(server):
    """New is what comes after the whole blocks of the last turn; a part of the next one may be another branch's."""
    path = "/v1/sessions/agent"
    assert turn(server, "agent", list(range(10, 30))) == 20
    assert call(server, "POST", path, {"action": "retain", "ttl_seconds": 60})[0] == 200
    for number in range(40):
        branch = "main" if number < 20 or number % 2 else "try"
        if number == 20:
            status, state = call(server, "POST", path, {"action": "branch", "branch": "try"})
            assert status == 200 and [one["name"] for one in state["branches"]] == ["main", "try"]
        new, before = [100 + number, 7, 8], tokens_of(server, "agent", branch)
        num_computed = turn(server, "agent", before + new, branch)
        assert len(new) <= num_computed <= len(before + new) - (len(before) - 1) // B * B
        assert tokens_of(server, "agent", branch)[: len(before) + 3] == before + new
        if number % 4 == 0:  # a tool runs
            status, state = call(server, "POST", path, {"action": "pause", "expected_seconds": 30})
            assert (status, state["paused_in"]) == (200, "device")
    status, state = call(server, "GET", path)
    assert status == 200 and state["num_turns"] == 41 and state["paused_in"] is None
    assert all(one["num_retained_blocks"] == (one["num_tokens"] - 1) // B for one in state["branches"])
    status, state = call(server, "POST", path, {"action": "release", "branch": "try"})
    assert status == 200 and state["released_tokens"] > B * 10 and len(state["branches"]) == 1
    assert call(server, "DELETE", path)[1]["deleted"] is True
    assert call(server, "GET", path)[0] == 404 == call(server, "DELETE", path)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_chats_and_responses_are_turns_of_the_session_that_body_or_header_name(server, stream):
    messages = [{"role": "user", "content": "the quick brown fox"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 3, "temperature": 0},
        "/v1/responses": {"input": "the quick", "max_output_tokens": 3, "temperature": 0},
        "/v1/messages": {"messages": messages, "max_tokens": 3, "temperature": 0},
    }
    for number, (path, body) in enumerate(bodies.items()):
        name, header = f"by body {number} {stream}", f"by header {number} {stream}"
        asyncio.run(server.post(path, {**body, "stream": stream, "session_id": name}))
        asyncio.run(server.post(path, {**body, "stream": stream}, **{"x-session-id": header}))
        for session_id in (name, header):
            until(lambda session_id=session_id: call(server, "GET", f"/v1/sessions/{session_id}")[0] == 200)
            until(lambda session_id=session_id: len(tokens_of(server, session_id)) > 10)
        assert tokens_of(server, name) == tokens_of(server, header)


def test_an_edit_tells_what_it_costs_and_so_does_the_next_request(server):
    prompt = [41, *range(50, 80)]
    turn(server, "edited", prompt)
    body = {"action": "edit", "start": 9, "end": 11, "tokens": [5]}
    status, state = call(server, "POST", "/v1/sessions/edited", body)
    cost = state["edit"]
    assert status == 200 and cost["num_tokens_to_compute"] == 33 - 9 and cost["num_released_tokens"] == 20
    assert turn(server, "edited", tokens_of(server, "edited")) == cost["num_tokens_to_compute"]
    text = call(server, "POST", "/v1/sessions/edited", {**body, "mode": "erratum", "tokens": None, "text": "no fox"})[1]
    assert 1 <= text["edit"]["num_tokens_to_compute"] <= len(server.tokens("no fox")) + B
    assert text["edit"]["num_released_tokens"] == 0
    explained = server.live.call(lambda engine: engine.explain(tokens_of_engine(engine, "edited"))).result()
    assert explained.edits[0].mode == "erratum" and "an edit (erratum)" in str(explained)


def tokens_of_engine(engine: Any, session_id: str) -> Any:
    return engine.session(session_id).tokens()


def test_wrong_actions_and_names_are_refused_and_change_nothing(server):
    turn(server, "refused", [9] * 12)
    before, path = call(server, "GET", "/v1/sessions/refused"), "/v1/sessions/refused"
    for body, status in (
        ({"action": "fly"}, 400), ({}, 400), ({"action": "pause"}, 400), ({"action": "retain", "tier": "store"}, 400),
        ({"action": "release", "branch": "none"}, 404), ({"action": "branch", "branch": "main"}, 400),
        ({"action": "edit", "start": 3, "end": 2, "tokens": [1]}, 400), ({"action": "edit", "start": 0, "end": 1}, 400),
        ({"action": "edit", "start": 0, "end": 1, "tokens": [10**6]}, 400),
        ({"action": "edit", "start": 0, "end": 0, "mode": "erratum", "tokens": [5] * 2000}, 400),
        ({"action": "retain", "tier": "host"}, 400),
        ({"action": "resume", "cache_salt": "x"}, 404),
    ):  # fmt: skip
        found, answer = call(server, "POST", path, body)
        assert found == status and answer["error"]["message"], body
    for body in (
        {"session_id": "a", "n": 2}, {"session_id": "a", "prompt": [[1], [2]]}, {"session_branch": "b"},
        {"session_id": "x" * 257}, {"session_id": ""},
    ):  # fmt: skip
        assert call(server, "POST", COMPLETIONS, {"prompt": [1], "max_tokens": 1, **body})[0] == 400
    assert call(server, "POST", COMPLETIONS, {"prompt": [1]}, **{"x-session-id": "x" * 257})[0] == 400
    assert call(server, "PUT", path)[0] == 405 and call(server, "GET", path) == before
    lines = asyncio.run(server.get("/metrics")).text
    assert 'kvpage_sessions{model_name="tiny",state="all"}' in lines


def test_a_request_that_fails_leaves_a_session_as_it_was_and_a_closed_one_is_not_made_again(server):
    path = "/v1/sessions/a%2Fb%20c"
    turn(server, "a/b c", [3] * 12)
    before = call(server, "GET", path)
    assert before[0] == 200 and before[1]["num_turns"] == 1
    body = {"prompt": [4] * 9, "max_tokens": 200, "ignore_eos": True, "session_id": "a/b c"}
    for fields in ({"timeout": 1e-6}, {"timeout": 1e-6, "stream": True}, {"prompt": [4] * 2000}):
        asyncio.run(server.post(COMPLETIONS, body | fields))
        assert call(server, "GET", path) == before, fields
    source = {"action": "branch", "branch": "new", "source": "none"}
    status, answer = call(server, "POST", path, source)
    assert (status, answer["error"]["param"]) == (404, "source")

    async def closed_meanwhile() -> None:
        async with server.client() as client:
            request = asyncio.ensure_future(client.post(COMPLETIONS, json=body))
            while not server.engine.has_unfinished:
                await asyncio.sleep(0.001)
            assert (await client.delete(path)).status_code == 200 and (await request).status_code == 200

    asyncio.run(closed_meanwhile())
    assert call(server, "GET", path)[0] == 404


def test_a_turn_beyond_the_limits_leaves_no_branch_behind():
    with running_server(sessions=SessionConfig(max_tokens=30)) as server:
        turn(server, "s", [5] * 20)
        before = tokens_of(server, "s")
        turn(server, "s", [6] * 12, "b")
        assert [branch["name"] for branch in call(server, "GET", "/v1/sessions/s")[1]["branches"]] == ["main"]
        assert tokens_of(server, "s") == before


def test_a_session_is_its_tenants_and_its_quota_too():
    keys = [ApiKey("a", "ann"), ApiKey("b", "bob")]
    with running_server(ServerConfig([NAME], keys), pin_quota=64, sessions=SessionConfig(owner_quota=4)) as server:
        ann, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
        body = {"prompt": [7] * 9, "max_tokens": 1, "session_id": "s"}
        ask(server, COMPLETIONS, body, **ann)
        assert (
            call(server, "GET", "/v1/sessions/s", **bob)[0] == 404 == call(server, "DELETE", "/v1/sessions/s", **bob)[0]
        )
        assert call(server, "GET", "/v1/sessions/s")[0] == 401
        retain = {"action": "retain", "ttl_seconds": 60}
        assert call(server, "POST", "/v1/sessions/s", retain, **ann)[1]["retained_blocks"] == 2
        for salt in ("x", "y"):  # two namespaces of one tenant
            ask(server, COMPLETIONS, {**body, "cache_salt": salt}, **ann)
        salted = {**retain, "cache_salt": "x"}
        assert call(server, "POST", "/v1/sessions/s", salted, **ann)[1]["retained_blocks"] == 2
        salted = {**retain, "cache_salt": "y"}
        assert call(server, "POST", "/v1/sessions/s", salted, **ann)[1]["retained_blocks"] == 0, "beyond ann's quota"
        assert call(server, "GET", "/v1/sessions/s", **ann, **{"x-cache-salt": "y"})[1]["num_turns"] == 1
        server.app.state.service.begin_drain()
        assert call(server, "POST", "/v1/sessions/s", retain, **ann)[0] == 503


def test_hints_of_one_prompt_pin_it_once_and_demotions_need_no_quota():
    body = {"prompt": list(range(40, 57)), "max_tokens": 1}
    with running_server(pin_quota=4, num_cpu_blocks=32) as server:
        for fields in ({}, {}, {"session_id": "s"}):
            ask(server, COMPLETIONS, body | fields | hints(("kv.pin", {"ttl_seconds": 60})))
        counts = server.live.call(lambda engine: server.app.state.service.runner.work.hints.copy()).result()
        assert counts == {("kv.pin", "followed"): 2, ("kv.pin", "refused"): 1}
    with running_server(num_cpu_blocks=32) as server:
        ask(server, COMPLETIONS, body | hints(("kv.demote", {})))
        on_host = server.live.call(lambda engine: engine.manager.stats().space.num_cached_host_blocks)
        assert on_host.result() == 4


def test_hints_are_followed_left_aside_and_counted():
    with running_server(pin_quota=64, num_cpu_blocks=32) as server:
        prompt = list(range(40, 57))
        body = {"prompt": prompt, "max_tokens": 1}
        ask(server, COMPLETIONS, body | hints(("kv.demote", {})))
        on_host = server.live.call(lambda engine: engine.manager.stats().space.num_cached_host_blocks)
        assert on_host.result() == 4
        ask(server, COMPLETIONS, body | hints(("kv.release", {}), ("kv.checkpoint", {"positions": [4, 99]})))
        first = server.live.call(lambda engine: [entry.priority for entry in engine.manager.tree.entries(9)])
        assert -1 in first.result()
        session = {"session_id": "s", **hints(("kv.next_use", {"expected_seconds": 30.0}))}
        ask(server, COMPLETIONS, {"prompt": list(range(60, 90)), "max_tokens": 1, **session})
        until(lambda: call(server, "GET", "/v1/sessions/s")[1]["paused_in"] == "host")
        retain = {"directives": [{"priority": 5, "start": 0, "duration": 60.0}]}
        ask(server, COMPLETIONS, body | hints(("kv.retain", retain)))
        pinned = server.live.call(lambda engine: engine.manager.stats().space.num_pinned_blocks)
        assert pinned.result() == 4 + 7
        answer = asyncio.run(server.post(COMPLETIONS, body | hints(("kv.teleport", {}), ("kv.demote", {"to": "mars"}))))
        assert answer.status_code == 200
        assert answer.headers["x-ignored-fields"] == "kv_hints.actions.kv.demote.to, kv_hints.actions.kv.teleport"
        lines = asyncio.run(server.get("/metrics")).text
        for kind in ("kv.demote", "kv.release", "kv.next_use", "kv.pin"):
            assert f'kvpage_hints_total{{hint="{kind}",model_name="{NAME}",outcome="followed"}}' in lines
        wrong = hints(("kv.next_use", {"expected_seconds": -1}))
        assert call(server, "POST", COMPLETIONS, body | wrong)[0] == 400
