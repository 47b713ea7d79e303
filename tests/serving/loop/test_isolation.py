"""A request whose logits are no numbers, or with which the model raises, ends alone, and nothing of it stays cached."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.models import VOCAB, generate_each, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.blend import BlendConfig, MemorySegments
from kvpage.serving import (
    BeamSearchParams,
    Branches,
    Engine,
    EngineConfig,
    LogitsNotFinite,
    PagedTokenTrie,
    RequestOutput,
    SamplingParams,
)
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier

B, NUM_TOKENS = 4, 6
PARAMS = SamplingParams(max_tokens=NUM_TOKENS)
POISON = VOCAB - 1
LENGTHS = [B - 1, B, B + 1, 2 * B, 5 * B + 3]
GOOD = [[token if token != POISON else 1 for token in prompt] for prompt in make_prompts(LENGTHS, seed=7)]
BAD = [3, 1, 4, 1, 5, POISON, 9, 2, 6, 5, 3, 5, 8, 9, 7]
REASON = "the logits after {} tokens are no finite numbers"


def poisoned_model() -> torch.nn.Module:
    """Whatever has attended to the token POISON is NaN; it is never generated."""
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
        model.get_output_embeddings().weight[POISON] = 0
    return model


def make_engine(model: torch.nn.Module | None = None, num_blocks: int = 64, **fields: object) -> Engine:
    cache, segments = CacheConfig(B, num_blocks, fields.pop("num_cpu_blocks", 0)), fields.pop("segments", None)
    return Engine.from_model(model or poisoned_model(), EngineConfig(cache, **fields), segments=segments)


def raising_engine(tokens: tuple[int, ...] = (POISON,), **fields: object) -> Engine:
    """Its model raises, amid its layers, when one of these tokens is in the batch."""
    engine = make_engine(make_model("llama"), **fields)

    def see(module: torch.nn.Module, args: tuple) -> None:
        seen.append(args[0])

    def fail(module: torch.nn.Module, args: tuple) -> None:
        if np.isin(seen.pop().numpy(), tokens).any():
            raise RuntimeError("boom")

    seen: list[torch.Tensor] = []
    model = engine.debug.runner.model
    model.get_input_embeddings().register_forward_pre_hook(see)
    model.model.layers[1].register_forward_pre_hook(fail)
    return engine


def expected(prompts: list[list[int]] = GOOD, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    return generate_each(make_model("llama"), prompts, num_tokens)


def drain(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    for _ in range(200):
        outputs |= {one.request_id: one.output for one in engine.step() if one.output}
    assert not engine.has_unfinished
    return outputs


def check_nothing_left(engine: Engine, *prompts: list[int]) -> None:
    """No block is held, and none of the prompts is found."""
    engine.manager.check()
    stats = engine.stats()
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    for prompt in prompts:
        match = engine.manager.tree.match(prompt + [0])
        engine.manager.tree.release(match)
        assert match.num_tokens == 0, prompt


# --- logits that are no numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("num_batched", [3, B, 2 * B + 1, 2048])
@pytest.mark.parametrize("caches", [True, False])
def test_one_ends_and_all_others_go_on(place: int, num_batched: int, caches: bool) -> None:
    engine = make_engine(max_num_batched_tokens=num_batched, enable_prefix_caching=caches)
    prompts = [*GOOD[:place], BAD, *GOOD[place:]]
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, PARAMS, str(number))
    outputs = drain(engine)
    bad = outputs.pop(str(place))
    assert (bad.finish_reason, bad.token_ids, bad.first_token_time) == ("error", [], None)
    end = min(len(BAD), next(end for end in range(6, 99) if end == len(BAD) or end * (num_batched < 9) >= 6))
    assert bad.error in {REASON.format(len(BAD)), REASON.format(end)}
    assert [outputs[str(one)].token_ids for one in range(len(prompts)) if one != place] == expected()
    assert all(one.error is None and one.finish_reason == "length" for one in outputs.values())
    assert engine.stats().num_computed_tokens < sum(map(len, prompts)) + len(GOOD) * NUM_TOKENS
    check_nothing_left(engine, BAD)


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", [PARAMS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=3)])
def test_which_rows_are_no_numbers(worst: float, params: SamplingParams) -> None:
    """One entry of NaN or +inf is enough; of -inf all have to be, for models rule tokens out by it."""
    engine = make_engine(make_model("llama"))
    alone = [one.token_ids for one in engine.generate(GOOD, params)]
    banned = next(token for token in range(VOCAB) if not any(token in tokens for tokens in alone))

    def hook(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        output[..., 1, banned] = worst
        if worst == -float("inf"):
            output[..., 2, :] = worst
        return output

    handle = engine.debug.runner.model.get_output_embeddings().register_forward_hook(hook)
    ids = [engine.add_request(prompt, params) for prompt in GOOD]
    first = engine.step()
    handle.remove()
    outputs = drain(engine) | {one.request_id: one.output for one in first if one.output}
    bad = 2 if worst == -float("inf") else 1
    assert [outputs[one].finish_reason == "error" for one in ids] == [index == bad for index in range(len(ids))]
    for index, one in enumerate(ids):
        assert index == bad or outputs[one].token_ids == alone[index]


def test_a_request_that_fails_while_it_decodes() -> None:
    """It keeps the tokens that it got; neither they nor its prompt are found. StepOutputs say it, once."""
    tokens = expected([*GOOD, BAD], 8)
    unlike = {token for each in [*GOOD, *tokens[:-1], BAD] for token in each}
    fed = next(index for index, token in enumerate(tokens[-1]) if index and token not in unlike)
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens[-1][fed]] = float("nan")
    engine = make_engine(model)
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=8)) for prompt in [*GOOD, BAD]]
    steps = [one for _ in range(50) for one in engine.step()]
    found = [[one.token_id for one in steps if one.request_id == request_id] for request_id in ids]
    assert found == [*tokens[:-1], [*tokens[-1][: fed + 1], None]]
    last = [one for one in steps if one.request_id == ids[-1]][-1]
    assert (last.finish_reason, last.error) == ("error", REASON.format(len(BAD) + fed + 1))
    assert last.output.token_ids == tokens[-1][: fed + 1] and last.output.error == last.error
    check_nothing_left(engine, BAD)


def test_blocks_that_others_share_stay_theirs() -> None:
    """Of one prefix, the others' blocks; the failed one's own are gone."""
    engine, stem = make_engine(), GOOD[4]
    sound, broken = [*stem, 7, 8, 9, 10], [*stem, POISON, 8, 9, 10]
    ids = [engine.add_request(prompt, PARAMS) for prompt in (sound, broken, [*stem, 11])]
    outputs = drain(engine)
    assert [outputs[one].finish_reason for one in ids] == ["length", "error", "length"]
    again = engine.generate([sound, [*stem, 11]], PARAMS)
    assert [one.token_ids for one in again] == expected([sound, [*stem, 11]])
    assert min(one.num_cached_tokens for one in again) >= len(stem) // B * B
    match = engine.manager.tree.match(broken + [0])
    engine.manager.tree.release(match)
    assert match.num_tokens <= len(stem) // B * B


def test_a_chunk_that_came_to_nan_is_never_findable() -> None:
    """Not even between two steps, while the rest of the prompt is to be computed."""
    engine = make_engine(max_num_batched_tokens=B)
    sound = [1, 2, 3, 4]
    engine.add_request([*sound, POISON, *range(1, 3 * B)], PARAMS, "bad")
    assert engine.step() == []
    match = engine.manager.tree.match([*sound, POISON, 9])
    engine.manager.tree.release(match)
    assert match.num_tokens == B
    (one,) = engine.step()
    assert one.finish_reason == "error" and one.error == REASON.format(len(sound) + 3 * B)
    check_nothing_left(engine, sound)


@pytest.mark.parametrize("fails_first", [True, False])
def test_samples_of_one_prompt(fails_first: bool) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=2.0, seed=5, n=4)
    engine = make_engine(max_num_seqs=8)
    others = [engine.add_request(prompt, PARAMS) for prompt in GOOD[:2]]
    if fails_first:
        bad = engine.add_request(BAD, params)
        outputs = drain(engine)
        (sample,) = outputs[bad].samples
        assert (sample.finish_reason, sample.token_ids, outputs[bad].error) == ("error", [], REASON.format(len(BAD)))
        check_nothing_left(engine, BAD)
    else:  # one sample is fed a token whose row is NaN from then on
        alone = [one.token_ids for one in make_engine().generate([GOOD[4]], params)[0].samples]
        plain = {token for each in expected(GOOD[:2]) for token in each}.union(*GOOD, *alone[1:])
        fed = next(index for index, token in enumerate(alone[0][:-1]) if token not in plain)
        with torch.no_grad():
            engine.debug.runner.model.get_input_embeddings().weight[alone[0][fed]] = float("nan")
        engine.debug.accept_weights()
        bad = engine.add_request(GOOD[4], params)
        outputs = drain(engine)
        samples = outputs[bad].samples
        assert [one.finish_reason for one in samples] == ["error", "length", "length", "length"]
        assert [one.token_ids for one in samples] == [alone[0][: fed + 1], *alone[1:]]
        assert outputs[bad].error == samples[0].error == REASON.format(len(GOOD[4]) + fed + 1)
        check_nothing_left(engine)
    assert [outputs[one].token_ids for one in others] == expected(GOOD[:2])


def test_generate_and_streams() -> None:
    engine = make_engine()
    outputs = engine.generate([GOOD[0], BAD, GOOD[1]], PARAMS, progress=(progress := []).append)
    assert [one.finish_reason for one in outputs] == ["length", "error", "length"] and sum(progress) == 3
    assert [outputs[0].token_ids, outputs[2].token_ids] == expected(GOOD[:2])
    good, bad = engine.stream(GOOD[2], PARAMS), engine.stream(BAD, PARAMS)
    assert (good.finish_reason, good.output, good.error) == (None, None, None)
    assert list(bad) == list(bad) == []
    assert (bad.finish_reason, bad.error) == ("error", REASON.format(len(BAD)))
    assert list(good) == expected()[2]
    assert (good.finish_reason, good.output.token_ids, good.error) == ("length", expected()[2], None)
    closed = engine.stream(GOOD[2], PARAMS)
    next(closed)
    closed.close()
    assert (closed.finish_reason, closed.output) == ("abort", None)
    check_nothing_left(engine, BAD)


def test_a_streams_finish_reason_stop() -> None:
    engine = make_engine()
    stop = expected()[4][2]
    stream = engine.stream(GOOD[4], SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=[stop]))
    assert list(stream)[-1] == stop and stream.finish_reason == stream.output.finish_reason == "stop"


def test_nothing_of_it_goes_to_the_store() -> None:
    long = [*GOOD[4], *GOOD[3], POISON, *GOOD[3]]
    engine = make_engine(max_num_batched_tokens=2 * B, save_generated=True)
    with KVStore(KVStoreConfig(B), metadata_of(engine.cache, "m"), [MemoryTier(1 << 20)]) as store:
        engine.use_store(store)
        outputs = engine.generate([long, GOOD[4][:B] + [5] * B], PARAMS)
        assert [one.finish_reason for one in outputs] == ["error", "length"]
        engine.close()
        assert store.lookup(np.array(long, np.int32)) == B
    check_nothing_left(engine)


def test_nothing_of_it_is_kept_for_blending() -> None:
    segments = MemorySegments(1 << 20)
    engine = make_engine(blend=BlendConfig(ratio=0.5), segments=segments)
    engine.add_request([*GOOD[3], POISON, 1], PARAMS, "bad", segments=[len(GOOD[3])])
    assert drain(engine)["bad"].finish_reason == "error" and len(segments) == 0
    with pytest.raises(RuntimeError, match="1 of 2 segments could not be computed: the logits after"):
        engine.warm_segments([[*GOOD[3], POISON], GOOD[3]])
    assert len(segments) == 1
    ids = [
        engine.add_request([*prompt, *GOOD[3], 5], PARAMS, blend=True, segments=[len(prompt), len(GOOD[3])])
        for prompt in ([2, 3, POISON], [2, 3, 4])
    ]
    outputs = drain(engine)
    assert [outputs[one].finish_reason for one in ids] == ["error", "length"]
    assert outputs[ids[1]].num_reused_tokens + outputs[ids[1]].num_recomputed_tokens == len(GOOD[3])
    engine.close()
    check_nothing_left(engine)


# --- sequences that are no requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_batched", [3, 2048])
def test_branches_raise_to_their_owner_and_cache_nothing(num_batched: int) -> None:
    engine = make_engine(max_num_batched_tokens=num_batched)
    with Branches(engine) as branches:
        first, bad, last = (branches.start(tokens) for tokens in (GOOD[4], [*GOOD[3], POISON, 1, 2], GOOD[2]))
        with pytest.raises(LogitsNotFinite, match="those of branch 1 are not") as error:
            branches.compute([first, bad, last], [[len(GOOD[4])], [], [2, len(GOOD[2])]])
        assert error.value.rows == [1] and bad.num_computed == 0
        branches.release([bad])
        logits = branches.compute([first, last], [[len(GOOD[4])], [2, len(GOOD[2])]])
        assert logits.shape == (3, VOCAB)
        wanted = expected([GOOD[4], GOOD[2][:2], GOOD[2]], 1)
        assert logits.argmax(dim=-1).tolist() == [token for (token,) in wanted]
    check_nothing_left(engine, GOOD[3])


def test_a_beam_search_ends_alone() -> None:
    params = BeamSearchParams(num_beams=2, max_tokens=4)
    alone = make_engine().beam_search(GOOD[:2], params)
    engine = make_engine()
    found = engine.beam_search([GOOD[0], BAD, GOOD[1]], params)
    assert [found[0].beams, found[2].beams] == [one.beams for one in alone]
    assert (found[1].beams, found[1].token_ids) == ((), [])
    assert found[1].error == "logits must be numbers, those of this prompt's beams are not"
    assert [one.error for one in alone] == [None, None]
    check_nothing_left(engine, BAD)


def test_a_token_trie_names_the_list() -> None:
    engine = make_engine()
    with PagedTokenTrie(engine) as trie:
        with pytest.raises(LogitsNotFinite, match="those of list 2 are not") as error:
            trie.next_token_logprobs([GOOD[4], GOOD[4], BAD, GOOD[3]])
        assert error.value.rows == [2]
        found = trie.next_token_logprobs([GOOD[4], GOOD[3]])
        assert found.argmax(dim=-1).tolist() == [tokens[0] for tokens in (expected()[4], expected()[3])]
    check_nothing_left(engine, BAD)


# --- what the model raises -------------------------------------------------------------------------------------------


def run(engine: Engine) -> tuple[dict[str, RequestOutput], int]:
    """By one who steps on whatever is raised: the outputs, and how often a step raised."""
    outputs, num_raised = {}, 0
    for _ in range(200):
        try:
            outputs |= {one.request_id: one.output for one in engine.step() if one.output}
        except RuntimeError as error:
            assert str(error) == "boom"
            num_raised += 1
    assert not engine.has_unfinished
    return outputs, num_raised


CULPRITS = [(0,), (3,), (7,), (0, 1), (2, 6), tuple(range(8))]


@pytest.mark.parametrize("culprits", CULPRITS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 7},
        {"max_num_seqs": 2},
        {"num_blocks": 12, "num_cpu_blocks": 12, "load_or_compute": False},
        {"num_blocks": 12},
    ],
)
def test_those_with_whom_the_model_raises_end_and_no_others(culprits: tuple[int, ...], fields: dict) -> None:
    engine = raising_engine(**fields)
    prompts = [[*GOOD[index % 5][:9], index + 1, *([POISON] if index in culprits else [])] for index in range(8)]
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, PARAMS, str(number))
    outputs, num_raised = run(engine)
    assert 1 <= num_raised <= len(culprits)
    bad = {str(index) for index in culprits}
    assert {name for name, one in outputs.items() if one.finish_reason == "error"} == bad
    assert all(outputs[name].error == "RuntimeError: boom" for name in bad)
    good = [index for index in range(8) if index not in culprits]
    assert [outputs[str(index)].token_ids for index in good] == expected([prompts[index] for index in good])
    check_nothing_left(engine)


def test_a_model_that_always_raises_ends_everybody() -> None:
    engine = raising_engine(tuple(range(VOCAB)))
    for prompt in GOOD:
        engine.add_request(prompt, PARAMS)
    outputs, num_raised = run(engine)
    assert num_raised == 1 and {one.finish_reason for one in outputs.values()} == {"error"} and len(outputs) == 5
    check_nothing_left(engine, *GOOD)


def test_more_that_wait_before_a_suspect_than_run() -> None:
    """They are not to be admitted before it, and it is found behind them."""
    engine = raising_engine(max_num_seqs=2)
    engine.add_request([POISON, 1], PARAMS, "bad")
    engine.add_request(GOOD[0], PARAMS, "good")
    with pytest.raises(RuntimeError, match="boom"):
        engine.step()
    for request in engine.scheduler.waiting:
        request.group.arrival += 100
    late = [engine.add_request(prompt, PARAMS) for prompt in [*GOOD, *GOOD]]
    engine.scheduler.waiting.sort(key=lambda request: request.group.arrival)
    outputs, _ = run(engine)
    assert outputs["bad"].finish_reason == "error" and outputs["good"].token_ids == expected()[0]
    assert [outputs[one].token_ids for one in late] == [*expected(), *expected()]


@pytest.mark.parametrize("samples", [1, 3])
def test_one_with_whom_the_model_raises_later(samples: int) -> None:
    """When it is fed what it has generated. Of several samples, those that get there."""
    params = SamplingParams(max_tokens=8, n=samples, temperature=1.0 if samples > 1 else 0.0, seed=1)
    prompts = [GOOD[4], *GOOD[:2]]
    each = [params, SamplingParams(max_tokens=8), SamplingParams(max_tokens=8)]
    sound = make_engine(make_model("llama"))
    alone = [[sample.token_ids for sample in one.samples] for one in sound.generate(prompts, each)]
    plain = {token for prompt in prompts for token in prompt}.union(*alone[1][:1], *alone[2][:1], *alone[0][1:])
    fed = next(index for index, token in enumerate(alone[0][0][:-1]) if token not in plain and index)
    engine = raising_engine((alone[0][0][fed],))
    ids = [engine.add_request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    outputs, num_raised = run(engine)
    found = [[sample.token_ids for sample in outputs[one].samples] for one in ids]
    assert found == [[alone[0][0][: fed + 1], *alone[0][1:]], *alone[1:]] and num_raised == 1
    reasons = [sample.finish_reason for sample in outputs[ids[0]].samples]
    assert reasons == ["error", *["length"] * (samples - 1)]
    check_nothing_left(engine)


@pytest.mark.parametrize("aborts", [True, False])
def test_amid_the_search_requests_come_go_and_ctrl_c_is_pressed(aborts: bool) -> None:
    engine = raising_engine()
    ids = [engine.add_request(prompt, PARAMS) for prompt in [*GOOD, BAD]]
    with pytest.raises(RuntimeError, match="boom"):
        engine.step()
    outputs = {one.request_id: one.output for _ in range(2) for one in engine.step() if one.output}
    if aborts:
        for one in list(engine.loop._suspects.group):
            engine.abort(one.request_id)
            ids.remove(one.request_id)

    def press(module: torch.nn.Module, args: tuple) -> None:
        handle.remove()
        raise KeyboardInterrupt

    handle = engine.debug.runner.model.register_forward_pre_hook(press)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    late = engine.add_request(GOOD[0], PARAMS)
    outputs |= run(engine)[0]
    assert outputs[late].token_ids == expected()[0]
    good = dict(zip([f"request-{index}" for index in range(5)], expected(), strict=True))
    assert {one: outputs[one].token_ids for one in ids if one in good} == {one: good[one] for one in ids if one in good}
    assert [outputs[one].finish_reason for one in ids if one not in good] in (["error"], [])
    check_nothing_left(engine)


@pytest.mark.parametrize("take", [lambda engine: engine.generate(GOOD[:2], PARAMS), lambda engine: None])
def test_generate_and_streams_go_on(take: Callable[[Engine], object], caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else's request is no reason to lose theirs. What was raised is logged, once for each try."""
    engine = raising_engine()
    other, stream = engine.add_request(BAD, PARAMS, "bad"), engine.stream(GOOD[2], PARAMS)
    with caplog.at_level(logging.WARNING, "kvpage"):
        if outputs := take(engine):
            assert [one.token_ids for one in outputs] == expected(GOOD[:2])
        assert list(stream) == expected()[2] and stream.finish_reason == "length"
        mine = engine.generate([BAD, GOOD[4]], PARAMS)
    assert [one.finish_reason for one in mine] == ["error", "length"] and mine[1].token_ids == expected()[4]
    assert {one.request_id: one.error for one in engine.step()} == {other: "RuntimeError: boom"}
    assert 1 <= len(caplog.records) <= 2 and caplog.records[0].exc_info
    check_nothing_left(engine)


