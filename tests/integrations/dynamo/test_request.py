"""Requests of Dynamo's frontend, as kvpage reads them. The first one was recorded of ai-dynamo 1.6.1."""

import struct

import pytest

from kvpage.integrations.dynamo.hints import CacheHints
from kvpage.integrations.dynamo.request import RequestDefaults, read_request, read_tokens
from kvpage.serving import Guide
from kvpage.serving.params.sampling import MAX_RETAIN_PRIORITY

DEFAULTS = RequestDefaults(max_model_len=64)
RECORDED = {
    "model": "tiny",
    "token_ids": [262, 354, 301, 395],
    "stop_conditions": {
        "max_tokens": 5, "stop": None, "stop_token_ids": None, "stop_token_ids_visible": None,
        "stop_token_ids_hidden": [1], "min_tokens": 2, "ignore_eos": None, "max_thinking_tokens": None,
    },
    "sampling_options": {
        "n": None, "best_of": None, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5,
        "temperature": 0.5, "top_p": None, "top_k": 5, "min_p": 0.125, "use_beam_search": None, "length_penalty": None,
        "seed": 3, "include_stop_str_in_output": None, "guided_decoding": None,
    },
    "output_options": {
        "logprobs": 2, "prompt_logprobs": None, "skip_special_tokens": None, "formatted_prompt": None,
        "return_tokens_as_token_ids": None,
    },
    "eos_token_ids": [1], "mdc_sum": "267e", "annotations": [],
    "routing": {"dp_rank": 0, "cache_salt": "tenant", "priority_jump": 5.0, "priority": 5},
    "router_config_override": None,
    "extra_args": {"nvext": {"extra_fields": ["worker_id"], "cache_salt": "tenant"}},
}  # fmt: skip


def asked(**parts: object) -> dict:
    return {"token_ids": [5, 6], **parts}


def test_a_recorded_request():
    request = read_request(RECORDED, DEFAULTS)
    params = request.params
    assert (
        request.tokens == [262, 354, 301, 395]
        and request.namespace == b"dynamo-cache-salt:tenant"
        and request.priority == -5
    )
    assert (params.max_tokens, params.min_tokens, tuple(params.stop_token_ids)) == (5, 2, (1,))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (params.temperature, params.top_k, params.min_p, params.top_p, params.seed) == (0.5, 5, 0.125, None, 3)
    assert params.n == 1 and not params.ignore_eos and params.logprobs == 2 and params.prompt_logprobs is None
    assert not request.shows_ids


def test_what_a_request_leaves_out():
    request = read_request(asked(), DEFAULTS)
    assert request.params.max_tokens == 62 and request.params.temperature == 1.0
    assert request.namespace == b"" and request.priority == 0 and request.params.logprobs is None
    assert read_request(asked(token_ids=[1] * 100), DEFAULTS).params.max_tokens == 1  # the engine refuses the prompt
    assert read_request(asked(), RequestDefaults(64, 0.0)).params.is_greedy


@pytest.mark.parametrize(
    "part, given, field, expected",
    [
        ("sampling_options", {"top_k": -1}, "top_k", 0),
        ("sampling_options", {"seed": -1}, "seed", 2**63 - 1),
        ("sampling_options", {"n": 1, "best_of": 1}, "n", 1),
        ("sampling_options", {"logit_bias": {"7": 1.5}}, "logit_bias", ((7, 1.5),)),
        ("sampling_options", {"temperature": 0.0}, "temperature", 0.0),
        ("sampling_options", {"guided_decoding": {"regex": "a+", "backend": "any"}}, "guide", Guide.regex("a+")),
        ("sampling_options", {"guided_decoding": {"json": {"type": "object"}}}, "guide", Guide.json_object()),
        ("sampling_options", {"guided_decoding": {"choice": ["a", "b"]}}, "guide", Guide.choice(["a", "b"])),
        ("sampling_options", {"guided_decoding": {}}, "guide", None),
        ("stop_conditions", {"stop_token_ids": [4], "stop_token_ids_hidden": [1, 4]}, "stop_token_ids", (4, 1)),
        ("stop_conditions", {"ignore_eos": True}, "ignore_eos", True),
        ("stop_conditions", {"stop": ["\n"]}, "stop_token_ids", ()),
        ("output_options", {"logprobs": 0}, "logprobs", 0),
        ("output_options", {"prompt_logprobs": 1}, "prompt_logprobs", 1),
    ],
)
def test_a_field(part, given, field, expected):
    value = getattr(read_request(asked(**{part: given}), DEFAULTS).params, field)
    assert (tuple(value) if isinstance(value, list | tuple) else value) == expected


