"""Borders of chats: later prompts part from earlier ones there, and models with states go on from there."""

import asyncio
from collections.abc import Iterator
from os.path import commonprefix

import httpx
import pytest
import torch
import transformers as tf
from support.chat_templates import SYSTEM, TEMPLATES, TOOLS
from support.server_app import NAME, Server, make_tokenizer, running_server
from support.state_models import ARE_CACHED

from kvpage.blocks.groups.states.marks import MIN_SAVED
from kvpage.server import ServerConfig
from kvpage.server.protocol.chat_request import ChatRequest
from kvpage.server.protocol.request_model import read_model
from kvpage.server.routes.prompts import chat_of
from kvpage.server.text.chat_template import ChatTemplate, RenderedChat
from kvpage.server.text.text_service import Prompt, TextService

CHATS = "/v1/chat/completions"
EACH = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
KINDS = {
    "no generation prompt": EACH,
    "one that stays in the history": EACH + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "thoughts are stripped": EACH + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    "chatml": TEMPLATES["qwen 1.5"],
    "qwen 3": TEMPLATES["qwen 3"],
    "gemma 3": TEMPLATES["gemma 3"],
    "deepseek 3.1": TEMPLATES["deepseek 3.1"],
}
SYSTEM_TEXT = "You help with the quick brown fox, who jumps over the lazy dog and never returns to the river. " * 3
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}


