"""The engine's promises to its caller: requests, errors, aborts, streams, and a model that stays the caller's."""

import threading
from functools import cache

import pytest
import torch
from support.engines import B, make_engine
from support.models import VOCAB, generate_each, generate_padded, make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import BeamSearchParams, Engine, EngineConfig, RequestOutput, SamplingParams

PROMPTS = make_prompts([6, 11, 3])
PARAMS = SamplingParams(max_tokens=8)


@cache
def expected() -> list[list[int]]:
    return generate_each(make_model("llama"), PROMPTS, 8)


def model_of(engine: Engine) -> torch.nn.Module:
    return engine.debug.runner.model


def drain(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output.output for output in engine.step() if output.output}
    return outputs


# --- requests and outputs --------------------------------------------------------------------------------------------


def test_steps_give_every_token_once_and_the_whole_with_the_last() -> None:
    engine = make_engine()
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    outputs = {}
    while engine.has_unfinished:
        for one in engine.step():
            tokens[one.request_id].append(one.token_id)
            assert one.finish_reason == ("length" if len(tokens[one.request_id]) == 8 else None)
            if one.output:
                outputs[one.request_id] = one.output
    assert list(tokens.values()) == expected()
    for request_id, prompt, generated in zip(ids, PROMPTS, expected(), strict=True):
        output = outputs[request_id]
        assert (output.request_id, output.prompt_token_ids, output.token_ids) == (request_id, prompt, generated)
        assert output.finish_reason == "length"
        assert output.arrival_time <= output.first_token_time <= output.finish_time
    assert engine.step() == []


def test_stop_tokens_end_a_request_and_are_part_of_it() -> None:
    stop = expected()[1][3]
    params = [PARAMS, SamplingParams(max_tokens=8, stop_token_ids=[VOCAB + 5, stop]), PARAMS]
    outputs = make_engine().generate(PROMPTS, params)
    assert outputs[1].token_ids == expected()[1][: expected()[1].index(stop) + 1]
    assert [output.finish_reason for output in outputs] == ["length", "stop", "length"]
    assert [outputs[0].token_ids, outputs[2].token_ids] == [expected()[0], expected()[2]]


def test_tokens_come_as_lists_arrays_and_tensors() -> None:
    engine = make_engine()
    prompts = [PROMPTS[0], torch.tensor(PROMPTS[0]), torch.tensor(PROMPTS[0], dtype=torch.int32).numpy()]
    assert [output.token_ids for output in engine.generate(prompts, PARAMS)] == [expected()[0]] * 3
    assert engine.generate([], PARAMS) == []


def test_seeds_give_the_same_tokens_alone_together_and_after_preemption() -> None:
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=seed) for seed in (1, 2, 3)]
    alone = [make_engine().generate([prompt], one)[0].token_ids for prompt, one in zip(PROMPTS, params, strict=True)]
    assert [output.token_ids for output in make_engine().generate(PROMPTS, params)] == alone
    scarce = make_engine(num_blocks=9)
    assert [output.token_ids for output in scarce.generate(PROMPTS, params)] == alone
    assert scarce.stats().num_preemptions > 0


def test_namespaces_share_nothing() -> None:
    engine = make_engine()
    cached = []
    for namespace in (b"", b"tenant", b"tenant", b""):
        request_id = engine.add_request(PROMPTS[1], PARAMS, namespace=namespace)
        output = drain(engine)[request_id]
        assert output.token_ids == expected()[1]
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 10, 10]  # of 11: two blocks, and two tokens of the block that generated tokens have filled


def test_a_prefix_of_requests_that_arrive_together_is_computed_once() -> None:
    engine = make_engine(num_blocks=256)
    prefix = make_prompts([10 * B], seed=5)[0]
    prompts = [prefix + [1 + number] for number in range(8)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=1))
    assert [output.num_cached_tokens for output in outputs] == [0] + [10 * B] * 7
    assert engine.stats().num_computed_tokens == 10 * B + 8


def test_stats_count() -> None:
    engine = make_engine()
    engine.generate(PROMPTS, PARAMS)
    engine.add_request(PROMPTS[1], PARAMS)
    engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    engine.add_request(PROMPTS[2], PARAMS)
    stats = engine.stats()
    assert (stats.num_finished, stats.num_running, stats.num_waiting) == (3, 2, 1)
    assert stats.num_generated_tokens == 3 * 8 + 2
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (2 * 17 + 3, 10 + 5)
    assert stats.num_computed_tokens == (6 + 11 + 3 + 3 * 7) + (1 + 1)
    assert stats.num_steps == 9
    assert stats.num_used_blocks == 3 + 2
    assert stats.num_blocks == 128
    assert stats.hit_rate == pytest.approx(15 / 37)
    assert make_engine().stats().hit_rate == 0


