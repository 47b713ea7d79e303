"""Stop strings end a request where transformers' stop_strings do, in whatever way its tokens are computed."""

import contextlib
import copy
import random

import numpy as np
import pytest
import torch
from support.cpu_graphs import as_on_a_device
from support.models import make_model, make_prompts
from support.tokenizers_made import byte_level, metaspace

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, RequestOutput, SamplingParams
from kvpage.serving.text.stop_search import StopSearch

MAX_TOKENS = 40
PROMPTS = make_prompts([5, 7, 9, 4], seed=2)


def text_model() -> torch.nn.Module:
    return make_model("llama", vocab_size=420)


def make_engine(model: torch.nn.Module | None = None, num_blocks: int = 200, **options: object) -> Engine:
    config = EngineConfig(CacheConfig(4, num_blocks), **{"max_num_seqs": 8, **options})
    return Engine.from_model(model or text_model(), config, tokenizer=byte_level())


def part_of(text: str, size: int, chance: random.Random) -> str:
    """Return so many characters of the text, none of them broken, from its second third on."""
    begins = [at for at in range(len(text) // 3, len(text) - size) if "\ufffd" not in text[at : at + size]]
    begin = chance.choice(begins)
    return text[begin : begin + size]


def stops_of(text: str) -> list[list[str]]:
    """Parts of a text, of one character and of several, that begin and end amid tokens; some never come."""
    chance = random.Random(4)
    each = [[part_of(text, size, chance)] for size in (1, 2, 3, 4)]
    return [*each, [part_of(text, 4, chance), "never", part_of(text, 2, chance)], ["not in the text"]]


def generated(model: torch.nn.Module, prompt: list[int], stops: list[str]) -> list[int]:
    row = torch.tensor([prompt])
    return model.generate(
        row, attention_mask=torch.ones_like(row), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0,
        stop_strings=stops, tokenizer=byte_level(),
    )[0, len(prompt) :].tolist()  # fmt: skip


def check(output: RequestOutput, stops: list[str], index: int = 0) -> None:
    """The text is that of the tokens up to the stop string which ends first."""
    sample, text = output.samples[index], byte_level().decode(output.samples[index].token_ids, skip_special_tokens=True)
    if sample.stop_reason is None:
        assert sample.finish_reason == "length" and sample.text == text
        assert not any(stop in text for stop in stops)
    else:
        assert sample.finish_reason == "stop" and sample.stop_reason in stops
        assert sample.text == text[: text.index(sample.stop_reason)]
        before = byte_level().decode(sample.token_ids[:-1], skip_special_tokens=True)
        assert not any(stop in before for stop in stops)


def test_they_end_where_those_of_transformers_do() -> None:
    model, engine, num_stopped = text_model(), make_engine(), 0
    for prompt in PROMPTS[:2]:
        whole = engine.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS))[0].samples[0].text
        assert whole
        for stops in stops_of(whole):
            (output,) = engine.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS, stop=stops))
            assert output.token_ids == generated(model, prompt, stops)
            check(output, stops)
            num_stopped += output.finish_reason == "stop"
    assert num_stopped >= 8


@pytest.mark.parametrize("ways", ["few_blocks", "ahead", "captured", "small_steps"])
def test_they_end_alike_however_tokens_are_computed(ways: str) -> None:
    """Preempted, one step ahead, and in portions; several samples each, beside requests without stop strings."""
    options = {"few_blocks": {"num_blocks": 26}, "small_steps": {"max_num_batched_tokens": 6}}.get(ways, {})
    engine, want = make_engine(**options), make_engine()
    if ways in ("ahead", "captured"):
        engine = as_on_a_device(engine, graphs=ways == "captured")
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=3, n=2)
    text = want.generate(PROMPTS[:1], params)[0].samples[0].text
    each = [
        SamplingParams(max_tokens=24, temperature=0.9, seed=3, n=2, stop=[part_of(text, 2, random.Random(1)), "xyz"]),
        SamplingParams(max_tokens=30), params, SamplingParams(max_tokens=24, stop="e"),
    ]  # fmt: skip
    outputs, expected = engine.generate(PROMPTS, each), want.generate(PROMPTS, each)
    assert [one.samples for one in outputs] == [one.samples for one in expected]
    for output, one in zip(outputs, each, strict=True):
        for index in range(one.n):
            check(output, one.stop, index)
    assert sum(sample.stop_reason is not None for output in outputs for sample in output.samples) >= 2
    if ways == "few_blocks":
        assert engine.stats().num_preemptions
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0


