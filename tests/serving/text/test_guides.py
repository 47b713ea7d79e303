"""A guided request generates texts of its guide and nothing else, though its model knows nothing."""

import gc
import json
import random
import re
import sys

import numpy as np
import pytest
import torch
from support.cpu_graphs import as_on_a_device
from support.models import make_model, make_prompts
from support.schemas import fits, random_schema
from support.tokenizers_made import byte_level, metaspace, word_piece

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, Guide, SamplingParams
from kvpage.serving.text import guide_compiler

pytest.importorskip("llguidance")
VOCAB = 420
PROMPTS = make_prompts([5, 7, 9, 4, 6, 3], seed=2)
ROWS = [
    ("regex", Guide.regex("[0-9]{3}-[a-f]+x"), re.compile("[0-9]{3}-[a-f]+x")),
    ("choice", Guide.choice(["left", "right", 'say "no"', "日本"]), re.compile('left|right|say "no"|日本')),
    ("lark", Guide.grammar('start: "<" word ">"\nword: /[a-z]{2,5}/'), re.compile("<[a-z]{2,5}>")),
    ("gbnf", Guide.grammar('root ::= "a" b*\nb ::= "bc" | "d"'), re.compile("a(bc|d)*")),
]


def make_engine(make=byte_level, eos: bool = True, num_blocks: int = 300, **options: object) -> Engine:
    model, tokenizer = make_model("llama", vocab_size=VOCAB), make()
    model.generation_config.eos_token_id = tokenizer.eos_token_id if eos else None
    config = EngineConfig(CacheConfig(4, num_blocks), **{"max_num_seqs": 16, **options})
    return Engine.from_model(model, config, tokenizer=tokenizer)


def drawn(guide: Guide, seed: int = 1, **fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 150, "temperature": 1.0, "seed": seed, "guide": guide, **fields})


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("eos", [True, False], ids=["eos", "no_eos"])
def test_texts_of_each_kind(make, eos: bool) -> None:
    """With an end-of-sequence token or without. Greedy and drawn, several samples each, beside free requests."""
    engine = make_engine(make, eos)
    for name, guide, pattern in ROWS:
        params = [drawn(guide, n=3), SamplingParams(max_tokens=90, guide=guide), SamplingParams(max_tokens=20)]
        outputs = engine.generate(PROMPTS[:3], params)
        for output in outputs[:2]:
            for sample in output.samples:
                whole = sample.finish_reason == "stop" and pattern.fullmatch(sample.text)
                assert whole or sample.finish_reason == "length", (name, sample)
                assert whole or name in ("regex", "gbnf"), "a bounded text comes to its end"
        assert outputs[2].samples == make_engine(make, eos).generate(PROMPTS[2:3], params[2])[0].samples
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_json_of_random_schemas(make) -> None:
    engine, chance = make_engine(make), random.Random(11)
    schemas = [random_schema(chance) for _ in range(25)]
    params = [drawn(Guide.json_schema(schema, compact=True), index) for index, schema in enumerate(schemas)]
    outputs = engine.generate([PROMPTS[index % 6] for index in range(25)], params)
    for schema, output in zip(schemas, outputs, strict=True):
        (sample,) = output.samples
        assert sample.finish_reason == "stop", (schema, sample)
        assert fits(json.loads(sample.text), schema), (schema, sample.text)
        assert ": " not in sample.text or "with space" in str(schema) or "a b" in str(schema)


def test_true_is_the_schema_of_any_json() -> None:
    assert Guide.json_schema(True) == Guide.json_schema("true") == Guide.json_schema({})
    (output,) = make_engine().generate(PROMPTS[:1], SamplingParams(max_tokens=30, guide=Guide.json_schema(True)))
    assert output.finish_reason in ("length", "stop") and output.samples[0].text


def test_any_object_and_white_space() -> None:
    """What has come by max_tokens is the begin of an object; a schema leaves white space free unless compact."""
    engine = make_engine()
    (output,) = engine.generate(PROMPTS[:1], drawn(Guide.json_object(), max_tokens=30))
    assert output.samples[0].text.lstrip().startswith("{") and output.finish_reason in ("length", "stop")
    tokenizer = byte_level()
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    for compact in (False, True):
        guided = guide_compiler.GuideCompiler(tokenizer, VOCAB, [1]).sequence(
            Guide.json_schema(schema, compact=compact), False
        )
        tokens = np.array(tokenizer.encode('{"a"', add_special_tokens=False), np.int32)
        assert is_allowed(guided.mask(tokens), tokenizer.encode(" ")[0]) is not compact


