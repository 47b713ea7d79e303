"""Keys, tenants, hosts, hints and limits: who may ask, and whose blocks are found."""

import asyncio

import pytest
from server.test_bad_input import check_refused, state
from support.server_app import NAME, running_server
from support.waiting import until

from kvpage.server import ApiKey, ServerConfig
from kvpage.serving import AsyncEngineConfig

PATH = "/v1/completions"
TEXT = "a text of several blocks that more than one tenant sends to the server"
KEYS = [ApiKey("open"), ApiKey("of-ann", "ann"), ApiKey("of-bob", "bob"), ApiKey("gateway", None)]


@pytest.fixture(scope="module")
def guarded():
    with running_server(ServerConfig([NAME], KEYS)) as found:
        yield found


def post(server, body=None, path=PATH, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(server.post(path, {"prompt": TEXT, "max_tokens": 1} | (body or {}), **named))


def num_cached(server, body=None, **headers) -> int:
    answer = post(server, body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "given", [None, "", "open", "Bearer", "Bearer ", "Bearer wrong", "Basic open", "Bearer open2", "Bearer Open"]
)
def test_without_a_key_nothing_is_answered(guarded, given):
    headers = {} if given is None else {"authorization": given}
    before = state(guarded)
    for path in (PATH, "/v1/chat/completions", "/tokenize", "/v1/models"):
        answer = post(guarded, path=path, **headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert state(guarded) == before


def test_health_and_metrics_need_no_key(guarded):
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert asyncio.run(guarded.get(path)).status_code == 200


def test_tenants_share_no_blocks(guarded):
    for key in ("open", "of-ann", "of-bob"):
        assert num_cached(guarded, authorization=f"Bearer {key}") == 0
    for key in ("open", "of-ann", "of-bob"):
        assert num_cached(guarded, authorization=f"Bearer {key}") > 0


def test_a_salt_lies_within_its_tenant(guarded):
    for salt in ("one", "ann", "\u00e4"):
        for key in ("of-ann", "of-bob", "open"):
            body = {"prompt": f"{salt} {TEXT}"}
            for fields, is_found in (({"cache_salt": salt}, False), ({"cache_salt": salt}, True)):
                assert (num_cached(guarded, body | fields, authorization=f"Bearer {key}") > 0) == is_found
            assert num_cached(guarded, body | {"cache_salt": f"{salt}2"}, authorization=f"Bearer {key}") == 0


def test_a_gateway_names_its_tenants(guarded):
    body = {"prompt": "by a gateway: " + TEXT}
    for tenant in ("ann", "cat"):
        assert num_cached(guarded, body, authorization="Bearer gateway", x_tenant_id=tenant) == 0
        assert num_cached(guarded, body, authorization="Bearer gateway", x_tenant_id=tenant) > 0
    assert num_cached(guarded, body, authorization="Bearer of-ann") > 0, "ann is one tenant, whoever names her"
    assert num_cached(guarded, body, authorization="Bearer of-bob") == 0
    for headers in ({}, {"x_tenant_id": " "}):
        error = post(guarded, authorization="Bearer gateway", **headers).json()["error"]
        assert error["code"] == "tenant_required"
    assert post(guarded, authorization="Bearer gateway", x_tenant_id="x" * 257).status_code == 400


def test_no_tenant_is_believed_without_a_gateways_key(server, guarded):
    before = state(server), state(guarded)
    answers = [post(server, x_tenant_id="ann"), post(guarded, authorization="Bearer of-bob", x_tenant_id="ann")]
    for answer in answers:
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "tenant_not_allowed"
    assert (state(server), state(guarded)) == before
    assert post(guarded, authorization="Bearer of-ann", x_tenant_id="ann").status_code == 200


def test_only_named_hosts_are_answered():
    with running_server(ServerConfig([NAME], allowed_hosts=["LocalHost", "[::1]", "[FE80::A]"])) as server:
        by_address = "127.0.0.1", "10.1.2.3:8000", "[::2]:80"  # no web page can have such a name for its own
        for host in ("localhost", "localhost:8000", "LOCALHOST", "[::1]:80", "[::1]", "[fe80::a]:1", *by_address):
            assert asyncio.run(server.get("/v1/models", host=host)).status_code == 200, host
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[evil]", ""):
            error = asyncio.run(server.get("/v1/models", host=host)).json()["error"]
            assert error["code"] == "host_not_allowed", host
            assert asyncio.run(server.get("/health", host=host)).status_code == 200, "probes come by any name"


def test_two_hosts_are_refused(server):
    async def ask():
        async with server.client() as client:
            return await client.get("/v1/models", headers=[("host", "localhost"), ("host", "evil.example")])

    assert check_refused(asyncio.run(ask()))["code"] == "invalid_host"


def test_metrics_need_a_key_where_they_are_not_open():
    with running_server(ServerConfig([NAME], KEYS, open_metrics=False)) as server:
        assert asyncio.run(server.get("/metrics")).status_code == 401
        assert asyncio.run(server.get("/metrics", authorization="Bearer open")).status_code == 200
        assert asyncio.run(server.get("/health")).status_code == 200


def hints(*actions: tuple[str, dict], version: str = "1.0") -> dict:
    each = [
        {"action_id": str(number), "action_type": kind, "action_version": version, "payload": payload}
        for number, (kind, payload) in enumerate(actions)
    ]
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": each}}


def num_pinned(server) -> int:
    return server.live.call(lambda engine: engine.manager.stats().space.num_pinned_blocks).result()


def test_hints_pin_prompts_within_the_quota():
    with running_server(pin_quota=8) as server:
        num_blocks = len(server.tokens(TEXT)) // 4
        body = {"prompt": server.tokens(TEXT)[:24]} | hints(("kv.pin", {"ttl_seconds": 60}))
        assert post(server, body).status_code == 200
        until(lambda: num_pinned(server) == 6)
        assert num_blocks > 2
        more = {"prompt": [9] * 40} | hints(("kv.pin", {"ttl_seconds": 60}))
        assert post(server, more).status_code == 200, "a hint beyond the quota fails no request"
        assert num_pinned(server) == 6


def test_hints_of_other_kinds_and_versions_are_left_aside(server):
    for body in (hints(("kv.teleport", {"to": "mars"})), hints(("kv.pin", {"a": 1}), version="2.0")):
        assert post(server, body).status_code == 200
    check_refused(post(server, hints(("kv.retain", {"directives": [{"priority": 101}]}))), param="kv_hints")


def test_a_full_queue_is_503_with_a_time_to_come_back():
    limits = AsyncEngineConfig(max_num_waiting=1)

    async def ask(server) -> list:
        async with server.client() as client:
            each = [client.post(PATH, json={"prompt": f"{index}" * 9, "max_tokens": 30}) for index in range(12)]
            return await asyncio.gather(*each)

    with running_server(limits=limits, max_num_seqs=1) as server:
        answers = asyncio.run(ask(server))
        until(lambda: server.live.stats().num_unfinished == 0)
    busy = [answer for answer in answers if answer.status_code == 503]
    assert busy and len(busy) < 12 and {answer.status_code for answer in answers} == {200, 503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in busy)
    assert busy[0].json()["error"]["code"] == "server_busy" and busy[0].json()["error"]["type"] == "server_error"


def test_deadlines_end_requests(server):
    answer = post(server, {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "timeout": 0.001})
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline"
