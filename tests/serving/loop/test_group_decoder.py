"""Decodes one step ahead, of each kind of model: no sequence sees a state or a block with a token too many."""

import random

import pytest
import torch
from support.cpu_graphs import LateFetch
from support.ctrl_c import CtrlC, pythons_handler  # noqa: F401, a fixture for all that is here
from support.group_engines import FULL, STATES, WINDOWS, GroupKind
from support.models import WINDOW
from support.state_engines import B, greedy, random_prompt

from kvpage.serving import Branches, Engine, SamplingParams
from kvpage.serving.loop.request import Request

PROMPT = random_prompt(3 * B + 2)
NUM_TOKENS = 12


@pytest.fixture(params=[*FULL, *WINDOWS, *STATES], scope="module")
def kind(request: pytest.FixtureRequest) -> GroupKind:
    return GroupKind(request.param)


@pytest.fixture(params=STATES, scope="module")
def stateful(request: pytest.FixtureRequest) -> GroupKind:
    return GroupKind(request.param)


def stop_of(answer: list[int], least: int = 3) -> int:
    """A token of the answer that is not among the first ones."""
    return next(token for token in answer[least:] if token not in answer[:least])


def check_next_turn(kind: GroupKind, engine: Engine, history: list[int], least: int = 0) -> None:
    """Whoever goes on after these tokens computes what the model computes, and finds so many of them."""
    tokens, num_cached = kind.engines.ask(engine, [*history, 5], 4)
    assert tokens == kind.answer([*history, 5], 4) and num_cached >= least


def run(engine: Engine, told: dict[str, list[int]], num_steps: int | None = None) -> None:
    """Step until all have ended, or so often; note the tokens."""
    while engine.has_unfinished and num_steps != 0:
        num_steps = None if num_steps is None else num_steps - 1
        for output in engine.step():
            told[output.request_id].append(output.token_id)


# --- who leaves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
def test_a_stop_that_is_seen_late(kind: GroupKind, graphs: bool) -> None:
    """The step ahead has computed the stop token: with states the next turn begins after it, not before."""
    answer = kind.answer(PROMPT, NUM_TOKENS)
    stop = stop_of(answer)
    expected = kind.answer(PROMPT, NUM_TOKENS, [stop])
    engine = kind.on_device(graphs=graphs)
    output = engine.generate([PROMPT], SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=[stop]))[0]
    assert output.token_ids == expected and output.finish_reason == "stop"
    assert engine.debug.decoder.num_ahead == len(expected) - 1
    history = [*PROMPT, *expected]
    check_next_turn(kind, engine, history, len(history) if kind.has_states else len(history) // B * B)
    kind.engines.check_nothing_held(engine)


def test_an_abort(kind: GroupKind) -> None:
    engine, told = kind.on_device(), {"a": [], "b": []}
    other = random_prompt(7, 3)
    engine.add_request(PROMPT, greedy(NUM_TOKENS), "a")
    engine.add_request(other, greedy(NUM_TOKENS), "b")
    run(engine, told, 5)
    assert engine.debug.decoder.is_ahead
    assert engine.abort("a").token_ids == told["a"] == kind.answer(PROMPT, len(told["a"]))
    assert not kind.has_states or len(LateFetch.waiting) == 0, "the state is looked at once it is there"
    run(engine, told)
    assert told["b"] == kind.answer(other, NUM_TOKENS)
    history = [*PROMPT, *told["a"]]
    check_next_turn(kind, engine, history, len(history) if kind.has_states else len(PROMPT) // B * B)
    kind.engines.check_nothing_held(engine)


@pytest.mark.parametrize("num_host_blocks", [0, 32])
def test_a_preemption(kind: GroupKind, num_host_blocks: int) -> None:
    """A state with a token too many goes to nobody, not to the host either: its request computes again."""
    fields = {"num_checkpoints": (4, 4)} if num_host_blocks else {}
    engine = kind.on_device(num_host_blocks=num_host_blocks, load_or_compute=False, **fields)
    prompts, told = [random_prompt(9, 1), random_prompt(7, 2)], {"0": [], "1": []}
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(NUM_TOKENS), str(index))
    run(engine, told, 5)
    assert engine.debug.decoder.is_ahead and engine.preempt_or_reclaim()
    kind.engines.poison(engine)
    run(engine, told)
    assert [*told.values()] == [kind.answer(prompt, NUM_TOKENS) for prompt in prompts]
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_swaps) == (1, 0 if kind.has_states or not num_host_blocks else 1)
    kind.engines.check_nothing_held(engine)