def is_allowed(mask: np.ndarray, token: int) -> bool:
    return bool(int(mask[token // 32]) >> token % 32 & 1)


@pytest.mark.parametrize("ways", ["few_blocks", "ahead", "captured", "small_steps", "torch"])
def test_tokens_are_the_same_however_they_are_computed(ways: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch applies the rules, as of transformers' own processors."""
    options = {"few_blocks": {"num_blocks": 11}, "small_steps": {"max_num_batched_tokens": 6}}.get(ways, {})
    guides = [ROWS[0][1], ROWS[2][1], Guide.json_schema({"type": "array", "items": {"type": "integer"}}, compact=True)]
    each = [drawn(guide, index, max_tokens=20, n=2, logprobs=2) for index, guide in enumerate(guides)]
    each += [SamplingParams(max_tokens=20, guide=guides[2]), SamplingParams(max_tokens=20, presence_penalty=0.5)]
    want, engine = make_engine().generate(PROMPTS[:5], each), make_engine(**options)
    if ways in ("ahead", "captured"):
        engine = as_on_a_device(engine, graphs=ways == "captured")
    if ways == "torch":
        monkeypatch.setattr("kvpage.serving.sampling.sampler.can_sample", lambda logits: False)
    outputs = engine.generate(PROMPTS[:5], each)
    tokens, wanted = ([[one.token_ids for one in output.samples] for output in some] for some in (outputs, want))
    assert tokens == wanted
    assert ways != "few_blocks" or engine.stats().num_preemptions


def test_a_failed_step_is_computed_again() -> None:
    engine, want = make_engine(), make_engine().generate(PROMPTS[:1], drawn(ROWS[0][1]))
    engine.add_request(PROMPTS[0], drawn(ROWS[0][1]))
    steps = [step for _ in range(3) for step in engine.step()]
    complete, engine.scheduler.complete = engine.scheduler.complete, None
    with pytest.raises(TypeError):
        engine.step()
    engine.scheduler.complete = complete
    while engine.has_unfinished:
        steps += engine.step()
    assert steps[-1].output.samples == want[0].samples


def test_rules_beside_a_guide() -> None:
    """Stop strings, stop tokens, least numbers of tokens, and sequences that do not end at their ends."""
    engine, guide = make_engine(), Guide.regex("[ab]{1,40}c?")
    eos = byte_level().eos_token_id
    (sample,) = engine.generate(PROMPTS[:1], drawn(guide, stop="b", seed=7))[0].samples
    assert set(sample.text) <= {"a"} and sample.stop_reason == "b"
    for seed in range(4):
        params = drawn(guide, seed, min_tokens=12)
        (sample,) = engine.generate(PROMPTS[:1], params)[0].samples
        assert re.fullmatch("[ab]{1,40}c?", sample.text) and eos not in sample.token_ids[:12]
        (sample,) = engine.generate(PROMPTS[:1], drawn(guide, seed, ignore_eos=True))[0].samples
        assert eos not in sample.token_ids and (len(sample.text) == 41 or sample.text.endswith("c"))
    b = byte_level().convert_tokens_to_ids("b")
    (sample,) = engine.generate(PROMPTS[:1], drawn(guide, 7, stop_token_ids=[b]))[0].samples
    assert sample.stop_reason == b or b not in sample.token_ids
    barred = drawn(Guide.choice(["a", "b"]), suppress_tokens=[byte_level().convert_tokens_to_ids("a")])
    assert engine.generate(PROMPTS[:1], barred)[0].samples[0].text == "b"


def test_a_request_that_no_token_fits_ends_alone() -> None:
    engine, tokens = make_engine(), byte_level().convert_tokens_to_ids(["a", "b"])
    barred = drawn(Guide.choice(["a", "b"]), suppress_tokens=tokens)
    outputs = engine.generate(PROMPTS[:2], [barred, drawn(Guide.choice(["a"]))])
    assert outputs[0].finish_reason == "error" and "no finite numbers" in outputs[0].error
    assert outputs[1].samples[0].text == "a"


def test_a_guide_that_needs_too_much_work_ends_its_request_alone() -> None:
    class Failing:
        """A matcher that has failed."""

        reason = "ParserTooComplex:\n  lexer\n<state>\nTokens: []\n</state>"
        is_error, is_stopped = (lambda self: True), (lambda self: True)
        get_error, consume_tokens = (lambda self: self.reason), (lambda self, tokens: False)

    engine = make_engine()
    engine.add_request(PROMPTS[0], drawn(ROWS[0][1]), "one")
    engine.loop.requests["one"].answer.guided._matcher = Failing()
    engine.add_request(PROMPTS[1], drawn(ROWS[1][1]), "two")
    outputs = {}
    while engine.has_unfinished:
        outputs |= {step.request_id: step.output for step in engine.step() if step.output}
    assert outputs["one"].error == "the guide cannot go on after 0 tokens: ParserTooComplex: lexer"
    assert outputs["two"].finish_reason == "stop"


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide.regex("(a"), "guide must be a valid regex: .*unclosed group"),
        (Guide.json_schema({"type": "frob"}), "guide must be a valid json_schema: Invalid type: frob"),
        (Guide.json_schema({"type": "string", "not": {}}), "valid json_schema: Unimplemented keys"),
        (Guide.grammar("start: nothing"), "guide must be a valid grammar: "),
        (Guide.grammar("root ::= ("), "guide must be a valid grammar: "),
        (Guide.grammar("start: a\na: a"), "guide must allow some text, this grammar allows none"),
        (Guide.json_schema({"$ref": "#"}), "guide must allow some text, this json_schema allows none"),
    ],
)
def test_guides_that_cannot_be_compiled_are_refused(guide: Guide, reason: str) -> None:
    engine = make_engine()
    for _ in range(2):
        with pytest.raises(ValueError, match=reason):
            engine.add_request(PROMPTS[0], drawn(guide))
    assert not engine.has_unfinished


def test_compiled_guides_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_compiler, "MAX_KEPT", 2)
    compiler, found = guide_compiler.GuideCompiler(byte_level(), VOCAB, [1]), []
    compiled = compiler._compiled
    monkeypatch.setattr(compiler, "_compiled", lambda guide: found.append(guide.source) or compiled(guide))
    for source in ("a", "b", "a", "c", "a", "b", "a"):
        compiler.sequence(Guide.regex(source), False)
    assert found == ["a", "b", "c", "b"] and len(compiler._kept) == 2