@pytest.mark.parametrize("ignore_eos, expected", [(None, (4, 1)), (False, (4, 1)), (True, (4,))])
def test_end_of_sequence_tokens_that_the_frontend_adds_are_ignored_with_the_others(ignore_eos, expected):
    stops = {"stop_token_ids_hidden": [4, 1], "ignore_eos": ignore_eos}
    assert read_request(asked(stop_conditions=stops, eos_token_ids=[1]), DEFAULTS).params.stop_token_ids == expected


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"token_ids": None}, "token_ids must be given"),
        ({"token_ids": b"123"}, "token_ids must be whole int32, got 3 bytes"),
        ({"sampling_options": {"best_of": 2}}, "sampling_options.best_of must be 1, got 2"),
        ({"sampling_options": {"n": 2}}, "sampling_options.n must be 1, got 2: ask several times"),
        ({"sampling_options": {"use_beam_search": True}}, "sampling_options.use_beam_search is not served"),
        ({"sampling_options": {"length_penalty": 1.5}}, "sampling_options.length_penalty is not served"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": "x"}}},
         "sampling_options.guided_decoding.structural_tag is not served"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "choice": ["a"]}}},
         "sampling_options.guided_decoding must name one form, got regex, choice"),
        ({"sampling_options": {"of_tomorrow": 1}}, "sampling_options.of_tomorrow is not served"),
        ({"sampling_options": {"temperature": float("nan")}}, "temperature must be"),
        ({"sampling_options": {"top_p": 2.0}}, "top_p must be"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "stop_conditions.max_thinking_tokens is not served"),
        ({"stop_conditions": {"max_tokens": 0}}, "max_tokens must be"),
        ({"multi_modal_data": {"image_url": ["x"]}}, "multi_modal_data is not served"),
        ({"prompt_embeds": "abc"}, "prompt_embeds is not served"),
        ({"routing": {"lora_name": "adapter"}}, "routing.lora_name is not served"),
        ({"output_options": {"logprobs": 100}}, "logprobs must be"),
    ],
)  # fmt: skip
def test_what_is_refused(parts, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        read_request(asked(**parts), DEFAULTS)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_tokens_as_a_list_and_as_bytes(num_tokens):
    tokens = [2**31 - 1 - token for token in range(num_tokens)]
    assert read_tokens(tokens) == read_tokens(struct.pack(f"<{num_tokens}i", *tokens)) == tokens


@pytest.mark.parametrize("priority", [None, 0, 7, -7, 2**70, -(2**70)])
def test_higher_priorities_of_dynamo_run_first(priority):
    found = read_request(asked(routing={"priority": priority}), DEFAULTS).priority
    assert found == -max(1 - 2**31, min(priority or 0, 2**31 - 1))


def envelope(*actions: tuple[str, dict]) -> dict:
    named = [
        {"action_id": str(i), "action_type": kind, "action_version": "1.0", "payload": payload}
        for i, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": named}


FETCH = ("kv.fetch", {"source": {"endpoint": "tcp://10.0.0.1:5"}})


@pytest.mark.parametrize(
    "hint, expected",
    [
        (None, CacheHints()),
        ({}, CacheHints()),
        (envelope(), CacheHints()),
        (envelope(FETCH), CacheHints()),
        (envelope(FETCH, ("kv.pin", {"ttl_seconds": 60.0})), CacheHints(0, 60.0)),
        (envelope(("kv.pin", {"ttl_seconds": 5.0}), ("kv.pin", {"ttl_seconds": 9.0})), CacheHints(0, 9.0)),
        (envelope(("kv.retain", {"directives": [{"priority": 0}]})), CacheHints(0)),
        (envelope(("kv.retain", {"directives": [{"priority": 100}]})), CacheHints(MAX_RETAIN_PRIORITY)),
        (envelope(("kv.pin", {"ttl_seconds": -1.0})), CacheHints()),
        ({**envelope(("kv.pin", {"ttl_seconds": 5.0})), "protocol_version": "9"}, CacheHints()),
        ("pin it", CacheHints()),
        ({"actions": [1]}, CacheHints()),
    ],
)
def test_hints(hint, expected):
    request = read_request(asked(kv_hint=hint), DEFAULTS)
    assert request.hints == expected and request.params.retain_priority == expected.retain_priority