def said(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def rendered(template: str, messages: list, **fields) -> RenderedChat:
    body = read_model(ChatRequest, {"messages": messages, **fields})
    return ChatTemplate(template).render(make_tokenizer(), chat_of(body))


# --- in text ---


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_next_turn_parts_at_a_border_or_after_the_whole_prompt(name):
    turns = [said("user", " first question"), said("assistant", "~ first answer"), said("user", "second question\n")]
    answer = "^ second answer"
    text, borders = rendered(TEMPLATES[name], turns)
    later = rendered(TEMPLATES[name], [*turns, said("assistant", answer), said("user", "third question")]).text
    num_common = len(commonprefix([text + answer, later]))
    assert num_common >= len(text) or num_common in borders, (text[num_common - 9 :], later[num_common - 9 :])
    assert borders == sorted(set(borders)) and all(0 < border < len(text) for border in borders)


@pytest.mark.parametrize("name", sorted(SYSTEM - {"mistral 3"}))  # which moves the system's text to the last message
def test_other_chats_part_where_the_first_message_begins(name):
    system = said("system", " be brief")
    text, borders = rendered(TEMPLATES[name], [system, said("user", "~ why?")])
    other = rendered(TEMPLATES[name], [system, said("user", "^ how?")]).text
    assert borders[0] == len(commonprefix([text, other])), text


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_the_last_question_is_a_border_behind_calls_of_tools(name):
    call = {**said("assistant", None), "tool_calls": [CALL]}
    result = {**said("tool", "it rains"), "tool_call_id": CALL["id"], "name": "weather"}
    text, borders = rendered(TEMPLATES[name], [said("user", "how is the weather?"), call, result])
    question = text.index("how is the weather?") + len("how is the weather?")
    assert any(question <= border <= text.index("Bonn") for border in borders)


def test_borders_that_cannot_be_seen_are_left_out():
    mute = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(Exception, match="does not show the text"):
        rendered(mute, [said("user", "why?")])
    shouts = "{% for m in messages %}{{ m.content | replace('why', 'WHY') }}!{% endfor %}"
    assert rendered(shouts, [said("user", "why?")]).borders == []
    assert rendered(shouts, [said("assistant", "")]).borders == []
    assert rendered(KINDS["chatml"], [said("user", "")]).borders == []


def test_a_text_that_comes_twice():
    text, borders = rendered(KINDS["thoughts are stripped"], [said("system", "why?"), said("user", "why?")])
    assert text == "<|system|>why?<|end|><|user|>why?<|end|><|assistant|><think>\n"
    assert [text[:border] for border in borders] == [text[:29], text[:40]]


def test_an_answer_that_is_continued_has_the_border_of_its_question():
    messages = [said("user", "why?"), said("assistant", "it is")]
    text, borders = rendered(KINDS["chatml"], messages, add_generation_prompt=False, continue_final_message=True)
    assert [text[:border] for border in borders] == ["<|im_start|>user\n", "<|im_start|>user\nwhy?"]


# --- in tokens ---


def prompt_of(tokenizer, template: str, messages: list) -> Prompt:
    service = TextService(tokenizer, template, 4096, 10**6, 1)
    try:
        body = read_model(ChatRequest, {"messages": messages})
        return asyncio.run(service.render(lambda: chat_of(body), add_special_tokens=False))
    finally:
        service.close()


class Slow:
    """A tokenizer without offsets, whose tokens are characters."""

    chat_template, special_tokens_map = None, {}

    def get_vocab(self) -> dict:
        return {"a": 0}

    def get_chat_template(self, template, tools) -> str:
        return template

    def __call__(self, text: str, **_) -> tf.BatchEncoding:
        return tf.BatchEncoding({"input_ids": [ord(letter) for letter in text]})


@pytest.mark.parametrize("make", [make_tokenizer, Slow])
@pytest.mark.parametrize("name", KINDS)
def test_the_tokens_before_a_border_are_those_of_its_text(name, make):
    messages = [said("system", "be brief"), said("user", "why is Zürich 東京?")]
    prompt, (text, borders) = prompt_of(make(), KINDS[name], messages), rendered(KINDS[name], messages)
    assert len(prompt.borders) == len(borders) and text == prompt.text
    for num_tokens, border in zip(prompt.borders, borders, strict=True):
        begin = make()(text[:border], add_special_tokens=False)["input_ids"]
        assert prompt.token_ids[:num_tokens] == begin[:num_tokens] and num_tokens >= len(begin) - 1


@pytest.mark.parametrize(
    ("most", "borders"), [(1, ()), (6, (1,)), (7, (1, 2)), (9, (3, 4)), (10, (4, 5)), (99, (4, 5))]
)
def test_a_prompt_that_is_cut_has_the_borders_of_its_end(most, borders):
    cut = Prompt(list(range(10)), "text", (4, 5)).cut(most)
    assert (cut.token_ids, cut.borders) == (list(range(10))[-most:], borders)


# --- over HTTP ---


@pytest.fixture(scope="module")
def model():
    if not ARE_CACHED:
        pytest.skip(f"transformers {tf.__version__} keeps no states as they are served")
    torch.manual_seed(0)
    config = tf.Lfm2Config(
        vocab_size=len(make_tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return tf.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=KINDS)
def stateful(request, model) -> Iterator[Server]:
    with running_server(ServerConfig([NAME], chat_template=KINDS[request.param]), model=model) as found:
        found.seen = []
        yield found


def post(server: Server, path: str, body: dict) -> httpx.Response:
    return asyncio.run(server.post(path, body))


def ask(server: Server, messages: list) -> tuple[int, int, int]:
    """Return the prompt's tokens; those in common with an earlier prompt; those that were found."""
    prompt = post(server, CHATS + "/render", {"messages": messages}).json()["token_ids"]
    answer = post(server, CHATS, {"messages": messages, "max_tokens": 4}).json()
    most = max((len(commonprefix([prompt[:-1], one])) for one in server.seen), default=0)
    server.seen.append(prompt)
    return len(prompt), most, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_all_turns_but_the_last_answer_are_found(stateful):
    messages, rows = [said("system", SYSTEM_TEXT)], []
    for turn in range(4):
        messages.append(said("user", f"question {turn}: why does the fox jump {turn} times, and who returns? " * 3))
        rows.append(ask(stateful, messages))
        messages.append(said("assistant", f"a thought</think>^ answer {turn} is that the dog is lazy"))
    num_missed = [most - found for _, most, found in rows]
    assert rows[0][2] == 0 and all(most > 100 for _, most, _ in rows[1:])
    assert num_missed[1] <= 20  # the generation prompt: its end is not known yet
    assert max(num_missed[2:]) <= 1, rows


def test_the_second_chat_and_an_edited_first_message_find_the_system_prompt(stateful):
    system = said("system", SYSTEM_TEXT)
    rows = [ask(stateful, [system, said("user", text)]) for text in ("~ why?", "^ how?", "^ how? And who?")]
    assert rows[0][2] == 0
    for _, most, found in rows[1:]:
        assert found > MIN_SAVED and most - found <= 20


def test_a_question_is_found_when_the_thoughts_behind_it_are_gone(model):
    call = {**said("assistant", ""), "tool_calls": [CALL], "reasoning_content": "a thought about rain " * 3}
    result = {**said("tool", "it rains"), "tool_call_id": CALL["id"]}
    turn = [said("system", SYSTEM_TEXT), said("user", "how is the weather? " * 4), call, result]
    with running_server(ServerConfig([NAME], chat_template=KINDS["qwen 3"]), model=model) as server:
        server.seen = []
        ask(server, turn)
        _, most, found = ask(server, [*turn, said("assistant", "^ it rains"), said("user", "and tomorrow?")])
        # No earlier answer shows how one begins without its thoughts: the border is right behind the question.
        assert most - found <= len(server.tokens("<|im_end|>\n<|im_start|>assistant\n<t"))
        assert found > len(server.tokens(SYSTEM_TEXT))


def test_a_short_begin_is_not_marked():
    prompt = Prompt([1] * 200, "", (MIN_SAVED - 1, MIN_SAVED, 120))
    assert prompt.with_borders([]) == [MIN_SAVED, 120]
    assert prompt.with_borders([9, 120, 130]) == [9, MIN_SAVED, 120, 130]


def test_marks_of_callers_are_kept_beside_borders(model):
    with running_server(ServerConfig([NAME], chat_template=KINDS["chatml"]), model=model) as server:
        messages = [said("system", SYSTEM_TEXT), said("user", "why?")]
        assert post(server, CHATS, {"messages": messages, "max_tokens": 1, "cache_at": [9]}).status_code == 200
        token_ids = post(server, CHATS + "/render", {"messages": messages}).json()["token_ids"]
        assert server.engine.explain([*token_ids[:9], 7, 7]).num_cached_tokens == 9
        assert server.engine.explain([*token_ids[:-1], 7, 7]).num_cached_tokens > MIN_SAVED