def test_what_is_raised_by_chance_costs_nothing_but_time() -> None:
    """A batch that is computed the second time, over and over again, ends nobody."""
    engine = make_engine()
    calls = []

    def hook(module: torch.nn.Module, args: tuple) -> None:
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("boom")

    engine.debug.runner.model.model.layers[1].register_forward_pre_hook(hook)
    assert [one.token_ids for one in engine.generate(GOOD, PARAMS)] == expected()
    check_nothing_left(engine)


def test_a_batch_that_is_too_large_ends_nobody() -> None:
    """As where memory lacks for all of them at once: halves of it go through."""
    engine = make_engine()

    def hook(module: torch.nn.Module, args: tuple) -> None:
        if args[0].shape[1] > 24:
            raise MemoryError

    engine.debug.runner.model.model.layers[1].register_forward_pre_hook(hook)
    assert [one.token_ids for one in engine.generate(GOOD, PARAMS)] == expected()
    check_nothing_left(engine)


def test_what_raises_after_the_model_is_done_ends_its_request() -> None:
    """As what chooses a token."""
    engine = make_engine()
    works = engine.debug.connectors.save_generated

    def fails(request: object) -> None:
        if request.request_id == "bad":
            raise RuntimeError("boom")
        works(request)

    engine.debug.connectors.save_generated = fails
    for number, prompt in enumerate(GOOD):
        engine.add_request(prompt, PARAMS, "bad" if number == 2 else str(number))
    outputs, num_raised = run(engine)
    assert outputs["bad"].error == "RuntimeError: boom" and num_raised == 1
    assert [outputs[name].token_ids for name in ("0", "1", "3", "4")] == [*expected()[:2], *expected()[3:]]
    check_nothing_left(engine)
