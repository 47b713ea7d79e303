"""/kvpage/explain and `kvpage explain URL`: right for the caller's own prompts, and silent about all others."""

import asyncio
import http.server
import json
import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from server.test_page import first_picture
from support.dict_store import DictStore
from support.http_server import listening_server
from support.models import make_model
from support.seeds import seed_of
from support.server_app import NAME, Server, make_tokenizer, running_server
from support.waiting import until

from kvpage.blocks.explain import Explanation, StoreReach, StoreVerdict
from kvpage.server import ApiKey, ServerConfig
from kvpage.server.running.explainer import plain

typer_testing = pytest.importorskip("typer.testing")

from kvpage.tools.cli import app  # noqa: E402

PATH, B = "/kvpage/explain", 4
KEYS = [ApiKey("a" * 20, "ann"), ApiKey("b" * 20, "bob"), ApiKey("g" * 20, None)]
ANN, BOB = ({"authorization": f"Bearer {key.key}"} for key in KEYS[:2])
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
WRONG_URLS = "ftp://host", "host", "http://host:x", "http://host:99999", "http://[::1", "http://host/a b"
FORBIDDEN = "elsewhere", "version", "namespace", "error"


@pytest.fixture(scope="module")
def explained() -> Iterator[Server]:
    with running_server(explains_requests=True) as made:
        yield made


def ask(server: Server, body: dict[str, Any], path: str = PATH, **headers: str) -> dict[str, Any]:
    answer = asyncio.run(server.post(path, body, **headers))
    assert answer.status_code == 200, answer.text
    return answer.json()


def found_by(server: Server, body: dict[str, Any], **headers: str) -> int:
    """Return how many tokens of its prompt a request finds."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    usage = ask(server, {**body, "max_tokens": 1}, path, **headers)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 3 * B, 3 * B + 1])
def test_a_request_finds_what_was_told(explained: Server, num_tokens: int) -> None:
    prompt = list(range(40, 40 + num_tokens))
    for _ in range(2):
        told = ask(explained, {"prompt": prompt, "cache_salt": f"of {num_tokens}"})
        found = found_by(explained, {"prompt": prompt, "cache_salt": f"of {num_tokens}"})
        assert (told["num_tokens"], told["num_cached_tokens"]) == (num_tokens, found)
    num_whole = num_tokens // B * B
    assert found == min(num_whole, num_tokens - 1)
    group = told["groups"][0]
    assert group["ending"] == ("prompt" if num_whole >= num_tokens - 1 else "not_cached")
    assert group["num_tokens"] == num_whole


def test_a_chat_is_explained_as_it_would_be_asked(explained: Server) -> None:
    body = {"messages": MESSAGES, "model": NAME}
    first = ask(explained, body)
    assert first["num_cached_tokens"] == found_by(explained, body)
    second = ask(explained, body)
    num_tokens = second["num_tokens"]
    assert second["num_cached_tokens"] == min(num_tokens // B * B, num_tokens - 1) == found_by(explained, body)
    other = {"messages": [{"role": "user", "content": "the quick red fox, and a dog"}]}
    told = ask(explained, other)
    [group] = told["groups"]
    assert group["ending"] == "different" and group["token_text"] and group["cached_token_text"]
    assert f"(token {group['differs_at']} is {group['token']}" in told["text"]
    assert told["num_cached_tokens"] == found_by(explained, other)


def test_random_questions_over_http(explained: Server) -> None:
    rng, salts = random.Random(seed_of(42)), ("x", "y")

    async def life() -> None:
        async with explained.client() as client:
            for _ in range(60):
                prompt = [rng.choice((30, 31)) for _ in range(rng.randrange(1, 6 * B))]
                body = {"prompt": prompt, "cache_salt": rng.choice(salts)}
                told = (await client.post(PATH, json=body)).json()
                usage = (await client.post("/v1/completions", json={**body, "max_tokens": 1})).json()["usage"]
                assert told["num_cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"], body

    asyncio.run(life())


def test_asking_changes_nothing(explained: Server) -> None:
    before = explained.engine.stats()
    ask(explained, {"prompt": list(range(60))})
    assert explained.engine.stats() == before


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": [[1, 2], [3]]}, 400, "single"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1, 10**6]}, 400, "ids in"),
        ({"prompt": [1], "echo": True, "logprobs": 1}, 400, "computes all"),
        ({"prompt": [1], "model": "other"}, 404, "does not exist"),
        ({"prompt": list(range(2000))}, 400, "tokens"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, 400, "no such role"),
        ({}, 400, "prompt is required"),
    ],
)
def test_wrong_questions(explained: Server, body: dict[str, Any], status: int, words: str) -> None:
    answer = asyncio.run(explained.post(PATH, body))
    assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text


# --- what others have ------------------------------------------------------------------------------------------------


def same(told: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare what is told of a prompt: it must not depend on what others have."""
    assert told == other
    assert not {*FORBIDDEN} & ({*told} | {name for group in told["groups"] for name in group})


