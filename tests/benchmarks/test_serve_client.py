"""The client of `kvpage bench serve`: bytes in any parts to events, failures named, nothing left behind."""

import asyncio
import itertools
import time
from typing import Any

import pytest
from support.raw_server import USAGE, chunk, event, raw_server, stream, text_events, whole

from kvpage.benchmarks.serve_client import Reply, ServeClient
from kvpage.benchmarks.serve_load import Target, ask, outcome_of, run_load
from kvpage.benchmarks.serve_requests import ServeRequest

REQUEST = ServeRequest([11, 12, 13], 2)


def target_of(url: str, timeout: float = 60.0, **fields: Any) -> Target:
    return Target("fake", ServeClient(url, timeout=timeout), "model", **fields)


def asked(parts: Any, request: ServeRequest = REQUEST, timeout: float = 60.0) -> Any:
    """Return the outcome of a request that a server answers with these parts."""
    with raw_server(lambda path, body: parts) as server:
        return asyncio.run(ask(target_of(server.url, timeout), request))


def reply_of(data: bytes, sizes: "itertools.cycle[int]") -> Reply:
    """Return a reply that came in reads of such sizes."""
    reply, number = Reply(0.0), 0
    while data:
        size = next(sizes)
        reply.reads.append((float(number), data[:size]))
        data, number = data[size:], number + 1
    reply.end = float(number)
    return reply


@pytest.mark.parametrize("sizes", [[1], [2], [3], [7, 1], [16, 17], [1 << 20]])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_are_read_from_any_parts(sizes: list[int], end: bytes) -> None:
    events = [one.replace(b"\n\n", end) for one in text_events(["one", "", "zwei", "три"])]
    found = reply_of(b"".join(stream(events)), itertools.cycle(sizes)).events()
    assert [one["choices"][0]["text"] for _, one in found[:-1]] == ["one", "", "zwei", "три"]
    assert found[-1][1]["usage"] == USAGE
    times = [when for when, _ in found]
    assert times == sorted(times)


def test_an_event_counts_from_its_last_byte() -> None:
    head, *chunks = stream(text_events(["a", "b"]))
    reply = Reply(0.0, [(1.0, head + chunks[0][:-9]), (2.0, chunks[0][-9:] + chunks[1]), (3.0, b"".join(chunks[2:]))])
    assert [when for when, _ in reply.events()] == [2.0, 2.0, 3.0]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_framing_is_taken_away(size: int) -> None:
    parts = [b"a", b"bc\r\n", b"0\r\n\r\n", b"x" * 300]
    head, *_ = stream([])
    data = head + b"".join(map(chunk, parts)) + b"0\r\n\r\n"
    assert reply_of(data, itertools.cycle([size])).text() == b"".join(parts)


def test_a_stream_gives_text_times_and_usage() -> None:
    outcome = asked(stream(text_events(["he", "llo"])))
    assert (outcome.status, outcome.text, len(outcome.times)) == ("ok", "hello", 2)
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.num_cached_tokens) == (3, 2, 1)
    assert outcome.begin <= outcome.times[0] <= outcome.times[1] <= outcome.end


def test_a_chat_gives_its_deltas() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "he"}, {"content": None}, {"content": "llo"}]
    events = [event({"choices": [{"delta": delta}]}) for delta in deltas]
    with raw_server(lambda path, body: stream([*events, event({"choices": [], "usage": USAGE})])) as server:
        outcome = asyncio.run(ask(target_of(server.url, endpoint="chat"), REQUEST))
    assert (outcome.status, outcome.text, len(outcome.times)) == ("ok", "hello", 2)
    head, body = server.requests[0]
    assert head.startswith("POST /v1/chat/completions ")
    assert body["messages"] == [{"role": "user", "content": "w11 w12 w13"}]


