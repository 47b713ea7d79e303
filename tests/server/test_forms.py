"""Forms, stop strings and log-probabilities: those of the engine, in OpenAI's shapes."""

import asyncio
import json
import math
import re

import pytest
from server.test_completions import ask, generated, streamed
from support.server_app import events_of, make_engine

from kvpage.serving import SamplingParams

PATH, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "the quick brown fox"
MESSAGES = [{"role": "user", "content": "the lazy dog"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def chat_text(server, **fields) -> str:
    """The answer to a chat; that of a stream is the same."""
    fields = {"messages": MESSAGES, "max_tokens": 40, **fields}
    whole = ask(server, CHATS, **fields).json()["choices"][0]["message"]["content"]
    events = events_of(ask(server, CHATS, stream=True, **fields).text)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole
    return whole


@pytest.fixture
def guided():
    pytest.importorskip("llguidance")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_json_by_a_schema(server, guided, fields):
    bias = {str(token): -100 for text in ("\n", " ", "\t") for token in server.tokens(text)}
    found = json.loads(chat_text(server, logit_bias=bias, **fields))
    assert isinstance(found["ok"], bool)


@pytest.mark.parametrize("fields", [{"guided_regex": "[0-9]{3}-x"}, {"structured_outputs": {"regex": "[0-9]{3}-x"}}])
def test_text_by_a_regular_expression(server, guided, fields):
    assert re.fullmatch("[0-9]{3}-x", chat_text(server, **fields))
    assert re.fullmatch("[0-9]{3}-x", ask(server, prompt=PROMPT, max_tokens=40, **fields).json()["choices"][0]["text"])


@pytest.mark.parametrize(
    "fields", [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}]
)
def test_one_of_some_choices(server, guided, fields):
    assert chat_text(server, **fields) in ("yes", "no")


@pytest.mark.parametrize(
    "fields", [{"guided_grammar": 'root ::= "a" | "bc"'}, {"structured_outputs": {"grammar": 'start: "a" | "bc"'}}]
)
def test_text_by_a_grammar(server, guided, fields):
    assert chat_text(server, **fields) in ("a", "bc")


def test_any_json_object(server, guided):
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        assert chat_text(server, max_tokens=3, **fields).lstrip().startswith("{")


def test_without_the_library_a_form_is_refused_by_what_helps(server, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    answer = asyncio.run(server.post(PATH, {"prompt": "x", "guided_regex": "never asked before"}))
    assert answer.status_code == 501
    assert "pip install 'kvpage[guided]'" in answer.json()["error"]["message"]
    assert ask(server, prompt="x", max_tokens=1, response_format={"type": "text"}).status_code == 200


@pytest.mark.parametrize("keeps", [False, True])
def test_stop_strings_end_the_text_wherever_tokens_end(server, keeps):
    text = ask(server, prompt=PROMPT, max_tokens=24).json()["choices"][0]["text"]
    for begin in range(0, len(text) - 1):
        stop = text[begin : begin + 2]
        if "\ufffd" in stop:
            continue
        at = text.index(stop)
        fields = {"prompt": PROMPT, "max_tokens": 24, "stop": ["never", stop], "include_stop_str_in_output": keeps}
        [choice] = ask(server, **fields).json()["choices"]
        assert choice["text"] == (text[: at + 2] if keeps else text[:at]), (begin, stop)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        answer = ask(server, **fields, stream=True)
        assert streamed(answer) == {0: choice["text"]}
        assert events_of(answer.text)[-1]["choices"][0]["stop_reason"] == stop


def test_stop_strings_within_the_first_tokens_do_not_count(server):
    text = ask(server, prompt=PROMPT, max_tokens=24, min_tokens=20).json()["choices"][0]["text"]
    fields = {"prompt": PROMPT, "max_tokens": 24, "min_tokens": 20, "stop": text[1:3]}
    [choice] = ask(server, **fields).json()["choices"]
    assert text.startswith(choice["text"]) and len(choice["text"]) > 3
    assert streamed(ask(server, **fields, stream=True)) == {0: choice["text"]}


def expected_logprobs(server, prompt: str, num_top: int, max_tokens: int, **fields):
    params = SamplingParams(temperature=0.0, logprobs=num_top, max_tokens=max_tokens, **fields)
    [output] = make_engine().generate([server.tokens(prompt)], params)
    return output


def test_logprobs_of_chats(server):
    fields = {"messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    [choice] = ask(server, CHATS, **fields, return_token_ids=True).json()["choices"]
    prompt = ask(server, CHATS + "/render", messages=MESSAGES).json()["prompt"]
    sample = expected_logprobs(server, prompt, 3, 5).samples[0]
    content = choice["logprobs"]["content"]
    for entry, token_id, one in zip(content, sample.token_ids, sample.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(one.logprob, abs=1e-4)
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"] == server.tokenizer.decode([token_id])
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([p for _, p in one.top], abs=1e-4)
        assert [top["token"] for top in entry["top_logprobs"]] == [server.tokenizer.decode([i]) for i, _ in one.top]
    events = events_of(ask(server, CHATS, **fields, stream=True).text)
    each = [event["choices"][0]["logprobs"]["content"] for event in events if event["choices"][0]["logprobs"]]
    assert sum(each, []) == content


def test_without_top_logprobs_only_the_tokens_own_are_shown(server):
    [choice] = ask(server, CHATS, messages=MESSAGES, max_tokens=2, logprobs=True).json()["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]
    assert ask(server, CHATS, messages=MESSAGES, max_tokens=2).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_logprobs_of_completions(server, num_top):
    [choice] = ask(server, prompt=PROMPT, max_tokens=5, logprobs=num_top).json()["choices"]
    sample = expected_logprobs(server, PROMPT, num_top, 5).samples[0]
    found = choice["logprobs"]
    assert found["token_logprobs"] == pytest.approx([one.logprob for one in sample.logprobs], abs=1e-4)
    assert found["tokens"] == [server.tokenizer.decode([token]) for token in sample.token_ids]
    assert all(len(top) == max(num_top, 1) for top in found["top_logprobs"])  # greedy: the token is the likeliest
    lengths = [len(token) for token in found["tokens"]]
    assert found["text_offset"] == [sum(lengths[:index]) for index in range(5)]
    events = events_of(ask(server, prompt=PROMPT, max_tokens=5, logprobs=num_top, stream=True).text)
    each = [event["choices"][0]["logprobs"] for event in events]
    for name in found:
        assert sum((one[name] for one in each if one), []) == found[name]


def test_an_echo_has_the_logprobs_of_its_prompt(server):
    token_ids = server.tokens(PROMPT)
    for max_tokens in (0, 3):
        [choice] = ask(server, prompt=PROMPT, max_tokens=max_tokens, echo=True, logprobs=2).json()["choices"]
        output = expected_logprobs(server, PROMPT, 2, max_tokens or 1, prompt_logprobs=2)
        found, kept = choice["logprobs"], output.samples[0].logprobs[:max_tokens]
        assert found["tokens"][: len(token_ids)] == [server.tokenizer.decode([token]) for token in token_ids]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        expected = [one.logprob for one in (*output.prompt_logprobs[1:], *kept)]
        assert found["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
        assert all(math.isfinite(value) for value in found["token_logprobs"][1:])


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 3, "n": 2}])
def test_a_streamed_echo_begins_with_the_logprobs_of_its_prompt(server, monkeypatch, fields):
    monkeypatch.setattr("kvpage.server.answers.transcript.TOKENS_AT_ONCE", 3)
    fields |= {"prompt": [PROMPT, "the"], "echo": True, "logprobs": 2, "seed": 1, "return_token_ids": True}
    whole = ask(server, **fields).json()
    for choice in whole["choices"]:
        answer = ask(server, **fields, stream=True)
        events = [event["choices"][0] for event in events_of(answer.text)]
        each = [one for one in events if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in each) == choice["text"]
        assert each[0]["prompt_token_ids"] == choice["prompt_token_ids"] and each[-1]["finish_reason"] == "length"
        assert len(each[0]["logprobs"]["tokens"]) == min(3, len(choice["prompt_token_ids"]))
        for name, values in choice["logprobs"].items():
            assert sum((one["logprobs"][name] for one in each if one["logprobs"]), []) == values


def test_tokens_may_be_shown_as_ids(server):
    [[expected]] = generated(server, [server.tokens(PROMPT)], max_tokens=3)
    [choice] = ask(server, prompt=PROMPT, max_tokens=3, logprobs=0, return_tokens_as_token_ids=True).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected]