@pytest.mark.parametrize("kept", [1, B, 3 * B])
def test_nothing_of_another_tenant_or_salt_is_told(kept: int) -> None:
    """The same question is asked before and after others have computed the prompt, have lost it, and in each tenant."""
    prompt = list(range(50, 50 + 5 * B))
    body = {"prompt": prompt}
    with running_server(ServerConfig([NAME], KEYS), explains_requests=True) as server:
        found_by(server, {"prompt": [*prompt[:kept], 9, 9]}, **BOB)
        before = ask(server, body, **BOB)
        for salt in ({}, {"cache_salt": "secret"}):
            found_by(server, {**body, **salt}, **ANN)
        same(ask(server, body, **BOB), before)
        same(ask(server, {**body, "cache_salt": "secret"}, **BOB), ask(server, {**body, "cache_salt": "free"}, **BOB))
        same(ask(server, {**body, "cache_salt": "guess"}, **ANN), ask(server, {**body, "cache_salt": "free"}, **BOB))
        gateway = {"authorization": f"Bearer {KEYS[2].key}", "x-tenant-id": "cid"}
        assert ask(server, body, **gateway)["num_cached_tokens"] == 0
        assert ask(server, body, **ANN)["num_cached_tokens"] == len(prompt) - 1
        server.live.call(lambda engine: engine.manager.space.drop_namespace(b"\xffann\xff")).result()
        same(ask(server, body, **BOB), before)


def test_a_stranger_is_told_nothing() -> None:
    with running_server(ServerConfig([NAME], KEYS)) as server:
        for headers in ({}, {"authorization": "Bearer x"}, {**ANN, "x-tenant-id": "bob"}):
            answer = asyncio.run(server.post(PATH, {"prompt": [1]}, **headers))
            assert answer.status_code in (401, 403)


def test_what_a_caller_is_not_told() -> None:
    """Other namespaces, the name of a version, and the words of a store that has failed."""
    failed = StoreReach(0, StoreVerdict.FAILED, error="OSError('redis://10.0.0.1')")
    told = plain(Explanation(5, 0, (), (b"bob's salt", 4), failed, version=("step-200", 3)), {})
    text = json.dumps(told)
    assert "bob" not in text and "step-200" not in text and "10.0.0.1" not in text
    assert told["num_tokens_of_other_weights"] == 3 and "other ones have 3 tokens" in told["text"]
    assert told["store"] == {"num_tokens": 0, "verdict": "failed", "reason": "it has failed", "groups": []}


def test_while_a_store_is_asked_other_questions_go_on(monkeypatch: Any) -> None:
    answers, asked = threading.Event(), list[int]()

    class Slow(DictStore):
        def explain(self, tokens: Any, namespace: bytes = b"") -> Explanation:
            answers.wait()
            return super().explain(tokens, namespace)

    with running_server(store_deadline=120.0) as server:
        server.live.call(lambda engine: engine.use_store(Slow())).result()
        ask_engine = server.engine.ask
        monkeypatch.setattr(server.engine, "ask", lambda *arguments: asked.append(1) or ask_engine(*arguments))

        async def life() -> list[Any]:
            questions = [asyncio.ensure_future(server.post(PATH, {"prompt": [number] * 9})) for number in range(20)]
            while len(asked) < len(questions):
                await asyncio.sleep(0.001)
            answers.set()
            return [answer.json()["store"]["verdict"] for answer in await asyncio.gather(*questions)]

        assert asyncio.run(life()) == ["no_more"] * 20