# --- generate, stream and abort --------------------------------------------------------------------------------------


def test_generate_reports_progress_and_lets_others_go_on() -> None:
    engine, progress = make_engine(), []
    other = engine.add_request(PROMPTS[2], PARAMS)
    outputs = engine.generate(PROMPTS[:2], [PARAMS, SamplingParams(max_tokens=3)], progress=progress.append)
    assert [output.token_ids for output in outputs] == [expected()[0], expected()[1][:3]]
    assert progress == [1, 1]
    delivered = engine.step()
    assert [output.token_id for output in delivered] == expected()[2]
    assert delivered[-1].output.request_id == other


def test_streams_side_by_side_with_steps_between() -> None:
    engine = make_engine()
    first, second = (engine.stream(prompt, PARAMS) for prompt in PROMPTS[:2])
    other = engine.add_request(PROMPTS[2], PARAMS)
    tokens = [[next(first)], [next(second)]]
    outputs = engine.step()
    tokens[0] += first
    tokens[1] += second
    outputs += engine.step()
    assert tokens == expected()[:2]
    assert [output.token_id for output in outputs if output.request_id == other] == expected()[2]
    assert not engine.has_unfinished


@pytest.mark.parametrize("num_taken", [0, 1, 3])
@pytest.mark.parametrize("drop", [False, True])
def test_a_stream_that_is_closed_or_dropped_leaves_nothing(num_taken: int, drop: bool) -> None:
    engine = make_engine()
    other = engine.add_request(PROMPTS[2], PARAMS)
    stream = engine.stream(PROMPTS[0], PARAMS)
    assert [next(stream) for _ in range(num_taken)] == expected()[0][:num_taken]
    if drop:
        del stream
        assert engine.has_unfinished
    else:
        stream.close()
        stream.close()
        assert list(stream) == []
    stats = engine.stats()
    assert stats.num_running + stats.num_waiting == 1
    assert stats.num_finished == 1
    engine.manager.check()
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [output.token_id for output in outputs if output.request_id == other] == expected()[2]
    assert engine.stats().num_used_blocks == 0


def test_a_finished_stream_may_be_closed() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS[0], PARAMS)
    assert list(stream) == expected()[0]
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    assert engine.stats().num_finished == 1


def test_a_stream_whose_step_is_interrupted_is_over() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS[0], PARAMS)
    fail_once(engine, Interruption("boom"))
    with pytest.raises(Interruption, match="boom"):
        next(stream)
    assert stream.finish_reason == "abort"
    assert list(stream) == [] and not engine.has_unfinished


def test_the_collector_changes_nothing_by_itself() -> None:
    """It runs amid anything, on any thread: the engine's next step aborts what it has dropped."""
    engine = make_engine()
    streams = [engine.stream(prompt, PARAMS) for prompt in PROMPTS[:2]]
    assert [next(stream) for stream in streams] == [tokens[0] for tokens in expected()[:2]]
    before = engine.stats()
    collector = threading.Thread(target=streams.pop)
    collector.start()
    collector.join()
    assert engine.stats() == before and before.num_running == 2
    assert list(streams[0]) == expected()[0][1:]
    assert engine.stats().num_finished == 2 and not engine.has_unfinished
    assert engine.stats().num_used_blocks == 0
    engine.manager.check()


def test_streams_that_the_collector_drops_during_a_step() -> None:
    """It comes when it likes: also while the scheduler walks over its requests, and while the model runs."""
    engine = make_engine(max_num_seqs=2)
    streams = [engine.stream(prompt, PARAMS) for prompt in PROMPTS]
    tokens = [next(streams[0])]
    dropped = []

    def hook(module: torch.nn.Module, args: tuple) -> None:
        handle.remove()
        del streams[1:]
        dropped.append(engine.stats().num_finished)

    handle = model_of(engine).model.layers[1].register_forward_pre_hook(hook)
    tokens.append(next(streams[0]))
    assert dropped == [0] and engine.stats().num_finished == 2
    assert tokens + list(streams[0]) == expected()[0]
    engine.manager.check()
    assert not engine.has_unfinished and engine.stats().num_used_blocks == 0


def test_what_a_hook_or_a_signal_asks_for_during_a_step() -> None:
    """Aborts and steps are refused, a stream's end waits for the step's, and new requests are welcome."""
    engine = make_engine()
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    stream, refused = engine.stream(PROMPTS[0], PARAMS), []

    def hook(module: torch.nn.Module, args: tuple) -> None:
        handle.remove()
        for call in (
            lambda: engine.abort(ids[1]),
            engine.step,
            lambda: engine.generate(PROMPTS, PARAMS),
            lambda: next(stream),
            lambda: engine.beam_search(PROMPTS, BeamSearchParams(num_beams=2)),
        ):
            with pytest.raises(RuntimeError, match="during a step|before the one under way has ended") as error:
                call()
            refused.append(error)
        stream.close()
        ids.append(engine.add_request(PROMPTS[0], PARAMS, "late"))

    handle = model_of(engine).model.layers[1].register_forward_pre_hook(hook)
    outputs = drain(engine)
    assert len(refused) == 5 and list(stream) == []
    assert [outputs[one].token_ids for one in ids] == [*expected(), expected()[0]]
    engine.manager.check()
    assert engine.stats().num_used_blocks == 0