def test_steps_and_streams_say_why_they_end() -> None:
    engine = make_engine()
    text = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=MAX_TOKENS))[0].samples[0].text
    params = SamplingParams(max_tokens=MAX_TOKENS, stop=[text[8:10]])
    request_id, steps = engine.add_request(PROMPTS[0], params), []
    while engine.has_unfinished:
        steps += engine.step()
    assert [step.stop_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    last = steps[-1]
    assert (last.request_id, last.finish_reason, last.stop_reason) == (request_id, "stop", text[8:10])
    assert last.text == last.output.samples[0].text == text[: text.index(text[8:10])]
    stream = engine.stream(PROMPTS[0], params)
    assert list(stream) == last.output.token_ids and stream.finish_reason == "stop"


def test_the_stop_string_is_kept_if_asked() -> None:
    engine = make_engine()
    text = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=MAX_TOKENS))[0].samples[0].text
    params = SamplingParams(max_tokens=MAX_TOKENS, stop=text[8:11], include_stop_str_in_output=True)
    (sample,) = engine.generate(PROMPTS[:1], params)[0].samples
    assert sample.text == text[: text.index(text[8:11]) + 3]


def test_stop_tokens_and_ends_of_a_sequence_have_their_reasons() -> None:
    engine = make_engine()
    tokens = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=6))[0].token_ids
    (output,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=9, stop_token_ids=[tokens[3]], stop="never"))
    assert (output.token_ids, output.samples[0].stop_reason) == (tokens[: tokens.index(tokens[3]) + 1], tokens[3])
    model = text_model()
    model.generation_config.eos_token_id = tokens[3]
    (output,) = make_engine(model).generate(PROMPTS[:1], SamplingParams(max_tokens=9))
    assert (output.finish_reason, output.samples[0].stop_reason) == ("stop", None)
    (output,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    assert (output.finish_reason, output.samples[0].stop_reason) == ("length", None)


def test_least_numbers_of_tokens_hold_back_stop_strings_and_stop_tokens() -> None:
    """The token after min_tokens may be the last one, also if the stop string begins before it."""
    engine, tokenizer = make_engine(), byte_level()
    tokens = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=MAX_TOKENS))[0].token_ids
    texts = [tokenizer.decode(tokens[:end]) for end in range(len(tokens) + 1)]
    stop = texts[5][-1] + texts[6][len(texts[5]) :][:1]
    ended = next(index for index, text in enumerate(texts) if stop in text)
    assert ended == 6
    for least in (4, 5, 6, 7):
        params = SamplingParams(max_tokens=12, stop=stop, min_tokens=least)
        (sample,) = engine.generate(PROMPTS[:1], params)[0].samples
        assert (len(sample.token_ids) == 6) == (least < 6), least
    for least in (0, 3, 4):
        params = SamplingParams(max_tokens=12, stop_token_ids=[tokens[3]], min_tokens=least)
        (sample,) = engine.generate(PROMPTS[:1], params)[0].samples
        assert (sample.token_ids == tokens[:4]) == (least <= 3)
        if least > 3:
            assert tokens[3] not in sample.token_ids[:least]
    params = SamplingParams(max_tokens=12, stop=stop, min_length=len(PROMPTS[0]) + 6)
    assert len(engine.generate(PROMPTS[:1], params)[0].token_ids) != 6


