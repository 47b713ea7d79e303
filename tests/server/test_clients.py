"""Clients that others have written, over a socket: OpenAI's, curl; and lines read by hand."""

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.http_server import listening_server
from support.server_app import NAME, Server, make_engine

from kvpage.server import ApiKey, ServerConfig
from kvpage.serving import SamplingParams

openai = pytest.importorskip("openai")
KEY = "k" * 20
FIRST = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog. "}]
SECOND = [*FIRST, {"role": "assistant", "content": "def f(x): return x"}, {"role": "user", "content": "true or false?"}]
WITH_TOKENS = {"return_token_ids": True}
PROMPTS = ["the quick brown fox", "def f(x):\n    return", "Grüße aus Köln 😀"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Server]]:
    with listening_server(ServerConfig([NAME], [ApiKey(KEY, "ann")])) as found:
        yield found
        assert found[1].live.stats().num_unfinished == 0


@pytest.fixture
def client(served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key=KEY, max_retries=0, timeout=300) as found:
        yield found


def chat_tokens(server: Server, messages: list[dict[str, str]]) -> list[int]:
    return server.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def oracle(prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """The tokens of an Engine of its own for the same prompts."""
    outputs = make_engine().generate(prompts, SamplingParams(**params))
    return [sample.token_ids for output in outputs for sample in output.samples]


# --- openai ---


def test_openai_chats_and_its_second_turn_is_cached(served, client):
    _, server = served
    wanted = oracle([chat_tokens(server, turns) for turns in (FIRST, SECOND)], max_tokens=6)
    for turns, tokens in zip((FIRST, SECOND), wanted, strict=True):
        answer = client.chat.completions.create(
            model=NAME, messages=turns, max_tokens=6, temperature=0, extra_body=WITH_TOKENS
        )
        assert answer.choices[0].token_ids == tokens and answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == server.tokenizer.decode(tokens)
        assert answer.usage.prompt_tokens == len(chat_tokens(server, turns))
    assert answer.usage.prompt_tokens_details.cached_tokens >= len(chat_tokens(server, FIRST)) - 8


def test_openai_streams_what_it_answers_whole(served, client):
    _, server = served
    arguments = {"model": NAME, "max_tokens": 9, "seed": 7, "temperature": 0.8, "n": 2}
    for prompt in PROMPTS:
        whole = client.completions.create(prompt=prompt, **arguments, extra_body=WITH_TOKENS)
        texts, tokens, usage = ["", ""], [[], []], None
        options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": WITH_TOKENS}
        for event in client.completions.create(prompt=prompt, **arguments, **options):
            for choice in event.choices:
                texts[choice.index] += choice.text
                tokens[choice.index] += getattr(choice, "token_ids", None) or []
            usage = event.usage or usage
        assert texts == [choice.text for choice in whole.choices]
        assert tokens == [choice.token_ids for choice in whole.choices]
        assert tokens == oracle([server.tokens(prompt)], max_tokens=9, seed=7, temperature=0.8, n=2)
        assert usage.completion_tokens == whole.usage.completion_tokens == 18


def test_openai_knows_each_error(served, client):
    url, _ = served
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="none", messages=FIRST)
    assert found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model=NAME, messages=FIRST, temperature=-1)
    assert found.value.param == "temperature"
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="x" * 20, max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert [one.id for one in client.models.list()] == [NAME]


# --- by hand ---


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": NAME, "messages": FIRST, "max_tokens": 5, "temperature": 0, **fields}).encode()


HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}


def test_the_bytes_of_a_stream(served):
    """Each event is one line and an empty one; the connection serves the next request."""
    url, server = served
    connection = http.client.HTTPConnection("127.0.0.1", httpx.URL(url).port, timeout=300)
    for _ in range(2):
        connection.request("POST", "/v1/chat/completions", body_of(stream=True), HEADERS)
        response = connection.getresponse()
        assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["transfer-encoding"] == "chunked" and response.headers["cache-control"] == "no-cache"
        *events, rest = response.read().split(b"\n\n")
        assert rest == b"" and events.pop() == b"data: [DONE]"
        assert all(event.startswith(b"data: {") and b"\n" not in event for event in events)
        deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events]
        (tokens,) = oracle([chat_tokens(server, FIRST)], max_tokens=5)
        assert "".join(delta.get("content", "") for delta in deltas) == server.tokenizer.decode(tokens)
    connection.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl is installed")
def test_curl(served):
    url, _ = served
    headers = [part for name, value in HEADERS.items() for part in ("-H", f"{name}: {value}")]
    command = ["curl", "-sN", "--noproxy", "*", "--max-time", "60", *headers, "-d", "@-", f"{url}/v1/chat/completions"]
    done = subprocess.run(command, input=body_of(stream=True), capture_output=True, check=True, timeout=600)
    assert done.stdout.startswith(b"data: {") and done.stdout.endswith(b"\n\ndata: [DONE]\n\n")