def test_abort_running_and_waiting() -> None:
    engine = make_engine(max_num_seqs=1)
    running, waiting = (engine.add_request(prompt, PARAMS) for prompt in PROMPTS[:2])
    engine.step()
    engine.step()
    output = engine.abort(running)
    assert (output.finish_reason, output.token_ids) == ("abort", expected()[0][:2])
    output = engine.abort(waiting)
    assert (output.finish_reason, output.token_ids, output.first_token_time) == ("abort", [], None)
    assert not engine.has_unfinished
    assert engine.stats().num_used_blocks == 0
    engine.manager.check()
    assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == expected()[0]


def test_abort_of_what_is_not_there() -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[0], PARAMS, "one")
    with pytest.raises(KeyError, match="request_id must be that of an unfinished request, got 'two'"):
        engine.abort("two")
    drain(engine)
    with pytest.raises(KeyError, match="unfinished request, got 'one'"):
        engine.abort("one")


def test_a_stream_whose_request_is_aborted_raises() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS[0], PARAMS)
    next(stream)
    (request_id,) = engine.loop.requests
    engine.abort(request_id)
    with pytest.raises(RuntimeError, match="was aborted"):
        next(stream)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([], "tokens must hold at least one token, got none"),
        ([1, VOCAB], rf"tokens must be ids in \[0, {VOCAB}\), got 1 to {VOCAB}"),
        ([-1, 1], rf"tokens must be ids in \[0, {VOCAB}\), got -1 to 1"),
        ([2**40], "tokens must fit into 32 bits"),
        ([1.0, 2.0], "tokens must be integers, got float64"),
        ([[1, 2]], "tokens must be one-dimensional"),
        ([1] * 249, r"prompt and max_tokens must fit into max_model_len=256, got 249 \+ 8"),
        ([1] * 60, r"prompt and max_tokens must fit into 16 blocks of 4 tokens, got 60 \+ 8 tokens, 17 blocks"),
    ],
)
def test_bad_prompts_change_nothing(tokens: list, message: str) -> None:
    engine = make_engine(num_blocks=16)
    engine.add_request(PROMPTS[0], PARAMS, "good")
    before = engine.stats()
    for call in (
        lambda: engine.add_request(tokens, PARAMS),
        lambda: engine.generate([PROMPTS[1], tokens], PARAMS),
        lambda: engine.stream(tokens, PARAMS),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    after = engine.stats()
    assert (after.num_waiting, after.num_running, after.num_steps) == (1, 0, 0)
    assert after.num_used_blocks == before.num_used_blocks == 0
    assert drain(engine)["good"].token_ids == expected()[0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"params": {"max_tokens": 8}}, "params must be SamplingParams, got dict"),
        ({"params": SamplingParams}, "params must be SamplingParams, got type"),
        ({"namespace": "tenant"}, "namespace must be bytes, got str"),
        ({"namespace": None}, "namespace must be bytes, got NoneType"),
        ({"namespace": bytearray(b"tenant")}, "namespace must be bytes, got bytearray"),
        ({"request_id": 5}, "request_id must be a str, got int"),
        ({"blend": torch.tensor([0, 1])}, "blend must be True or False, got Tensor"),
        ({"blend": 0}, "blend must be True or False, got int"),
    ],
)
def test_arguments_of_other_types_change_nothing(change: dict, message: str) -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[0], PARAMS, "good")
    with pytest.raises(TypeError, match=message):
        engine.add_request(**{"tokens": PROMPTS[1], "params": PARAMS} | change)
    assert engine.stats().num_waiting == 1
    assert drain(engine)["good"].token_ids == expected()[0]
    engine.manager.check()


@pytest.mark.parametrize("params", [5, {"max_tokens": 8}, [PARAMS, 5]])
def test_generate_and_stream_take_sampling_params_only(params: object) -> None:
    engine = make_engine()
    prompts = PROMPTS[: len(params) if isinstance(params, (dict, list)) else 2]
    with pytest.raises(TypeError, match="params must be SamplingParams"):
        engine.generate(prompts, params)
    with pytest.raises(TypeError, match="params must be SamplingParams"):
        engine.stream(PROMPTS[0], params)
    assert not engine.has_unfinished and engine.stats().num_steps == 0