@pytest.mark.parametrize("call", ["close", "reset", "branches"])
def test_calls_between_two_steps(kind: GroupKind, call: str) -> None:
    prompts, told = [random_prompt(9, 1), random_prompt(7, 2)], {"0": [], "1": []}
    engine = kind.on_device()
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(NUM_TOKENS), str(index))
    run(engine, told, 5)
    assert engine.debug.decoder.is_ahead
    if call == "close":
        engine.close()
    elif call == "reset":
        engine.reset_prefix_cache()
    else:
        with Branches(engine) as branches:
            branches.compute([branches.start(PROMPT)])
    kind.engines.poison(engine)
    run(engine, told)
    assert [*told.values()] == [kind.answer(prompt, NUM_TOKENS) for prompt in prompts]
    kind.engines.check_nothing_held(engine)


def test_windows_without_room_for_a_step_ahead(caplog: pytest.LogCaptureFixture) -> None:
    """Then nothing has changed: the step under way keeps its blocks, and others are preempted as ever."""
    kind = GroupKind("gemma3")
    prompts = [random_prompt(6, seed) for seed in (1, 2, 3)]
    engine = kind.on_device(max_num_seqs=2, num_window_blocks=2 * (WINDOW // B + 2) - 1)
    outputs = engine.generate(prompts, greedy(3 * B))
    assert "raised" not in caplog.text
    assert [one.token_ids for one in outputs] == [kind.answer(prompt, 3 * B) for prompt in prompts]
    assert engine.stats().num_preemptions > 0
    kind.engines.check_nothing_held(engine)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("nth", [1, 3, 5])
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_step_that_raises(kind: GroupKind, nth: int, error: BaseException, graphs: bool) -> None:
    prompts, told, num_raised = [random_prompt(5, 1), random_prompt(6, 2)], {"0": [], "1": []}, 0
    engine, count = kind.on_device(graphs=graphs), [0]
    view = engine.debug.runner.view
    layer = (view.model if hasattr(view, "model") else view.backbone).layers[1]
    forward = layer.forward

    def fail(*args: object, **kwargs: object) -> object:
        count[0] += 1
        if count[0] == nth:
            raise error
        return forward(*args, **kwargs)

    vars(layer)["forward"] = fail
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(NUM_TOKENS), str(index))
    while engine.has_unfinished:
        try:
            run(engine, told, 1)
        except (RuntimeError, KeyboardInterrupt) as raised:
            assert raised is error
            num_raised += 1
        kind.engines.poison(engine)
    assert num_raised == 1 and [*told.values()] == [kind.answer(prompt, NUM_TOKENS) for prompt in prompts]
    for prompt in prompts:
        check_next_turn(kind, engine, [*prompt, *kind.answer(prompt, NUM_TOKENS)])
    kind.engines.check_nothing_held(engine)


def test_an_error_amid_handing_out(kind: GroupKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have their tokens already, and go on: the step ahead is dropped for these, too."""
    prompts, told = [random_prompt(9, 1), random_prompt(7, 2)], {"0": [], "1": []}
    stop = stop_of(kind.answer(prompts[0], NUM_TOKENS), 4)
    append, errors = Request.append, [RuntimeError("boom")]

    def fail(self: Request, token_id: int, *rest: object) -> object:
        if self.num_generated > 2 and errors:
            raise errors.pop()
        return append(self, token_id, *rest)

    engine = kind.on_device()
    monkeypatch.setattr(Request, "append", fail)
    for index, prompt in enumerate(prompts):
        stops = [stop] if index == 0 else []
        engine.add_request(prompt, SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=stops), str(index))
    with pytest.raises(RuntimeError, match="boom"):
        run(engine, told)
    kind.engines.poison(engine)
    run(engine, told)
    assert [told["0"], told["1"]] == [
        kind.answer(prompts[0], NUM_TOKENS, [stop]),
        kind.answer(prompts[1], NUM_TOKENS),
    ]
    for index, prompt in enumerate(prompts):
        check_next_turn(kind, engine, [*prompt, *told[str(index)]])
    kind.engines.check_nothing_held(engine)


@pytest.mark.parametrize("place", [3, 4])
def test_logits_that_are_no_numbers_leave_no_state(stateful: GroupKind, place: int) -> None:
    """Neither those of a request's own step, nor of the step ahead, of which only the state is wanted.

    The token that spoils them is the stop token, or the one before.
    """
    answer = stateful.answer(PROMPT, NUM_TOKENS)
    stop = stop_of(answer)
    expected = stateful.answer(PROMPT, NUM_TOKENS, [stop])
    bad = expected[-1] if place == 4 else expected[-2]
    engine, embedding = stateful.on_device(), stateful.model.get_input_embeddings().weight
    weight = embedding.detach()[bad].clone()
    with torch.no_grad():
        embedding[bad] = float("nan")
    engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=[stop])
    output = engine.generate([PROMPT], params)[0]
    assert output.finish_reason == ("stop" if place == 4 else "error")
    with torch.no_grad():
        embedding[bad] = weight
    engine.debug.accept_weights()
    stateful.engines.poison(engine)
    check_next_turn(stateful, engine, [*PROMPT, *expected])
    stateful.engines.check_nothing_held(engine)


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_ctrl_c_at_any_line(name: str) -> None:
    """By one who goes on: no token is lost, no block or slot is held, no kept state is wrong."""
    kind, prompts = GroupKind(name), [random_prompt(length, length) for length in (5, 6, 9)]
    stop = stop_of(kind.answer(prompts[0], 6))
    expected = [kind.answer(prompt, 6, [stop]) for prompt in prompts]
    params = SamplingParams(max_tokens=6, stop_token_ids=[stop])

    def work(engine: Engine, told: dict[str, list[int]]) -> None:
        for index, prompt in enumerate(prompts):
            if not told[str(index)] and str(index) not in engine.loop.requests:
                engine.add_request(prompt, params, str(index))
        run(engine, told)

    engine = kind.on_device(graphs=False)
    with CtrlC() as counted:
        work(engine, {"0": [], "1": [], "2": []})
    rng, num_raised = random.Random(0), 0
    for _ in range(12):
        engine, told = kind.on_device(graphs=False), {"0": [], "1": [], "2": []}
        with CtrlC(rng.randint(1, counted.num_lines)) as ctrl_c:
            try:
                work(engine, told)
            except KeyboardInterrupt:
                num_raised += 1
        kind.engines.poison(engine)
        work(engine, told)
        assert [*told.values()] == expected, ctrl_c.place
        for prompt, answer in zip(prompts, expected, strict=True):
            check_next_turn(kind, engine, [*prompt, *answer])
        kind.engines.check_nothing_held(engine)
    assert num_raised > 6


# --- all together ----------------------------------------------------------------------------------------------------

TRACES = {
    "ample": {},
    "few blocks": {"num_blocks": 14},
    "two tiers": {"num_blocks": 14, "num_host_blocks": 24, "num_checkpoints": (4, 6), "load_or_compute": False},
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", TRACES.values(), ids=TRACES)
def test_a_trace(kind: GroupKind, seed: int, options: dict[str, object]) -> None:
    """Of hits, samples, stops, aborts, room that is asked for, preemptions and swaps. Then each next turn is right."""
    rng, asked, ended = random.Random(seed), {}, {}
    stem = random_prompt(2 * B + 1, 77)
    if kind.has_windows:
        options = {**options, "num_window_blocks": 2 * (WINDOW // B + 2) + 1}
    engine = kind.on_device(**{"max_num_batched_tokens": 24, **options})
    for number in range(20):
        prompt = (stem if rng.random() < 0.5 else []) + random_prompt(rng.randint(1, 9), number)
        answer, max_tokens = kind.answer(prompt, 14), rng.randint(3, 14)
        stops = [rng.choice(answer)] if rng.random() < 0.5 else []
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, n=rng.choice((1, 1, 1, 3)))
        asked[engine.add_request(prompt, params)] = prompt, kind.answer(prompt, max_tokens, stops)
        while len(engine.loop.requests) > 5 or (engine.has_unfinished and (rng.random() < 0.5 or number == 19)):
            chance = rng.random()
            if chance < 0.05:
                ended[name] = engine.abort(name := rng.choice([*engine.loop.requests]))
            elif chance < 0.08 and engine.scheduler.running:
                engine.preempt_or_reclaim()
            kind.engines.poison(engine)
            ended |= {one.request_id: one.output for one in engine.step() if one.output is not None}
            engine.manager.check()
    assert len(ended) == 20 and engine.debug.decoder.num_ahead > 0 and engine.stats().graphs.num_replays > 5
    assert engine.stats().num_preemptions > 0 or options == TRACES["ample"]
    for name, output in ended.items():
        prompt, answer = asked[name]
        assert all(
            one.token_ids == (answer[: len(one.token_ids)] if one.finish_reason == "abort" else answer)
            for one in output.samples
        )
        check_next_turn(kind, engine, [*prompt, *output.samples[0].token_ids])
    kind.engines.check_nothing_held(engine)