def test_what_is_sent() -> None:
    with raw_server() as server:
        client = ServeClient(f"{server.url}/v1", api_key="secret")
        asyncio.run(ask(Target("fake", client, "model"), REQUEST))
    head, body = server.requests[0]
    assert head.startswith("POST /v1/completions ") and "Authorization: Bearer secret\r\n" in head
    assert body == {
        "model": "model", "prompt": [11, 12, 13], "max_tokens": 2, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


FAILURES = {
    "refused": ([whole({"error": {"message": "no such key"}}, 401)], "status 401: no such key"),
    "no JSON": ([b"HTTP/1.1 502 Bad\r\n\r\n<html>"], "status 502: <html>"),
    "vLLM's old shape": ([whole({"message": "too long"}, 400)], "status 400: too long"),
    "error in the stream": (stream([event({"error": {"message": "it broke"}}), b"data: [DONE]\n\n"]), "it broke"),
    "broken off": (stream(text_events(["a"]))[:2], "the stream has no usage"),
    "no usage": (stream(text_events(["a"], None)), "the stream has no usage"),
    "no object": (stream([b"data: 3\n\n"]), "b'3' is no JSON object"),
    "half an object": (stream([b'data: {"a\n\n']), "is no JSON object"),
    "bad framing": ([*stream([])[:1], b"zz\r\n"], "invalid literal"),
    "no HTTP": ([b"SSH-2.0"], "the server closed the connection after 7 bytes"),
    "nothing": ([], "the server closed the connection after 0 bytes"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_named(name: str) -> None:
    parts, words = FAILURES[name]
    outcome = asked(parts)
    assert outcome.status == "failed" and words in outcome.error


def test_a_server_that_takes_too_long_has_failed() -> None:
    outcome = asked([*stream(text_events(["a"]))[:2], 5.0], timeout=0.1)
    assert (outcome.status, outcome.error) == ("failed", "no answer within 0.1 s")


def test_nobody_listens() -> None:
    with raw_server() as server:
        pass
    outcome = asyncio.run(ask(target_of(server.url), REQUEST))
    assert outcome.status == "failed" and outcome.error.startswith("no server at 127.0.0.1:")
    assert outcome_of(Reply(1.0, end=2.0, error="x")).error == "x"


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http:///v1"])
def test_a_url_must_be_one(url: str) -> None:
    with pytest.raises(ValueError, match="url must be like"):
        ServeClient(url)


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("localhost:8000", "GET /v1/models HTTP/1.1\r\nHost: localhost:8000\r\n"),
        ("http://host/", "GET /v1/models HTTP/1.1\r\nHost: host:80\r\n"),
        ("https://host/some/v1/", "GET /some/v1/models HTTP/1.1\r\nHost: host:443\r\n"),
        ("http://[::1]:9/v1", "GET /v1/models HTTP/1.1\r\nHost: [::1]:9\r\n"),
    ],
)
def test_urls(url: str, line: str) -> None:
    assert ServeClient(url).request("GET", "/v1/models").decode().startswith(line)


def slow(path: str, body: Any) -> Any:
    head, *chunks = stream(text_events(["a"] * 50))
    yield head
    for part in chunks:
        yield part
        yield 0.02


def test_a_client_goes_away() -> None:
    with raw_server(slow) as server:
        outcome = asyncio.run(ask(target_of(server.url), ServeRequest([11], 50, leaves_after=2)))
        assert outcome.status == "aborted"
        deadline = time.monotonic() + 120
        while not server.num_left and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.num_left == 1


def test_cancellation_ends_a_load_at_once() -> None:
    """Ctrl-C cancels: no request is sent after it, and the open ones are closed."""

    async def cancelled(url: str) -> None:
        load = asyncio.ensure_future(run_load(target_of(url), [REQUEST] * 3, 1, lambda: None))
        while not server.requests:
            await asyncio.sleep(0.005)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load

    with raw_server(slow) as server:
        asyncio.run(cancelled(server.url))
        deadline = time.monotonic() + 120
        while not server.num_left and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (len(server.requests), server.num_left) == (1, 1)


@pytest.mark.parametrize("concurrency", [1, 2, 3, 7])
def test_so_many_are_open_at_most(concurrency: int) -> None:
    counts, num_open = [], 0

    def counted(path: str, body: Any) -> Any:
        nonlocal num_open
        num_open += 1
        counts.append(num_open)
        yield 0.01
        yield from stream(text_events(["a", "b"]))
        num_open -= 1

    ended: list[None] = []
    with raw_server(counted) as server:
        requests = [ServeRequest([index], 2) for index in range(6)]
        outcomes = asyncio.run(run_load(target_of(server.url), requests, concurrency, lambda: ended.append(None)))
    assert max(counts) <= min(concurrency, 6) and len(ended) == len(outcomes) == 6
    assert all(one.status == "ok" for one in outcomes)


def test_arrivals_are_kept_and_count() -> None:
    """The second arrives while the first is open, waits for it, and its time counts from the arrival."""

    def answer(path: str, body: Any) -> Any:
        yield 0.1
        yield from stream(text_events(["a", "b"]))

    requests = [ServeRequest([1], 2, arrival=0.0), ServeRequest([2], 2, arrival=0.05)]
    with raw_server(answer) as server:
        first, second = asyncio.run(run_load(target_of(server.url), requests, 1, lambda: None))
    assert second.begin - first.begin == pytest.approx(0.05, abs=1e-9)
    assert second.times[0] >= first.end and second.measures()["ttft"][0] >= 100