def test_a_store_is_not_asked_for_a_caller_who_has_gone() -> None:
    may_answer, asked = threading.Event(), list[int]()

    class Slow(DictStore):
        def explain(self, tokens: Any, namespace: bytes = b"") -> Explanation:
            asked.append(int(tokens[0]))
            may_answer.wait()
            return super().explain(tokens, namespace)

    with running_server(store_deadline=120.0) as server:
        server.live.call(lambda engine: engine.use_store(Slow())).result()

        async def life() -> None:
            first = asyncio.ensure_future(server.live.explain([1] * 9))
            while not asked:
                await asyncio.sleep(0.001)
            gone = asyncio.ensure_future(server.live.explain([2] * 9))
            await asyncio.sleep(0)  # its call is queued
            server.live.call(lambda engine: None).result()  # it is done, and the event loop has not heard of it
            gone.cancel()
            last = asyncio.ensure_future(server.live.explain([3] * 9))
            await asyncio.wait([gone])
            may_answer.set()
            await asyncio.gather(first, last)

        asyncio.run(life())
        assert asked == [1, 3]


# --- the page and the command line -----------------------------------------------------------------------------------


def test_the_page_has_a_reason_for_each_request() -> None:
    with running_server(explains_requests=True) as server:

        async def life() -> list[Any]:
            for prompt in ([*range(1, 10)], [1, 2, 3, 4, 5, 6, 30, 31, 32], [*range(1, 10)]):
                await server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
            await server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1, "echo": True, "logprobs": 1})
            return (await first_picture(server))["ended"]

        scored, last, second, first = asyncio.run(life())
        assert scored["why"] is None
        assert last["why"] == ["attention: 8 tokens, then the prompt ends"]
        assert second["why"] == [
            "attention: 6 tokens, then the prompt differs from what is cached (token 6 is 30, cached is 7)"
        ]
        assert first["why"] == ["attention: 0 tokens, then nothing more is cached: it was never computed, or evicted"]


def test_a_running_request_has_one_too() -> None:
    with running_server(explains_requests=True) as server:
        request = server.live.submit([1, 2, 3, 4, 5])
        until(lambda: any(state.explanation for state in server.live.call(lambda e: e.request_states(9)).result()))
        request.abort()


@pytest.fixture(scope="module")
def listening() -> Iterator[tuple[str, Server]]:
    with listening_server(ServerConfig([NAME], KEYS[:2])) as (url, server):
        found_by(server, {"messages": MESSAGES}, **ANN)
        yield url, server


def cli(*arguments: str, key: str | None = KEYS[0].key, **options: Any) -> Any:
    environment = {"KVPAGE_API_KEY": key} if key else {}
    return typer_testing.CliRunner().invoke(app, ["explain", *arguments], env=environment, **options)


def test_the_command_line_asks_a_server(listening: tuple[str, Server], tmp_path: Any) -> None:
    url, server = listening
    chat = tmp_path / "chat.json"
    for content in (MESSAGES, {"messages": MESSAGES, "max_tokens": 4}):
        chat.write_text(json.dumps(content))
        done = cli(url, "--messages", str(chat))
        assert done.exit_code == 0 and "then the prompt ends" in done.output, done.output
    told = json.loads(cli(f"{url}/v1/", "--messages", "-", "--json", input=json.dumps(MESSAGES)).output)
    assert told["num_cached_tokens"] == told["num_tokens"] - 1
    other = cli(url, "--messages", str(chat), key=KEYS[1].key)
    assert "0 of" in other.output.splitlines()[0]
    salted = cli(url, "--messages", str(chat), "--cache-salt", "x", "--json")
    assert json.loads(salted.output)["num_cached_tokens"] == 0
    different = cli(url, "--prompt", "user: the quick red fox")
    assert "the prompt has" in different.output and "cached is" in different.output
    tokens = server.tokens("user: the quick")
    assert json.loads(cli(url, "--tokens", "-", "--json", input=str(tokens)).output)["num_tokens"] == len(tokens)


