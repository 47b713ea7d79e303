"""/v1/chat/completions: messages by the chat template, and the answer's shapes."""

import asyncio

import pytest
from server.test_completions import ask, generated
from support.server_app import NAME, events_of, running_server

from kvpage.server import ServerConfig

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "be short"}, {"role": "user", "content": "the lazy dog"}]
RENDERED = "system: be short\nuser: the lazy dog\nassistant:"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def rendered(server, **fields) -> str:
    return ask(server, PATH + "/render", **{"messages": MESSAGES, **fields}).json()["prompt"]


def refused(server, **fields) -> dict:
    answer = asyncio.run(server.post(PATH, {"messages": MESSAGES, **fields}))
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_an_answer_is_that_of_the_rendered_prompt(server):
    answer = ask(server, PATH, messages=MESSAGES, max_tokens=6, return_token_ids=True).json()
    [[expected]] = generated(server, [server.tokens(RENDERED)], max_tokens=6)
    [choice] = answer["choices"]
    assert choice["token_ids"] == expected
    text = server.tokenizer.decode(expected, skip_special_tokens=True)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")


def test_a_stream_begins_with_the_role(server):
    whole = ask(server, PATH, messages=MESSAGES, max_tokens=6).json()["choices"][0]["message"]["content"]
    events = events_of(ask(server, PATH, messages=MESSAGES, max_tokens=6, stream=True).text)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == whole
    assert events[0]["object"] == "chat.completion.chunk" and events[-1]["choices"][0]["finish_reason"] == "length"


def test_without_a_limit_a_chat_goes_on_to_the_models(server):
    answer = ask(server, PATH, messages=MESSAGES).json()
    assert answer["usage"]["total_tokens"] == server.engine.max_model_len


def test_both_names_of_the_limit_are_known(server):
    for fields in ({"max_completion_tokens": 2}, {"max_tokens": 2}, {"max_tokens": 9, "max_completion_tokens": 2}):
        assert ask(server, PATH, messages=MESSAGES, **fields).json()["usage"]["completion_tokens"] == 2


def test_content_may_come_in_parts(server):
    parts = [{"type": "text", "text": "the lazy"}, {"type": "text", "text": "dog"}]
    assert rendered(server, messages=[{"role": "user", "content": parts}]) == "user: the lazy\ndog\nassistant:"
    assert rendered(server, messages=[{"role": "assistant", "content": None}]) == "assistant: \nassistant:"


def test_tools_are_shown_to_the_template_unless_they_are_not_to_be_used(server):
    assert rendered(server, tools=[TOOL]) == "<tool>look_up\n" + RENDERED
    assert rendered(server, tools=[TOOL], tool_choice="auto") == "<tool>look_up\n" + RENDERED
    assert rendered(server, tools=[TOOL], tool_choice="none") == RENDERED


def test_a_choice_without_tools_is_none(server):
    assert rendered(server, tool_choice="auto") == RENDERED


def test_the_last_message_may_be_continued(server):
    messages = [{"role": "assistant", "content": "it is"}]
    assert rendered(server, messages=messages, continue_final_message=True) == "assistant: it is"
    assert rendered(server, add_generation_prompt=False) == RENDERED.removesuffix("assistant:")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(server, **both)["param"] == "continue_final_message"


def test_templates_take_more_arguments_but_not_those_of_the_call():
    with running_server(
        ServerConfig([NAME], chat_template="{{ mood }} {{ messages | map(attribute='content') | join }}")
    ) as server:
        assert rendered(server, chat_template_kwargs={"mood": "kind"}).startswith("kind ")
        for name in ("tokenize", "chat_template", "messages"):
            assert refused(server, chat_template_kwargs={name: "x"})["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("template", ["{{ raise_exception('no such role') }}", "{{ messages.x.y }}", "{{ 1 + 'a' }}"])
def test_a_template_that_fails_is_a_bad_request(template):
    with running_server(ServerConfig([NAME], chat_template=template)) as server:
        assert refused(server)["message"].startswith("messages do not suit the chat template: ")


def test_without_a_template_the_error_says_what_helps():
    with running_server() as server:
        server.tokenizer.chat_template = None
        error = refused(server)
    assert error["code"] == "no_chat_template" and "--chat-template FILE" in error["message"]


def test_samples_are_choices(server):
    fields = {"messages": MESSAGES, "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 4}
    whole = ask(server, PATH, **fields).json()["choices"]
    events = events_of(ask(server, PATH, **fields, stream=True).text)
    found = {0: "", 1: ""}
    for event in events:
        for choice in event["choices"]:
            found[choice["index"]] += choice["delta"].get("content", "")
    assert found == {choice["index"]: choice["message"]["content"] for choice in whole}
