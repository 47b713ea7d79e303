"""Chains of kept responses are sessions: turns, branches, deletions, names, tenants, and what is forgotten."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from server.test_sessions import call, tokens_of
from support.seeds import seed_of
from support.server_app import NAME, Server, running_server

from kvpage.server import ApiKey, ServerConfig
from kvpage.server.running.response_turns import Leaving, Line, ResponseTurn, ResponseTurns
from kvpage.serving import SessionConfig
from kvpage.store import KVStore, KVStoreConfig, metadata_of

PATH, B = "/v1/responses", 4
BODY = {"input": "the quick brown fox", "max_output_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(pin_quota=200, num_cpu_blocks=64) as made:
        yield made


def respond(server: Server, previous: str | None = None, **fields: Any) -> tuple[str, int]:
    """Return the id of a response, and the tokens of its path."""
    headers = fields.pop("headers", {})
    status, answer = call(server, "POST", PATH, {**BODY, "previous_response_id": previous, **fields}, **headers)
    assert status == 200, answer
    return answer["id"], answer["usage"]["total_tokens"]


def branches(server: Server, session_id: str, **headers: str) -> dict[str, int]:
    """Return the tokens of each branch of a session; nothing where there is none."""
    status, state = call(server, "GET", f"/v1/sessions/{session_id}", **headers)
    assert status in (200, 404), state
    return {branch["name"]: branch["num_tokens"] for branch in state.get("branches", [])}


def delete(server: Server, response_id: str, **headers: str) -> int:
    return call(server, "DELETE", f"{PATH}/{response_id}", **headers)[0]


def test_a_chain_is_a_session_and_an_older_response_branches(server):
    first, num_first = respond(server)
    assert branches(server, first) == {"main": num_first}
    second, num_second = respond(server, first)
    assert branches(server, first) == {"main": num_second}
    third, num_third = respond(server, first, input="no, the red one")
    fourth, num_fourth = respond(server, third)
    fifth, num_fifth = respond(server, second)
    assert branches(server, first) == {"main": num_fifth, third: num_fourth}
    state = call(server, "GET", f"/v1/sessions/{first}")[1]
    assert state["num_turns"] == 5 and state["retention"] is None
    for response_id in (second, third, fourth, fifth):
        assert call(server, "GET", f"/v1/sessions/{response_id}")[1] == state, "each of the chain names it"
    shared = server.tokens("user: the quick brown fox\nassistant:")
    for branch in ("main", third):
        assert tokens_of(server, first, branch)[: len(shared)] == shared


def test_actions_work_by_a_response_and_a_stream_is_a_turn(server):
    first, num_first = respond(server, input="a stream of words")
    body = {**BODY, "stream": True, "previous_response_id": first}
    text = asyncio.run(server.post(PATH, body)).text
    assert "response.incomplete" in text or "response.completed" in text
    second = text.split('"id":"resp_')[1].split('"')[0]
    path, [(name, num_tokens)] = f"/v1/sessions/resp_{second}", branches(server, first).items()
    assert name == "main" and num_tokens > num_first
    status, state = call(server, "POST", path, {"action": "retain", "ttl_seconds": 60})
    assert (status, state["id"]) == (200, first) and state["retained_blocks"] == (num_tokens - 1) // B
    paused = call(server, "POST", path, {"action": "pause", "expected_seconds": 30})[1]["paused_in"]
    assert paused in ("host", "device"), "as measured speeds of loads have it"
    third, num_third = respond(server, f"resp_{second}")
    assert call(server, "GET", path)[1]["paused_in"] is None and branches(server, first) == {"main": num_third}
    edit = {"action": "edit", "start": 3, "end": 4, "tokens": [5, 6]}
    assert call(server, "POST", path, edit)[1]["edit"]["num_tokens"] == num_third + 1
    assert delete(server, third) == 200 and branches(server, first) == {"main": num_third + 1}, "the edit came after it"
    assert call(server, "DELETE", path)[0] == 200 and branches(server, first) == {}
    again, num_again = respond(server, f"resp_{second}")
    assert branches(server, again) == {"main": num_again}, "a response goes on without its session"


def test_a_deleted_tip_takes_what_only_it_needs_and_the_last_response_closes_the_session(server):
    first, num_first = respond(server, input="to be deleted")
    second, num_second = respond(server, first)
    third, num_third = respond(server, second)
    other, num_other = respond(server, first, input="another")
    assert delete(server, second) == 200 and branches(server, first) == {"main": num_third, other: num_other}
    assert delete(server, third) == 200 and branches(server, first) == {"main": num_first, other: num_other}
    fourth, num_fourth = respond(server, first)
    assert branches(server, first) == {"main": num_fourth, other: num_other}, "the tip is the first response again"
    assert delete(server, other) == 200 and branches(server, first) == {"main": num_fourth}
    assert delete(server, first) == 200 and branches(server, first) == {"main": num_fourth}
    before = server.live.call(lambda engine: engine.sessions.stats().num_sessions).result()
    assert delete(server, fourth) == 200 and branches(server, first) == {}
    assert server.live.call(lambda engine: engine.sessions.stats().num_sessions).result() == before - 1
    first_out = server.live.call(lambda engine: [entry.priority for entry in engine.manager.tree.entries(99)])
    assert -1 in first_out.result()


def test_a_session_that_a_request_names_comes_first_and_stays(server):
    num_sessions = len(server.engine.sessions)
    kept_not, _ = respond(server, store=False)
    assert branches(server, kept_not) == {} and len(server.engine.sessions) == num_sessions
    first, num_first = respond(server, session_id="mine", session_branch="a")
    assert branches(server, "mine") == {"main": 0, "a": num_first} == branches(server, first)
    second, num_second = respond(server, first)
    assert branches(server, "mine") == {"main": 0, "a": num_second}
    third, num_third = respond(server, first)
    assert branches(server, "mine") == {"main": 0, "a": num_second, third: num_third}
    fourth, num_fourth = respond(server, second, headers={"x-session-id": "header"})
    assert branches(server, "header") == {"main": num_fourth} and branches(server, "mine")["a"] == num_second
    assert delete(server, third) == 200 and branches(server, "mine") == {"main": 0, "a": num_second}
    for response_id in (second, first, fourth):
        assert delete(server, response_id) == 200
    assert branches(server, "mine") == {"main": 0, "a": num_second} and branches(server, "header") != {}
    refused = call(server, "POST", PATH, {**BODY, "session_branch": "b"})
    assert (refused[0], refused[1]["error"]["param"]) == (400, "session_branch")
    refused = call(server, "POST", PATH, BODY, **{"x-session-branch": "b"})
    assert (refused[0], refused[1]["error"]["param"]) == (400, "session_branch")


def test_a_session_whose_name_is_a_response_of_another_one_is_found(server):
    first, num_first = respond(server)
    second, num_second = respond(server, first)
    named, num_named = respond(server, second, session_id=second)
    assert branches(server, second) == {"main": num_named} and branches(server, first) == {"main": num_second}
    streamed = call(server, "GET", f"{PATH}/{named}?stream=true")
    assert (streamed[0], streamed[1]["error"]["param"]) == (400, "stream")
    assert call(server, "GET", f"{PATH}/{named}?stream=false")[0] == 200


def test_two_at_once_after_one_tip_do_not_take_each_others_branch_and_a_failed_one_leaves_it(server):
    first, num_first = respond(server, input="at once")

    async def at_once() -> list[Any]:
        body = {**BODY, "previous_response_id": first}
        async with server.client() as client:
            asked = [client.post(PATH, json=body | fields) for fields in ({}, {"input": "other"}, {"timeout": 1e-6})]
            return await asyncio.gather(*asked)

    answers = asyncio.run(at_once())
    assert [answer.status_code == 200 for answer in answers] == [True, True, False]
    lengths = sorted(answer.json()["usage"]["total_tokens"] for answer in answers[:2])
    assert sorted(branches(server, first).values()) == lengths
    tip = next(a.json()["id"] for a in answers[:2] if a.json()["id"] not in branches(server, first))
    before = branches(server, first)
    assert call(server, "POST", PATH, {**BODY, "previous_response_id": tip, "timeout": 1e-6})[0] != 200
    assert branches(server, first) == before
    _, num_last = respond(server, tip)
    assert branches(server, first) == before | {"main": num_last}, "the claim has ended"


def test_a_chain_is_its_tenants_and_each_salt_has_a_session_of_its_own():
    ann, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
    with running_server(ServerConfig([NAME], [ApiKey("a", "ann"), ApiKey("b", "bob")])) as server:
        first, num_first = respond(server, headers=ann)
        assert branches(server, first, **bob) == {} and branches(server, first, **ann) == {"main": num_first}
        assert delete(server, first, **bob) == 404
        second, num_second = respond(server, first, headers=ann, cache_salt="x")
        salted = {**ann, "x-cache-salt": "x"}
        assert branches(server, first, **salted) == {"main": num_second} == branches(server, second, **salted)
        assert branches(server, first, **ann) == {"main": num_first}
        _, num_third = respond(server, second, headers=ann)
        assert branches(server, first, **ann) == {"main": num_third}, "the nearest response of its salt is the tip"
        for headers in (ann, bob):
            listed = [state.session_id for state in server.engine.sessions.states([b"\xffann\xff"], 9)]
            assert listed == [first], headers


def test_what_one_side_forgets_lets_the_other_go_on():
    config = ServerConfig([NAME], max_kept_responses=4)
    with running_server(config, sessions=SessionConfig(max_sessions=2, max_branches=1)) as server:
        gone, num_gone = respond(server)
        first, _ = respond(server, input="kept")
        second, _ = respond(server, first)
        third, num_third = respond(server, second)
        respond(server, input="other")
        assert delete(server, gone) == 404 and branches(server, first) == {"main": num_third}
        others = [respond(server, input=f"other {number}")[0] for number in range(3)]
        assert branches(server, first) == {}
        last, num_last = respond(server, others[-1])
        assert branches(server, others[-1]) == {"main": num_last}
        server.live.call(lambda engine: [engine.session(name) for name in "ab"]).result()
        after, num_after = respond(server, last)
        assert branches(server, others[-1]) == {"main": num_after}, "made again"
        branched, _ = respond(server, last)
        assert branches(server, others[-1]) == {"main": num_after}, "no branch is left, and the answer came"
        assert delete(server, branched) == 200 and branches(server, others[-1]) == {"main": num_after}


def test_a_session_that_a_client_has_named_is_found_in_its_record(tmp_path):
    with running_server(sessions=SessionConfig(max_sessions=1)) as server:
        config = KVStoreConfig(tiers=(f"disk:{tmp_path}?size=64MiB",), chunk_size=B)
        with KVStore(config, metadata_of(server.engine.cache, "model")) as store:
            server.live.call(lambda engine: engine.use_store(store)).result()
            first, num_first = respond(server, session_id="mine")
            second, num_second = respond(server, first)
            third, num_third = respond(server, first)
            for ask in (lambda: branches(server, second), lambda: delete(server, third)):
                server.live.call(lambda engine: engine.session("another")).result()
                assert ask() in (200, {"main": num_second, third: num_third})
            assert branches(server, "mine") == {"main": num_second}
            server.live.close()


@pytest.mark.parametrize(("limit", "num_opened"), [("max_kept_responses", 0), ("max_kept_bytes", 0), (None, 1)])
def test_a_response_that_is_not_kept_leaves_no_session(limit, num_opened):
    fields = {"max_kept_bytes": 10} if limit is None else {limit: 0}
    with running_server(ServerConfig([NAME], **fields)) as server:
        for stream in (False, True):
            answer = asyncio.run(server.post(PATH, {**BODY, "stream": stream}))
            assert answer.status_code == 200
        stats = server.live.call(lambda engine: engine.sessions.stats()).result()
        assert (stats.num_sessions, stats.num_opened) == (0, 2 * num_opened)


def test_a_deletion_while_the_next_response_is_under_way_is_made_up_for_when_that_fails(server):
    responses = server.app.state.service.responses
    first, num_first = respond(server, input="deleted too early")
    second, num_second = respond(server, first)
    for gone, loss in ((second, Leaving(Line(b"", first, "main"), False, num_second, num_first)), (first, None)):
        turn = responses.begin_turn("", "under way", gone, b"", None)
        assert turn.line == Line(b"", first, "main") and delete(server, gone) == 200
        assert branches(server, first) != {}, "it may be kept"
        assert responses.end_turn("under way", turn) == (loss or Leaving(turn.line, closes=True))
        assert responses.end_turn("under way", turn) is None


# --- turns alone -----------------------------------------------------------------------------------------------------


class NaiveTurns:
    """All responses that were ever kept, in order, and those under way.

    responses: of each the one before it, its turn, tokens, and whether it is kept.
    under_way: of each the one before it, its turn, and the tip of its branch as it began.
    """

    def __init__(self) -> None:
        self.responses: dict[str, list[Any]] = {}
        self.under_way: dict[str, tuple[str | None, ResponseTurn, tuple[str | None, int]]] = {}

    def kept(self, line: Line) -> list[str]:
        return [name for name, (_, turn, _, is_kept) in self.responses.items() if is_kept and turn.line == line]

    def chain(self, name: str | None) -> list[tuple[str, ResponseTurn]]:
        found = []
        while name is not None and self.responses[name][3]:
            found.append((name, self.responses[name][1]))
            name = self.responses[name][0]
        return found

    def lines(self) -> list[Line]:
        """Those of all responses that are kept or under way."""
        kept = [turn.line for _, turn, _, is_kept in self.responses.values() if is_kept]
        return [*kept, *(turn.line for _, turn, _ in self.under_way.values())]

    def is_used(self, line: Line) -> bool:
        return any((other.namespace, other.session_id) == (line.namespace, line.session_id) for other in self.lines())

    def claimed(self) -> list[Line]:
        return [turn.line for _, turn, _ in self.under_way.values()]

    def tip(self, line: Line) -> tuple[str | None, int]:
        """The last response of a branch that is kept, and the tokens of its path."""
        kept = self.kept(line)
        return (kept[-1], self.responses[kept[-1]][2]) if kept else (None, 0)

    def expected_line(self, name: str, previous: str | None, namespace: bytes) -> Line:
        chain = self.chain(previous)
        if not chain:
            return Line(namespace, name, "main")
        session_id = chain[0][1].line.session_id
        near = [(other, turn.line) for other, turn in chain if turn.line.namespace == namespace]
        if near and self.tip(near[0][1])[0] == near[0][0] and near[0][1] not in self.claimed():
            return near[0][1]
        line = Line(namespace, session_id, "main")
        return replace(line, branch=name) if self.is_used(line) else line

    def removed(self, name: str) -> Leaving | None:
        """Forget a response; return what its session loses."""
        line, (tip, num_tokens) = self.responses[name][1].line, self.tip(self.responses[name][1].line)
        self.responses[name][3] = False
        if not self.is_used(line):
            return Leaving(line, True)
        if tip != name or line in self.claimed():
            return None
        return Leaving(line, False, num_tokens, self.tip(line)[1])

    def failed(self, name: str) -> Leaving | None:
        """End a response under way that is not kept; return what its session loses."""
        _, turn, (tip, num_tokens) = self.under_way.pop(name)
        if not self.is_used(turn.line):
            return Leaving(turn.line, True)
        if tip is None or self.tip(turn.line)[0] == tip:
            return None
        return Leaving(turn.line, False, num_tokens, self.tip(turn.line)[1])


def test_random_chains_are_placed_as_by_a_naive_list():
    rng, turns, naive = random.Random(seed_of(7)), ResponseTurns(), NaiveTurns()
    for number in range(400):
        kept = [name for name, entry in naive.responses.items() if entry[3]]
        if kept and rng.random() < 0.3:
            name = rng.choice(kept)
            assert turns.remove(name, naive.responses[name][1]) == naive.removed(name)
        elif len(naive.under_way) < 4 and rng.random() < 0.6:
            name, previous = f"r{number}", rng.choice([None, *kept[-6:]]) if kept else None
            namespace = rng.choice([b"", b"", b"salt"])
            turn = turns.begin(name, naive.chain(previous), namespace, None)
            assert turn.line == naive.expected_line(name, previous, namespace)
            assert turn.owns_session and turn.owns_branch and turn.is_first == (previous is None)
            naive.under_way[name] = previous, turn, naive.tip(turn.line)
        elif naive.under_way:
            name = rng.choice(list(naive.under_way))
            _, turn, _ = naive.under_way[name]
            if rng.random() < 0.4:
                assert turns.end(name, turn) == naive.failed(name)
                continue
            previous, *_ = naive.under_way.pop(name)
            naive.responses[name] = [previous, turn, naive.tip(turn.line)[1] + rng.randint(1, 9), True]
            turns.add(name, turn, naive.responses[name][2])
            assert turns.end(name, turn) is None
    for name in list(naive.under_way):
        assert turns.end(name, naive.under_way[name][1]) == naive.failed(name)
    for name, entry in naive.responses.items():
        if entry[3]:
            assert turns.remove(name, entry[1]) == naive.removed(name)