def test_wrong_command_lines(listening: tuple[str, Server], tmp_path: Any) -> None:
    url, _ = listening
    for arguments, words in (
        ([], "either the URL"),
        ([url, "--store", "memory://", "--tokens", "-"], "either the URL"),
        ([url], "give one of"),
        ([url, "--prompt", "x", "--tokens", "-"], "give one of"),
        (["--store", "memory://", "--prompt", "x"], "needs --tokens"),
        (
            ["--store", "memory://", "--tokens", "-", "--api-key", "x"],
            "--api-key must come with the URL of a server, got it with --store",
        ),
        ([url, "--prompt", "x", "--namespace", "n"], "--cache-salt"),
        ([url, "--messages", "-"], "messages must be"),
        ([url, "--messages", str(tmp_path / "none")], "none"),
        *(([wrong, "--prompt", "x"], "URL must be like") for wrong in WRONG_URLS),
        ([url, "--prompt", "x", "--api-key", "a\nb"], "the key must have"),
        ([url, "--prompt", "x", "--api-key", "schlüssel"], "the key must have"),
        ([url, "--prompt", "x", "--model", "other"], "404: the model 'other'"),
    ):
        done = cli(*arguments, input="3")
        assert isinstance(done.exception, SystemExit) and words in str(done.exception), (arguments, done.exception)
        assert "schl" not in str(done.exception)
    assert "401" in str(cli(url, "--prompt", "x", key=None).exception)


class Foreign(http.server.BaseHTTPRequestHandler):
    """Answers a question by another address, or by a page, or by no HTTP at all."""

    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_POST(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/none"):
            self.wfile.write(b"\x1b[31m hello\r\n\r\n")
            return
        code = 302 if self.path.startswith("/moved") else 418
        self.send_response(code, "x")
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(b"a \x1b[31m page")

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))

    def log_message(self, *words: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("path", "words"), [("/moved", "302"), ("/page", "418: a  [31m page"), ("/none", "answer in HTTP")]
)
def test_a_server_that_is_another(path: str, words: str) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Foreign) as foreign:
        thread = threading.Thread(target=foreign.serve_forever)
        thread.start()
        try:
            done = cli(f"http://127.0.0.1:{foreign.server_port}{path}", "--prompt", "x")
        finally:
            foreign.shutdown()
            thread.join()
    assert isinstance(done.exception, SystemExit) and words in str(done.exception), repr(done.exception)
    assert Foreign.seen.pop() == (f"{path}{PATH}", f"Bearer {KEYS[0].key}")  # and nobody else was asked
    assert not Foreign.seen


def test_an_adapter_and_the_version_of_the_weights(tmp_path: Any) -> None:
    from support.lora_files import targets, write_adapter

    model = make_model("llama", vocab_size=len(make_tokenizer()))
    folder = write_adapter(tmp_path / "lora", model, targets(model))
    with running_server(ServerConfig([NAME], adapter_names=["lora"]), model=model) as server:
        server.live.call(lambda engine: engine.load_adapter("lora", folder)).result()
        body = {"prompt": list(range(20))}
        found_by(server, body)
        assert ask(server, {**body, "model": "lora"})["num_cached_tokens"] == 0
        assert ask(server, body)["num_cached_tokens"] == 19
        asyncio.run(server.live.update_weights("other", lambda: None))
        told = ask(server, body)
        assert (told["num_cached_tokens"], told["num_tokens_of_other_weights"]) == (0, 20)
        assert "other" not in told["text"].replace("other ones", "")
