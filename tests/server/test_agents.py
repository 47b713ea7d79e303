"""An agent by OpenAI's client: tools, turns, streams; and the bodies that coding agents send."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from support import pages
from support.agent_bodies import CHAT_BODY, MESSAGES_BODY, RESPONSES_BODY
from support.agent_server import AgentServer, agent_server, forced
from support.http_server import serving
from support.server_app import NAME

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

NAMES = ["read", "write", "list", "search", "run"]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}}}
    for name in NAMES
]  # fmt: skip


def call_of(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[AgentServer, Any]]:
    with (
        agent_server("hermes", thinks=True) as server,
        serving(server.app, server.live) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield server, client


def test_an_agent_of_twelve_turns_with_streamed_calls(served):
    server, client = served
    messages: list[Any] = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "go on"}]
    asked = [(NAMES[turn % 5], {"path": f"file {turn}", "line": turn}) for turn in range(11)]
    texts = [
        f"<think>\nturn {turn}\n</think>\n\nNext.\n" + call_of(name, **args) for turn, (name, args) in enumerate(asked)
    ]
    texts[3] += "\n" + call_of("run")
    num_cached, num_calls = 0, 0
    with forced(server, [*texts, "<think>\nso\n</think>\n\nIt is done."]):
        for turn in range(12):
            with client.chat.completions.stream(
                model=NAME, messages=messages, tools=TOOLS, stream_options={"include_usage": True}
            ) as stream:
                pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
                answer = stream.get_final_completion()
            choice, usage = answer.choices[0], answer.usage
            assert usage.prompt_tokens_details.cached_tokens >= num_cached
            num_cached = usage.prompt_tokens_details.cached_tokens
            messages.append(choice.message.model_dump(include={"role", "content", "tool_calls", "reasoning_content"}))
            if choice.finish_reason == "stop":
                break
            calls = choice.message.tool_calls
            assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == asked[turn]
            assert len(pieces) > 3 and choice.message.reasoning_content == f"turn {turn}"
            num_calls += len(calls)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": f"result {turn}"} for call in calls]
    assert choice.message.content == "It is done." and num_calls == 12 and num_cached > 200


def test_the_clients_parsed_tools_are_strict_and_guided(served):
    class Read(pydantic.BaseModel):
        path: str = pydantic.Field(pattern="^[a-c]{1,3}$")
        line: int = pydantic.Field(ge=0, le=9)

    _, client = served
    answer = client.chat.completions.parse(
        model=NAME, messages=[{"role": "user", "content": "x"}], tools=[openai.pydantic_function_tool(Read)],
        tool_choice="required", parallel_tool_calls=False, temperature=1.0, seed=1,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Read)


def test_a_client_that_goes_amid_a_call_leaves_nothing(served):
    server, client = served
    stream = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "x"}], tools=TOOLS, tool_choice="required", stream=True,
        temperature=1.5, extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}], max_tokens=1)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT_BODY), ("/v1/responses", RESPONSES_BODY), ("/v1/messages", MESSAGES_BODY)],
    ids=["chat", "responses", "messages"],
)
def test_a_coding_agents_body_is_answered(served, path, body):
    server, _ = served
    for stream in (False, True):
        answer = asyncio.run(server.post(path, {**body, "stream": stream}))
        assert answer.status_code == 200, answer.text
    assert len(body["tools"]) == 20


@pytest.mark.parametrize("name", [tool["function"]["name"] for tool in CHAT_BODY["tools"]])
def test_each_tool_of_a_coding_agent_can_be_demanded(served, name):
    server, _ = served
    choice = {"type": "function", "function": {"name": name}}
    body = {**CHAT_BODY, "stream": False, "tool_choice": choice, "max_tokens": 40, "enable_thinking": False}
    answer = asyncio.run(server.post("/v1/chat/completions", body))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name


def test_the_loop_of_the_page_is_an_agent(served):
    _, client = served
    names: dict[str, Any] = {}
    exec(pages.examples(pages.GUIDES / "serve.md")[0].replace("tiny-model", NAME), names)
    lines: list[str] = []
    functions = {"read": lambda path, line: lines.append(f"{path}:{line}") or "x"}
    server, messages = served[0], [{"role": "user", "content": "read it"}]
    with forced(server, [f"<think>\nhm\n</think>\n\n{call_of('read', path='a', line=1)}", "It says x."]):
        assert names["run_agent"](client, messages, TOOLS, functions) == "It says x."
    assert lines == ["a:1"] and len(messages) == 4