def searched(search: StopSearch, tokens: list[int]) -> tuple[int, str | None]:
    """Return after how many tokens it ends, and at which stop string."""
    for end in range(1, len(tokens) + 1):
        if (found := search.find(np.array(tokens[:end], np.int32))) is not None:
            return end, found
    return len(tokens), search.end(np.array(tokens, np.int32))


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_the_search_finds_what_a_search_of_the_whole_text_finds(make) -> None:
    """After random tokens; some are taken back on the way."""
    chance, tokenizer = random.Random(5), make()
    for _ in range(150):
        tokens = [chance.randrange(len(tokenizer)) for _ in range(chance.randrange(1, 30))]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        at = chance.randrange(max(len(text) - 1, 1))
        stops = [stop for stop in (text[at : at + chance.randrange(1, 5)], "\x00\x01") if stop]
        search = StopSearch(tokenizer, stops)
        if chance.random() < 0.3:
            search.find(np.array(tokens, np.int32))
            search.find(np.array(tokens[: len(tokens) // 2], np.int32))
        end, found = searched(search, tokens)
        if len(text) > 1:
            assert found == stops[0]
            assert search.text == text[: text.index(found)]
            assert found in tokenizer.decode(tokens[:end], skip_special_tokens=True)


def test_special_tokens_are_found_by_their_own_text() -> None:
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    tokens = [
        *tokenizer.encode("dog a", add_special_tokens=False),
        end,
        *tokenizer.encode("b", add_special_tokens=False),
    ]
    search = StopSearch(tokenizer, ["<|end|>"])
    assert searched(search, tokens) == (len(tokens) - 1, "<|end|>") and search.text == "dog a"
    search = StopSearch(tokenizer, ["a<|en", "never"])
    assert searched(search, tokens)[1] == "a<|en" and search.text == "dog "


def test_what_ends_first_wins() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("the quick brown", add_special_tokens=False)
    search = StopSearch(tokenizer, ["uick", "qui", "brown"])
    assert searched(search, tokens)[1] == "qui" and search.text == "the "


def test_they_need_a_tokenizer() -> None:
    engine = Engine.from_model(text_model(), EngineConfig(CacheConfig(4, 20)))
    with pytest.raises(ValueError, match=r"stop needs the tokenizer: give Engine.from_model\(..., tokenizer=...\)"):
        engine.add_request(PROMPTS[0], SamplingParams(stop="a"))
    assert not engine.has_unfinished and engine.generate(PROMPTS[:1])[0].samples[0].text is None
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer of transformers or None, got str"):
        Engine.from_model(text_model(), EngineConfig(CacheConfig(4, 20)), tokenizer="gpt2")


@pytest.mark.parametrize("stop", [b"a", 3, ["a", ""], "", [3], {"a": 1}, None])
def test_other_values_are_refused(stop: object) -> None:
    with pytest.raises(ValueError, match="stop must be "):
        SamplingParams(stop=stop)
    assert SamplingParams(stop="ab").stop == ("ab",) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_a_tokenizer_that_raises_ends_its_request_alone() -> None:
    """Amid the answer, where stop strings are searched, and at its end."""
    tokenizer = copy.deepcopy(byte_level())
    model, config = text_model(), EngineConfig(CacheConfig(4, 200), max_num_seqs=8)
    engine = Engine.from_model(model, config, tokenizer=tokenizer)
    decode, lost = tokenizer.decode, engine.generate(PROMPTS[:1], SamplingParams(max_tokens=6))[0].token_ids[3]

    def raising(token_ids: list[int], **options: object) -> str:
        if lost in token_ids:
            raise TypeError("no such token")
        return decode(token_ids, **options)

    tokenizer.decode = raising
    for stop in ((), ("never",)):
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=6, stop=stop), "one")
        engine.add_request(PROMPTS[1], SamplingParams(max_tokens=6, logit_bias={lost: -100.0}), "two")
        outputs = {}
        while engine.has_unfinished:
            with contextlib.suppress(TypeError):
                outputs |= {step.request_id: step.output for step in engine.step() if step.output}
        assert outputs["one"].error == "TypeError: no such token" and outputs["one"].samples[0].text is None
        assert outputs["two"].finish_reason == "length" and outputs["two"].samples[0].text
