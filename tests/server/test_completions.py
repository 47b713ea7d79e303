"""/v1/completions: the tokens of Engine, as text, whole and as streams."""

import asyncio

import pytest
from support.server_app import NAME, Server, events_of, make_engine, make_tokenizer, running_server
from support.state_models import make_state_model

from kvpage.server import ServerConfig
from kvpage.serving import SamplingParams

PATH, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "the quick brown fox"


def ask(server: Server, path: str = PATH, **fields):
    answer = asyncio.run(server.post(path, {"model": NAME, "temperature": 0, **fields}))
    assert answer.status_code == 200, answer.text
    return answer


def texts(answer: dict) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def streamed(answer, field: str = "text") -> dict[int, str]:
    """Return the text of each choice of a stream."""
    found: dict[int, str] = {}
    for event in events_of(answer.text):
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice[field]
    return found


def generated(server: Server, prompts: list[list[int]], **fields) -> list[list[list[int]]]:
    """Return the tokens of an engine of its own: by prompt, then by sample."""
    outputs = make_engine().generate(prompts, SamplingParams(**{"temperature": 0.0, **fields}))
    return [[sample.token_ids for sample in output.samples] for output in outputs]


@pytest.mark.parametrize("max_tokens", [1, 2, 13])
def test_text_is_that_of_the_engines_tokens(server, max_tokens):
    answer = ask(server, prompt=PROMPT, max_tokens=max_tokens, return_token_ids=True).json()
    [[expected]] = generated(server, [server.tokens(PROMPT)], max_tokens=max_tokens)
    [choice] = answer["choices"]
    assert choice["token_ids"] == expected
    assert choice["prompt_token_ids"] == server.tokens(PROMPT)
    assert choice["text"] == server.tokenizer.decode(expected, skip_special_tokens=True)
    assert choice["finish_reason"] == "length" and choice["index"] == 0 and choice["logprobs"] is None
    assert answer["object"] == "text_completion" and answer["model"] == NAME and answer["id"].startswith("cmpl-")


def test_usage_counts_cached_tokens(server):
    prompt = "a prompt that nobody has sent before, and then once more"
    num_tokens = len(server.tokens(prompt))
    for num_cached in (0, num_tokens - 1):
        usage = ask(server, prompt=prompt, max_tokens=3, cache_salt="usage").json()["usage"]
        assert usage == {
            "prompt_tokens": num_tokens,
            "completion_tokens": 3,
            "total_tokens": num_tokens + 3,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_batch_has_the_choices_of_each_prompt_in_order(server, as_tokens):
    prompts = [PROMPT, "isn't it?", "x"]
    token_ids = [server.tokens(prompt) for prompt in prompts]
    answer = ask(server, prompt=token_ids if as_tokens else prompts, max_tokens=5, return_token_ids=True).json()
    expected = generated(server, token_ids, max_tokens=5)
    assert [choice["token_ids"] for choice in answer["choices"]] == [one for [one] in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 15


def test_samples_with_a_seed_are_those_of_the_engine(server):
    fields = {"n": 3, "seed": 7, "temperature": 0.9, "top_p": 0.8, "max_tokens": 6}
    answer = ask(server, prompt=[PROMPT, "x"], return_token_ids=True, **fields).json()
    expected = generated(server, [server.tokens(PROMPT), server.tokens("x")], **fields)
    assert [choice["token_ids"] for choice in answer["choices"]] == [one for each in expected for one in each]
    again = ask(server, prompt=[PROMPT, "x"], stream=True, **fields)
    assert streamed(again) == dict(enumerate(texts(answer)))


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 3, "min_p": 0.1},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
        {"logit_bias": {"300": 50.0}, "min_tokens": 3},
        {"top_k": -1, "ignore_eos": True},
    ],
)
def test_parameters_reach_the_engine(server, fields):
    ours = {name: value for name, value in fields.items() if value != -1}
    if "logit_bias" in ours:
        ours["logit_bias"] = {int(token): bias for token, bias in ours["logit_bias"].items()}
    [[expected]] = generated(server, [server.tokens(PROMPT)], temperature=0.7, seed=1, max_tokens=8, **ours)
    answer = ask(server, prompt=PROMPT, temperature=0.7, seed=1, max_tokens=8, return_token_ids=True, **fields).json()
    assert answer["choices"][0]["token_ids"] == expected


def test_without_a_temperature_tokens_are_drawn_at_one(server):
    answer = ask(server, prompt=PROMPT, temperature=None, seed=3, max_tokens=8, return_token_ids=True).json()
    [[expected]] = generated(server, [server.tokens(PROMPT)], temperature=1.0, seed=3, max_tokens=8)
    assert answer["choices"][0]["token_ids"] == expected


