"""Bodies that clients were seen to send: fields of other servers, numbers of other languages, limits beyond models."""

import asyncio

import pytest
from server.test_bad_input import CHATS, COMPLETIONS, check_refused
from server.test_completions import ask
from support.server_app import NAME

from kvpage.server.protocol.errors import as_api_error
from kvpage.server.protocol.sampling_fields import within

HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "exec", "description": "Run", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
ANY_TOKEN = list(range(1024))  # as stop tokens: the first one ends the answer
TEXT_PART = {"type": "text", "text": "Hello"}


def posted(server, **fields):
    return asyncio.run(server.post(CHATS, {"model": NAME, "messages": HELLO, "max_tokens": 2, **fields}))


BODIES = {
    "marks of an editor's plug-in": {"messages": [{**HELLO[0], "id": 2, "opts": {"visible": True}, "_meta": {}}]},
    "cache_control": {
        "messages": [{"role": "user", "content": [{**TEXT_PART, "cache_control": {"type": "ephemeral"}}]}]
    },
    "cache_control of a tool": {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]},
    "strict tools": {"tools": [{**TOOL, "strict": True}, {"function": {**FUNCTION, "strict": None, "title": "x"}}]},
    "defaults": {"frequency_penalty": 0.0, "logit_bias": {}, "n": 1, "stop": None, "temperature": 0.2, "user": ""},
    "no limit": {"stop_token_ids": ANY_TOKEN, "max_tokens": None, "max_completion_tokens": None},
    "a choice of no tools": {"tool_choice": "auto", "tools": []},
    "no options of a stream": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": None},
    },
    "null options": {"stream_options": None, "response_format": None, "tools": None, "seed": None},
    "thinking": {"enable_thinking": False, "thinking": {"type": "disabled"}, "reasoning": {"effort": "low"}},
    "routers": {"usage": {"include": True}, "provider": {"sort": "price"}, "transforms": []},
    "other servers": {"cache_prompt": True, "n_predict": 8, "id_slot": -1, "typical_p": 1, "mirostat_mode": 0},
    "beams that are none": {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "ignore_eos": True},
    "no log-probabilities": {"logprobs": False, "top_logprobs": 0},
    "one kind of number": {"max_tokens": 2.0, "top_k": 20.0, "n": 1.0, "seed": 3.0, "priority": 0.0},
    "functions": {"functions": [FUNCTION], "function_call": "auto"},
    "an answer's own fields": {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [],
                "audio": None,
                "function_call": None,
                "refusal": None,
                "annotations": [],
            },
            *HELLO,
        ]
    },
    "thoughts": {
        "messages": [*HELLO, {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_details": []}, *HELLO]
    },
    "parts without text": {"messages": [{"role": "user", "content": [{"type": "text", "text": None}, TEXT_PART]}]},
    "parts without a type": {"messages": [{"role": "user", "content": [{"text": "Hello"}, "Hello"]}]},
    "a part alone": {"messages": [{"role": "user", "content": TEXT_PART}]},
    "thinking parts": {
        "messages": [*HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "y"}, TEXT_PART]}]
    },
    "no parts": {"messages": [{"role": "user", "content": []}]},
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_clients_are_answered(server, name):
    answer = posted(server, **BODIES[name])
    assert answer.status_code == 200, answer.text


def test_fields_whose_answer_would_be_another_are_refused_with_a_reason(server):
    for name, value in (("suffix", ")"), ("use_beam_search", True)):
        answer = asyncio.run(server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, name: value}))
        error = check_refused(answer, param=name)
        assert error["message"].startswith(f"{name} is not served: ") and error["code"] == "not_served"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    assert "not served" in check_refused(posted(server, messages=[{"role": "user", "content": [image]}]))["message"]


@pytest.mark.parametrize("number", [32_000, 2**31, 10**12, -1])
def test_a_limit_beyond_the_model_is_cut(server, number):
    for fields in ({"max_tokens": number}, {"max_completion_tokens": number}):
        answer = posted(server, **{"max_tokens": None, "stop_token_ids": ANY_TOKEN, **fields})
        assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "stop"
    prompt = [5] * (server.engine.max_model_len - 3)
    answer = ask(server, prompt=prompt, max_tokens=number, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_limits_are_cut_to_what_is_left():
    found = [within(asked, 10) for asked in (None, -1, 0, 1, 9, 10, 11, 2**40)]
    assert found == [10, 10, 0, 1, 9, 10, 10, 10]


def test_an_error_of_length_is_about_what_is_too_long(server):
    longest = server.engine.max_model_len
    error = check_refused(ask_raw(server, prompt=[5] * longest, max_tokens=1), param="prompt")
    assert error["code"] == "context_length_exceeded"
    error = check_refused(ask_raw(server, prompt=[5] * (longest - 3), max_tokens=9, min_tokens=8), param="min_tokens")
    assert error["code"] is None and error["message"] == "min_tokens must be at most max_tokens=3, got 8"


def test_a_prompt_that_no_blocks_hold_has_the_code_of_a_long_one():
    error = as_api_error(ValueError("prompt and max_tokens must fit into 100 blocks of 16 tokens, got 1500 + 200"))
    assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")


def ask_raw(server, **fields):
    return asyncio.run(server.post(COMPLETIONS, fields))


def test_rules_are_told_in_our_words(server):
    for fields, message in (
        ({"n": "x"}, "n must be a valid integer, got 'x'"),
        ({"n": 0}, "n must be greater than or equal to 1, got 0"),
        ({"messages": []}, "messages must have at least 1 item, not 0, got a list of 0"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type must be 'text', 'json_object' or 'json_schema', got 'xml'",
        ),
    ):
        assert check_refused(posted(server, **fields))["message"] == message


def test_forms_that_take_too_much_work_are_refused(server):
    pytest.importorskip("llguidance")
    long = [f"{number}" + "xy" * 20 for number in range(4096)]
    for name, form in (("guided_regex", "(a?){1000}a{1000}"), ("guided_choice", long)):
        error = check_refused(posted(server, **{name: form}), param=name)
        assert error["message"].startswith(f"{name} cannot be followed: guide must "), error


def test_a_form_that_fails_later_is_the_requests_error():
    from kvpage.server.answers.transcript import check_outcome
    from kvpage.server.protocol.errors import ApiError

    with pytest.raises(ApiError) as caught:
        check_outcome("error", "the guide cannot go on after 7 tokens: too many expressions")
    assert (caught.value.status, caught.value.code) == (400, "form_too_large")


def test_rules_that_leave_no_token_are_the_requests_error(server):
    pytest.importorskip("llguidance")
    rules = {"guided_regex": "[0-9]{8}", "stop_token_ids": ANY_TOKEN, "min_tokens": 4, "max_tokens": 8}
    error = check_refused(posted(server, **rules))
    assert error["code"] == "form_too_large" and "no token is left by its other rules" in error["message"]


def test_json_may_be_asked_for_without_blanks(server):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"json": schema, "disable_any_whitespace": True}
    answer = posted(server, structured_outputs=form, max_tokens=40, temperature=0).json()
    assert answer["choices"][0]["message"]["content"] in ('{"ok":true}', '{"ok":false}')
