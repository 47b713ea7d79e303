"""`kvpage bench serve` against servers that answer rightly, wrongly, partly and not at all."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from support.raw_server import MODELS, completions, event, raw_server, stream, text_events, usage_of, whole  # noqa: E402
from typer.testing import CliRunner, Result  # noqa: E402

from kvpage.benchmarks.serve_options import serve_options  # noqa: E402
from kvpage.tools.cli import app  # noqa: E402

FEW = ["--num-requests", "5", "--input-len", "4", "--output-len", "3"]


@pytest.fixture(autouse=True)
def kept_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


def said(done: Result) -> dict[str, Any]:
    """Return the last line of a benchmark that came to its end."""
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def refused(done: Result) -> str:
    """Return the only line of a benchmark that ends with an error of its own."""
    assert isinstance(done.exception, SystemExit), done.exception
    return str(done.exception)


@pytest.mark.parametrize(
    "options",
    [
        [], ["--rate", "inf"], ["--rate", "2000", "--concurrency", "2"], ["--dataset", "prefix", "--prefix-len", "9"],
        ["--dataset", "sharegpt", "--plain"], ["--concurrency", "1", "--rounds", "2"], ["--model", "other"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_load_on_a_server(options: list[str]) -> None:
    with raw_server() as server:
        done = bench("--url", server.url, *FEW, "--goodput", "ttft:60000", "e2e:60000", *options)
    found = said(done)
    rounds = found["rounds"][server.url]
    assert [(one["ok"], one["failed"], one["aborted"]) for one in rounds] == [(5, 0, 0)] * len(rounds)
    assert all(one["goodput"] == pytest.approx(one["requests_per_second"]) for one in rounds)
    assert "time to first token" in done.output
    bodies = [body for _, body in server.requests if body]
    assert len(bodies) == 3 + 5 * len(rounds)
    assert len({tuple(body["prompt"]) for body in bodies}) == 5 * len(rounds), "a cache would find a round's prompts"
    assert {body["model"] for body in bodies} == {"other" if "other" in options else "model"}
    assert all(body.get("ignore_eos", False) == ("--plain" not in options) for body in bodies)


def test_a_trace(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "input_length": 600, "output_length": 9, "hash_ids": [1, at]} for at in (0, 5, 9, 9)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with raw_server() as server:
        found = said(bench("--url", server.url, "--dataset", "trace", "--trace", str(trace), "--scale", "0.5"))
    assert (found["requests"], found["concurrency"]) == (4, None)
    prompts = [body["prompt"] for _, body in server.requests if body][3:]
    assert {len(prompt) for prompt in prompts} == {300} and len({tuple(prompt[:256]) for prompt in prompts}) == 1


def test_two_servers_take_turns(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    with raw_server() as one, raw_server() as other:
        urls = ["--url", f"one={one.url}", "--url", f"other={other.url}/v1"]
        found = said(bench(*urls, *FEW, "--rounds", "2", "--plot", str(plot)))
    assert plot.stat().st_size > 1000
    assert set(found["rounds"]) == set(found["tokens_per_second"]) == {"one", "other"}


def test_requests_that_fail_are_counted_and_named() -> None:
    num_asked = 0

    def sometimes(path: str, body: Any) -> Iterable[bytes | float]:
        nonlocal num_asked
        num_asked += bool(body and body.get("stream"))
        if num_asked == 3:
            return [whole({"error": {"message": "no room", "type": "x"}}, 503)]
        if num_asked == 4:
            return stream([event({"error": {"message": "it broke"}})])
        return completions(path, body)

    with raw_server(sometimes) as server:
        done = bench("--url", f"a={server.url}", *FEW, "--concurrency", "1")
    found = said(done)["rounds"]["a"][0]
    assert (found["ok"], found["failed"], found["output_tokens"]) == (3, 2, 9)
    assert sorted(found["errors"]) == ["it broke", "status 503: no room"]
    assert "a: a request failed: status 503: no room" in done.output and "it broke" in done.output


def test_all_requests_fail_after_the_gate() -> None:
    num_asked = 0

    def at_first(path: str, body: Any) -> Iterable[bytes | float]:
        nonlocal num_asked
        num_asked += 1
        return completions(path, body) if num_asked <= 4 else []

    with raw_server(at_first) as server:
        found = said(bench("--url", server.url, *FEW))
    assert found["rounds"][server.url][0]["failed"] == 5


def test_clients_that_go_away_are_counted() -> None:
    with raw_server() as server:
        found = said(bench("--url", f"a={server.url}", *FEW, "--abort-share", "1"))["rounds"]["a"][0]
    assert found["failed"] == 0 and found["aborted"] + found["ok"] == 5 and found["aborted"] > 0


def test_another_text_is_named() -> None:
    num_asked = 0

    def another(path: str, body: Any) -> Iterable[bytes | float]:
        nonlocal num_asked
        num_asked += 1
        if body is None or body.get("stream"):
            return completions(path, body)
        return [whole({"choices": [{"text": str(num_asked)}], "usage": usage_of(body)})]

    with raw_server(another) as server:
        done = bench("--url", f"a={server.url}", *FEW)
    assert said(done) and "a: the same prompt gives other texts" in done.output


def wrong_answers(*parts: Any) -> Any:
    """Return a server that lists its models, and gives these parts for each answer that is no stream."""
    return lambda path, body: completions(path, body) if body is None else parts


def wrong_streams(usage: Any) -> Any:
    """Return a server whose streams alone have another usage."""
    return lambda path, body: (
        stream(text_events("aaa", usage)) if body and "stream" in body else completions(path, body)
    )


FEW_TOKENS = {"choices": [], "usage": usage_of({"prompt": [1] * 4, "max_tokens": 1})}
WRONG = {
    "no models": (lambda path, body: [whole({"data": []})], "a: /v1/models lists no models"),
    "other JSON": (lambda path, body: [whole({"models": []})], "a: /v1/models lists no models"),
    "a web page": (lambda path, body: [b"HTTP/1.1 200 OK\r\n\r\n<html>"], "b'<html>' is no JSON object"),
    "a key": (lambda path, body: [whole({"error": {"message": "no key"}}, 401)], "status 401: no key"),
    "not found": (lambda path, body: [whole({"detail": "Not Found"}, 404)], "status 404: {'detail': 'Not Found'}"),
    "usage": (wrong_answers(whole({"choices": [{"text": "a"}], "usage": {}})), "usage must add up"),
    "too few tokens": (wrong_answers(whole(FEW_TOKENS)), "3 tokens were asked for, 1 are counted"),
    "a stream without usage": (wrong_streams(None), "a stream ends with failed: the stream has no usage"),
    "a stream of another usage": (
        wrong_streams(usage_of({"prompt": [1], "max_tokens": 3})),
        "a stream and a whole answer differ in usage",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_answers_wrongly_is_not_measured(name: str) -> None:
    answer, words = WRONG[name]
    with raw_server(answer) as server:
        assert words in refused(bench("--url", f"a={server.url}", *FEW))


def test_a_model_that_the_server_lacks() -> None:
    with raw_server() as server:
        assert "model must be one of model, other, got 'third'" in refused(
            bench("--url", server.url, "--model", "third")
        )
    assert MODELS["data"]


def test_nobody_listens() -> None:
    with raw_server() as server:
        pass
    assert "kvpage bench serve: no server at 127.0.0.1:" in refused(bench("--url", server.url))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--url or --serve must be given"),
        (["--url", "kvpage=http://a", "--serve", "tiny"], "--url must not be named kvpage or vllm"),
        (["--url", "http://a", "--compare"], "need --serve"),
        (["--url", "http://a", "--vllm", "python"], "need --serve"),
        (["--serve", "tiny", "--compare", "--rate", "1"], "--compare excludes"),
        (["--url", "http://a", "--dataset", "trace"], "must be given together"),
        (["--url", "http://a", "--trace", "x"], "must be given together"),
        (["--url", "http://a", "--rate", "0"], "must be positive"),
        (["--url", "http://a", "--rate", "nan"], "must be positive"),
        (["--url", "http://a", "--timeout", "inf"], "must be finite"),
        (["--url", "http://a", "--scale", "1.1"], "must be in [0, 1]"),
        (["--url", "http://a", "--abort-share", "nan"], "must be in [0, 1]"),
        (["--url", "http://a", "--goodput", "speed:3"], "must name one of ttft, tpot, itl, e2e"),
        (["--url", "http://a", "--goodput", "ttft:-1"], "must be positive"),
        (["--url", "http://a", "--concurrency", "0"], "must be a positive integer"),
        (["--url", "http://a", "--vocab", "10"], "must be more than 10"),
        (["--url", "http://a", "--seed", "-1"], "must not be negative"),
        (["--url", "http://a", "--wrong"], "unrecognized arguments"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_options("", arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "ftp://a"], "url must be like http://127.0.0.1:8000, got 'ftp://a'"),
        (["--url", "http://a", "--dataset", "trace", "--trace", "missing"], "No such file"),
    ],
)
def test_errors_before_the_first_request(arguments: list[str], words: str) -> None:
    assert words in refused(bench(*arguments))


@pytest.mark.parametrize("line", ["{", '{"timestamp": 0}', ""])
def test_a_trace_that_is_none(line: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line)
    words = refused(bench("--url", "http://a", "--dataset", "trace", "--trace", str(trace)))
    assert words.startswith("kvpage bench serve: ")