def test_a_stream_is_the_whole_answer_in_pieces(server):
    whole = ask(server, prompt=PROMPT, max_tokens=20).json()
    answer = ask(server, prompt=PROMPT, max_tokens=20, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert streamed(answer) == {0: texts(whole)[0]}
    events = events_of(answer.text)
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert all("usage" not in event for event in events)


def test_a_stream_ends_with_its_usage_where_that_is_asked_for(server):
    fields = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
    events = events_of(ask(server, **fields, stream_options={"include_usage": True}).text)
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(ask(server, **fields, stream_options=options, return_token_ids=True).text)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 4
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == len(server.tokens(PROMPT)) - 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_an_echo_begins_with_the_prompt(server, stream, as_tokens):
    prompt = server.tokens(PROMPT) if as_tokens else PROMPT
    plain = texts(ask(server, prompt=PROMPT, max_tokens=4).json())[0]
    answer = ask(server, prompt=prompt, max_tokens=4, echo=True, stream=stream)
    assert (streamed(answer)[0] if stream else texts(answer.json())[0]) == PROMPT + plain


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_generates_nothing(server, stream):
    answer = ask(server, prompt=PROMPT, max_tokens=0, echo=True, stream=stream, stream_options={"include_usage": True})
    assert (streamed(answer)[0] if stream else texts(answer.json())[0]) == PROMPT
    usage = events_of(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
    assert usage["completion_tokens"] == 0


def test_prompts_are_cut_from_the_left(server):
    token_ids = server.tokens(PROMPT)
    answer = ask(server, prompt=PROMPT, max_tokens=1, truncate_prompt_tokens=2, echo=True).json()
    assert texts(answer)[0].startswith(server.tokenizer.decode(token_ids[-2:]))
    assert answer["usage"]["prompt_tokens"] == 2
    long = ask(server, prompt="a" * 100_000, max_tokens=1, truncate_prompt_tokens=3).json()
    assert long["usage"]["prompt_tokens"] == 3


def test_a_stop_token_ends_a_sample_and_is_not_shown(server):
    [[expected]] = generated(server, [server.tokens(PROMPT)], max_tokens=9)
    fields = {"prompt": PROMPT, "max_tokens": 9, "stop_token_ids": [expected[4]]}
    before = expected[: expected.index(expected[4]) + 1]
    for keeps in (False, True):
        shown = before if keeps else before[:-1]
        [choice] = ask(server, **fields, include_stop_str_in_output=keeps).json()["choices"]
        assert choice["text"] == server.tokenizer.decode(shown)
        assert choice["finish_reason"] == "stop"
        assert streamed(ask(server, **fields, include_stop_str_in_output=keeps, stream=True)) == {0: choice["text"]}


def test_ids_of_requests_are_in_the_answers(server):
    assert ask(server, prompt="x", max_tokens=1, request_id="mine").json()["id"] == "cmpl-mine"
    answer = asyncio.run(server.post(PATH, {"prompt": "x", "max_tokens": 1}, **{"X-Request-Id": "theirs"}))
    assert answer.json()["id"] == "cmpl-theirs"


def test_a_prompt_is_rendered_as_it_would_be_computed(server):
    [rendered] = ask(server, PATH + "/render", prompt=PROMPT).json()
    assert rendered == {"model": NAME, "prompt": PROMPT, "token_ids": server.tokens(PROMPT)}


@pytest.mark.parametrize("path", [PATH, CHATS])
def test_a_prompt_goes_on_at_positions_that_another_named(path):
    """Of a model with states: without the field, the second one begins at 0."""
    model = make_state_model("lfm2")
    model.resize_token_embeddings(len(make_tokenizer()))
    with running_server(ServerConfig([NAME], chat_template="{{ messages[0].content }}"), model=model) as server:
        for number, named in enumerate(({}, {"cache_at": [7]})):
            texts = [f"{number} is a common system prompt; then {end}" for end in ("this", "somewhat other words")]
            prompts = [server.tokens(text) for text in texts]
            assert prompts[0][:7] == prompts[1][:7]
            found = []
            for text in texts:
                field = {"prompt": text} if path == PATH else {"messages": [{"role": "user", "content": text}]}
                usage = ask(server, path, **field, **named, max_tokens=1).json()["usage"]
                found.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert found == [0, 7 if named else 0]
        refused = {"prompt": [[5, 6, 7], [5, 6]], "cache_at": [3]}
        answer = asyncio.run(server.post(PATH, refused))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_at"
        assert server.live.stats().num_unfinished == 0