def test_guides_of_living_sequences_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_compiler, "MAX_KEPT", 0)
    compiler, found = guide_compiler.GuideCompiler(byte_level(), VOCAB, [1]), []
    compiled = compiler._compiled
    monkeypatch.setattr(compiler, "_compiled", lambda guide: found.append(guide.source) or compiled(guide))
    first = compiler.sequence(Guide.regex("ab"), False)
    second = compiler.sequence(Guide.regex("ab"), True)
    assert found == ["ab"] and not compiler._kept and len(compiler._alive) == 1
    del first, second
    gc.collect()
    assert len(compiler._alive) == 0


def test_long_guides_are_kept_up_to_a_number_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest one is kept, however long it is."""
    monkeypatch.setattr(guide_compiler, "MAX_KEPT_CHARACTERS", 10)
    compiler = guide_compiler.GuideCompiler(byte_level(), VOCAB, [1])
    for source, kept in (("a" * 6, [6]), ("b" * 4, [6, 4]), ("c", [4, 1]), ("d" * 20, [20]), ("c", [1])):
        compiler.sequence(Guide.regex(source), False)
        assert [len(guide.source) for guide in compiler._kept] == kept


def test_without_the_extra_or_a_tokenizer_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match=r"guide needs the extra 'guided': pip install 'kvpage\[guided\]'"):
        engine.add_request(PROMPTS[0], drawn(ROWS[0][1]))
    monkeypatch.undo()
    model = make_model("llama", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="guide needs the tokenizer"):
        Engine.from_model(model, EngineConfig(CacheConfig(4, 20))).add_request(PROMPTS[0], drawn(ROWS[0][1]))
    with pytest.raises(ValueError, match="guide needs a tokenizer that llguidance reads: .*WordPiece"):
        make_engine(word_piece).add_request(PROMPTS[0], drawn(ROWS[0][1]))
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (lambda: Guide.json_schema("{"), ValueError, "schema must be JSON: "),
        (lambda: Guide.json_schema(False), ValueError, "schema must allow something, got false"),
        (lambda: Guide.json_schema("false"), ValueError, "schema must allow something, got false"),
        (lambda: Guide.json_schema("[1]"), ValueError, r"schema must be an object or true, got \[1\]"),
        (lambda: Guide.json_schema({"a": object()}), ValueError, "schema must be JSON: "),
        (lambda: Guide.json_schema(3), TypeError, "schema must be a mapping or JSON text, got int"),
        (lambda: Guide.regex(""), ValueError, "source must not be empty"),
        (lambda: Guide.regex(b"a"), TypeError, "source must be a str, got bytes"),
        (lambda: Guide.choice("ab"), TypeError, "choices must be a list of texts, got str"),
        (lambda: Guide.choice(["a", 3]), TypeError, "choices must be texts, got 3"),
        (lambda: Guide.choice([]), ValueError, "choices must be at least one text, none of them empty"),
        (lambda: Guide.choice(["a", ""]), ValueError, "choices must be at least one text, none of them empty"),
        (lambda: Guide("yaml", "a"), ValueError, "kind must be one of json_schema, regex, choice, grammar"),
        (lambda: Guide("regex", "a", 1), TypeError, "compact must be True or False, got int"),
        (lambda: SamplingParams(guide="[0-9]"), ValueError, "guide must be a Guide, such as Guide.regex"),
    ],
)
def test_other_arguments_are_refused(make, error: type, reason: str) -> None:
    with pytest.raises(error, match=reason):
        make()


def test_the_words_of_a_device_hold_the_mask() -> None:
    """As kernels read it: the bits of other rules, and the counts, stay."""
    from kvpage.serving.sampling.sampled_row import SampledRow
    from kvpage.serving.sampling.token_tables import SUPPRESSED

    guided = guide_compiler.GuideCompiler(byte_level(), VOCAB, [1]).sequence(Guide.regex("[ab]{2}c"), False)
    params = SamplingParams(suppress_tokens=[5], presence_penalty=1.0)
    row = SampledRow(params, [], 3, 9, guided)
    tables = row.tables_on(torch.device("cpu"), VOCAB)
    tokens = np.array([7, 8, 9], np.int32)
    tables.hold(tokens)
    before = tables.words.clone()
    a, b, c = byte_level().convert_tokens_to_ids(["a", "b", "c"])
    for generated, allowed in (([], {a, b}), ([a], {a, b}), ([a, b], {c})):
        row.follow_guide(np.array(generated, np.int32))
        tables.allow(row.mask)
        found = {index for index in range(VOCAB) if not tables.words[index] & SUPPRESSED}
        texts = {byte_level().decode([index]) for index in found}
        assert allowed <= found and all(re.fullmatch("[ab]{1,2}c?|c", text) for text in texts), texts
        assert torch.equal(tables.words & ~SUPPRESSED, before & ~SUPPRESSED) and 5 not in found
    row.follow_guide(np.array([a, b, c], np.int32))
    assert guided.is_over(np.array([a, b, c], np.int32)) and is_allowed(row.mask, 1)


def test_blanks_between_tokens_of_json_are_bounded() -> None:
    tokenizer = byte_level()
    compiler = guide_compiler.GuideCompiler(tokenizer, len(tokenizer), [1])
    for text, is_allowed in (
        ('{"a": 1, "b": [1, 2]}', True),
        ('{\n  "a": [\n    1\n  ]\n}', True),
        ('{\r\n\t"a":1}', True),
        ('{"a":1}', True),
        ("{\n" + 20 * " " + '"a":1}', True),
        ("{\n" + 21 * " " + '"a":1}', False),
        ('{  "a":1}', False),
        ('{\n\n"a":1}', False),
    ):
        sequence, taken = compiler.sequence(Guide.json_object(), False), np.empty(0, np.int32)
        found = True
        for token in tokenizer.encode(text, add_special_tokens=False):
            mask = sequence.mask(taken)
            found = found and bool(int(mask[token // 32]) >> token % 32 & 1)
            if not found:
                break
            taken = np.append(taken, np.int32(token))
        assert found == is_allowed, text


def test_guides_that_fail_at_their_first_tokens_are_refused() -> None:
    for guide in (Guide.regex("(a?){1000}a{1000}"), Guide.choice([f"{number}" + "xy" * 20 for number in range(4096)])):
        with pytest.raises(ValueError, match="guide must take less work for a token, this .* takes too much: "):
            guide_compiler.GuideCompiler(byte_level(), len(byte_level()), [1]).sequence(guide, False)