def test_an_id_in_use_is_refused() -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[0], PARAMS, "one")
    with pytest.raises(ValueError, match="request_id must not be in use, 'one' is"):
        engine.add_request(PROMPTS[1], PARAMS, "one")
    engine.add_request(PROMPTS[1], PARAMS, "request-2")
    assert engine.add_request(PROMPTS[2], PARAMS) == "request-3"
    outputs = drain(engine)
    assert [outputs[name].token_ids for name in ("one", "request-2", "request-3")] == expected()
    engine.add_request(PROMPTS[0], PARAMS, "one")  # ids of finished requests are free


def test_max_model_len_limits_prompt_and_output() -> None:
    engine = make_engine(max_model_len=14)
    assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == expected()[0]
    with pytest.raises(ValueError, match="max_model_len=14, got 11"):
        engine.add_request(PROMPTS[1], PARAMS)


# --- failures inside a step ------------------------------------------------------------------------------------------


class Interruption(BaseException):
    """Not an Exception, as KeyboardInterrupt is none."""


def fail_once(engine: Engine, error: BaseException) -> None:
    """The next forward raises in its second layer, when the first has written K and V."""

    def hook(module: torch.nn.Module, args: tuple) -> None:
        handle.remove()
        raise error

    handle = model_of(engine).model.layers[1].register_forward_pre_hook(hook)


@pytest.mark.parametrize("error", [RuntimeError("boom"), Interruption("boom")])
@pytest.mark.parametrize("num_steps_before", [0, 1, 4])
def test_a_failed_step_is_computed_again(num_steps_before: int, error: BaseException) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    outputs = [output for _ in range(num_steps_before) for output in engine.step()]
    fail_once(engine, error)
    with pytest.raises(type(error), match="boom"):
        engine.step()
    engine.manager.check()
    assert model_of(engine).config._attn_implementation == "eager"
    while engine.has_unfinished:
        outputs += engine.step()
    tokens = [[output.token_id for output in outputs if output.request_id == request_id] for request_id in ids]
    assert tokens == expected()
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_before", [0, 1, 5])
@pytest.mark.parametrize("where", ["keep", "save", "save_generated", "complete"])
def test_what_fails_after_the_model_is_done_costs_a_step(where: str, num_before: int, n: int) -> None:
    """A request whose token was sampled and not given out computes it again."""
    params = [SamplingParams(max_tokens=8, n=n, temperature=0.7, seed=seed) for seed in range(3)]
    alone = [[sample.token_ids for sample in output.samples] for output in make_engine().generate(PROMPTS, params)]
    engine = make_engine(max_num_batched_tokens=8)
    owner = engine.scheduler if where == "complete" else engine.debug.connectors
    works, calls = getattr(owner, where), []

    def fails(*args: object) -> None:
        calls.append(where)
        if len(calls) == num_before + 1:
            raise Interruption("boom")
        works(*args)

    setattr(owner, where, fails)
    ids = [engine.add_request(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    outputs, num_raised = {}, 0
    for _ in range(100):
        try:
            outputs |= {one.request_id: one.output for one in engine.step() if one.output}
        except Interruption:
            num_raised += 1
        engine.manager.check()
    assert num_raised == int(len(calls) > num_before) and not engine.has_unfinished
    assert [[sample.token_ids for sample in outputs[one].samples] for one in ids] == alone
    assert engine.stats().num_used_blocks == 0


def test_an_interrupted_generate_aborts_its_prompts_and_no_others() -> None:
    engine = make_engine()
    other = engine.add_request(PROMPTS[2], PARAMS)
    fail_once(engine, Interruption("boom"))
    with pytest.raises(Interruption, match="boom"):
        engine.generate(PROMPTS[:2], PARAMS)
    assert engine.stats().num_waiting == 1
    assert drain(engine)[other].token_ids == expected()[2]


# --- the caller's model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_the_model_is_the_callers_between_steps(own: str) -> None:
    model = make_model("mistral")
    model.set_attn_implementation(own)
    alone = generate_padded(model, PROMPTS, 6)
    engine = Engine.from_model(model, EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=64)))
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    outputs = engine.step() + engine.step()
    assert model.config._attn_implementation == own
    assert generate_padded(model, PROMPTS, 6) == alone
    while engine.has_unfinished:
        outputs += engine.step()
    tokens = [[output.token_id for output in outputs if output.request_id == request_id] for request_id in ids]
    assert tokens == generate_each(model, PROMPTS, 8)


def test_a_model_in_training_mode_is_refused() -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[0], PARAMS, "one")
    model_of(engine).train()
    with pytest.raises(ValueError, match="model must be in eval mode, LlamaForCausalLM is in training mode"):
        engine.step()
    model_of(engine).eval()
    assert drain(engine)["one"].token_ids == expected()[0]
