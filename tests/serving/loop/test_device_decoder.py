"""Decodes one step ahead of their tokens: every output is that of an engine that waits, whatever comes between."""

import random

import pytest
import torch
from support.cpu_graphs import CpuCapturer, LateFetch, as_on_a_device
from support.ctrl_c import CtrlC, pythons_handler  # noqa: F401, a fixture for all that is here
from support.models import make_model, make_prompts

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.loop.outputs import RequestOutput, StepOutput
from kvpage.store import KVStore, KVStoreConfig, metadata_of
from kvpage.store.tiers.memory_tier import MemoryTier

B = 4
STEM = make_prompts([3 * B + 1], seed=8)[0]


def make_engine(model: torch.nn.Module | None = None, num_blocks: int = 120, **options: object) -> Engine:
    cache = CacheConfig(B, num_blocks, options.pop("num_cpu_blocks", 0))
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "load_or_compute": False} | options
    return Engine.from_model(model or make_model("llama"), EngineConfig(cache, **options))


def ahead(*args: object, graphs: bool = True, **options: object) -> Engine:
    return as_on_a_device(make_engine(*args, **options), graphs=graphs)


def check_nothing_left(engine: Engine) -> None:
    engine.manager.check()
    stats = engine.stats()
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


def likely_stops(engine: Engine) -> list[int]:
    """Tokens that greedy answers hold, so that some of them stop early."""
    outputs = engine.generate(make_prompts([6, 7, 9], seed=4), SamplingParams(max_tokens=12))
    return [one.token_ids[index] for one, index in zip(outputs, (3, 5, 8), strict=True)]


# --- nothing comes between -------------------------------------------------------------------------------------------


def steps_of(engine: Engine, stops: list[int], **fields: object) -> list[list[tuple]]:
    """Return the outputs of each step, without the times in them."""
    for index, prompt in enumerate(make_prompts([6, 7, 9, 3, 11, 5], seed=4)):
        params = SamplingParams(max_tokens=12 + index, stop_token_ids=stops, **fields)
        engine.add_request(prompt, params, f"r{index}")
    found = []
    while engine.has_unfinished:
        found.append([plain(output) for output in engine.step()])
    check_nothing_left(engine)
    return found


def plain(output: StepOutput) -> tuple:
    whole = output.output and (output.output.token_ids, output.output.finish_reason, output.output.num_cached_tokens)
    return output.request_id, output.token_id, output.finish_reason, output.error, whole


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9, "top_k": 20, "seed": 5, "suppress_tokens": [3]}], ids=str)
def test_each_step_returns_the_same_outputs(graphs: bool, fields: dict) -> None:
    """Stop tokens included, which are seen late: at most one token too many is computed for each."""
    stops = likely_stops(make_engine())
    waits, engine = make_engine(max_num_seqs=6), ahead(graphs=graphs, max_num_seqs=6)
    want = steps_of(waits, stops, **fields)
    assert any(output[2] == "stop" for each in want for output in each)
    assert steps_of(engine, stops, **fields) == want
    assert engine.debug.decoder.num_ahead > 5
    num_more = engine.stats().num_computed_tokens - waits.stats().num_computed_tokens
    assert 0 < num_more <= sum(output[2] == "stop" for each in want for output in each)
    assert engine.stats().num_generated_tokens == waits.stats().num_generated_tokens


def test_rules_that_count_tokens_wait_for_them() -> None:
    engine = ahead()
    fields = {"repetition_penalty": 1.3, "temperature": 1.0, "seed": 2}
    assert steps_of(engine, [], **fields) == steps_of(make_engine(), [], **fields)
    assert engine.debug.decoder.num_ahead == 0 and engine.stats().graphs.num_replays > 5


def test_tokens_are_asked_for_after_the_next_step_has_begun() -> None:
    engine = ahead()
    for prompt in make_prompts([5, 6], seed=1):
        engine.add_request(prompt, SamplingParams(max_tokens=8))
    engine.step()
    seen = [(len(engine.step()), len(LateFetch.waiting)) for _ in range(7)]
    assert seen == [(2, 1)] * 6 + [(2, 0)], "the last step is known to be the last by max_tokens"


# --- requests come and go --------------------------------------------------------------------------------------------


def requests_of(seed: int, stops: list[int]) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, many with a common prefix, and their rules: most are greedy."""
    rng, found = random.Random(seed), []
    for number in range(24):
        prompt = (STEM if rng.random() < 0.5 else []) + make_prompts([rng.randint(1, 9)], seed=number)[0]
        fields: dict[str, object] = {"max_tokens": rng.randint(1, 14), "stop_token_ids": stops}
        kind = rng.random()
        if kind < 0.15:
            fields |= {"temperature": 1.0, "seed": number, "n": rng.choice([1, 3])}
        elif kind < 0.25:
            fields |= {"repetition_penalty": 1.3}
        found.append((prompt, SamplingParams(**fields)))
    return found


def run_trace(engine: Engine, requests: list, rng: random.Random) -> dict[int, object]:
    """Add, abort and step by chance; return the outcome of each request that was not aborted."""
    outcomes, num_added = {}, 0
    while num_added < len(requests) or engine.has_unfinished:
        while num_added < len(requests) and rng.random() < 0.4:
            engine.add_request(*requests[num_added], f"r{num_added}")
            num_added += 1
        if engine.loop.requests and rng.random() < 0.05:
            engine.abort(rng.choice([*engine.loop.requests]))
        for output in engine.step():
            if output.output:
                outcomes[int(output.request_id[1:])] = samples_of(output.output)
    check_nothing_left(engine)
    return outcomes


def samples_of(output: RequestOutput) -> list[tuple]:
    return [(one.token_ids, one.finish_reason) for one in output.samples]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{}, {"num_blocks": 11}, {"num_blocks": 11, "num_cpu_blocks": 20}], ids=str)
def test_a_trace(seed: int, options: dict) -> None:
    """Of prefix hits, samples, penalties, preemptions and swaps; a request's tokens never depend on the others."""
    requests = requests_of(seed, likely_stops(make_engine()))
    outputs = make_engine(num_blocks=400).generate(*map(list, zip(*requests, strict=True)))
    want = {number: samples_of(output) for number, output in enumerate(outputs)}
    engine = ahead(**options)
    found = run_trace(engine, requests, random.Random(seed))
    assert len(found) > 15 and found == {number: want[number] for number in found}
    assert engine.debug.decoder.num_ahead > 0 and engine.stats().graphs.num_replays > 5
    assert engine.stats().num_preemptions > 0 or not options


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_the_last_request_is_let_go(end: str) -> None:
    """The step that was begun for it keeps nothing of it, nor is that step forgotten before it ends."""
    stop = make_engine().generate([STEM], SamplingParams(max_tokens=6))[0].token_ids[4]
    engine = ahead()
    name = engine.add_request(STEM, SamplingParams(max_tokens=20, stop_token_ids=[stop] if end == "stop" else []))
    for _ in range(4):
        engine.step()
    while end == "stop" and engine.has_unfinished:
        engine.step()
    if end == "abort":
        engine.abort(name)
    assert not engine.has_unfinished and not engine.debug.decoder._ahead.decodes.requests
    assert len(LateFetch.waiting) == 1
    assert engine.step() == [] and not LateFetch.waiting
    check_nothing_left(engine)


def test_blocks_of_one_who_leaves_are_not_given_to_a_store_before_the_step_has_ended() -> None:
    engine, asked = ahead(), []
    with KVStore(KVStoreConfig(2 * B), metadata_of(engine.cache, "m"), [MemoryTier(1 << 20)]) as store:
        engine.use_store(store)
        for prompt in make_prompts([9, 10], seed=3):
            engine.add_request(prompt, SamplingParams(max_tokens=30))
        for _ in range(4):
            engine.step()
        ask = engine.debug.connectors.ask
        engine.debug.connectors.ask = lambda *args: asked.append(len(LateFetch.waiting)) or ask(*args)
        engine.step()
        engine.abort(next(iter(engine.loop.requests)))
        engine.step()
        engine.close()
    assert asked[:2] == [1, 0]


# --- errors ----------------------------------------------------------------------------------------------------------


def test_one_with_which_the_model_raises_ends_alone() -> None:
    bad, model = 7, make_model("llama")
    engine = ahead(model, graphs=False)
    layer = engine.debug.runner.view.model.layers[1]
    forward = layer.forward

    def fail(hidden, *args, **kwargs):
        if (torch.isnan(hidden)).any():
            raise RuntimeError("boom")
        return forward(hidden, *args, **kwargs)

    vars(layer)["forward"] = fail
    prompts = [[1, 2, 3], [4, 5, bad], [6, 8]]
    want = [one.token_ids for one in make_engine().generate(prompts, SamplingParams(max_tokens=6))]
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    engine.reset_prefix_cache()
    found = engine.generate(prompts, SamplingParams(max_tokens=6))
    assert found[1].error == "RuntimeError: boom" and [found[0].token_ids, found[2].token_ids] == [want[0], want[2]]
    check_nothing_left(engine)


@pytest.mark.parametrize("graphs", [False, True])
def test_logits_that_are_no_numbers(graphs: bool) -> None:
    """The request ends alone, with the tokens and the reason of an engine that waits; nothing of it is cached."""
    prompts = make_prompts([5, 6, 9], seed=1)
    first = make_engine().generate(prompts, SamplingParams(max_tokens=9))
    bad = first[1].token_ids[3]

    def spoil(engine: Engine) -> Engine:
        with torch.no_grad():
            engine.debug.runner.model.get_input_embeddings().weight[bad] = float("nan")
        engine.reset_prefix_cache()
        return engine

    found = []
    for engine in (spoil(make_engine()), spoil(ahead(graphs=graphs))):
        outputs = engine.generate(prompts, SamplingParams(max_tokens=9))
        found.append([(one.token_ids, one.finish_reason, one.error) for one in outputs])
        check_nothing_left(engine)
    assert found[0] == found[1] and found[1][1][1] == "error" and len(found[1][1][0]) == 4


def test_without_room_for_a_step_ahead() -> None:
    """Then requests are preempted as ever, and nothing is ahead of that."""
    engine = ahead(num_blocks=7, max_num_seqs=3)
    want = [one.token_ids for one in make_engine().generate(make_prompts([5, 6, 7], 1), SamplingParams(max_tokens=9))]
    assert [one.token_ids for one in engine.generate(make_prompts([5, 6, 7], 1), SamplingParams(max_tokens=9))] == want
    assert engine.stats().num_preemptions > 0
    check_nothing_left(engine)


def test_a_refused_capture_still_runs_ahead() -> None:
    engine = make_engine()
    as_on_a_device(engine, capturer=CpuCapturer(1 << 40))
    want = [one.token_ids for one in make_engine().generate(make_prompts([5, 6], 1), SamplingParams(max_tokens=9))]
    assert [one.token_ids for one in engine.generate(make_prompts([5, 6], 1), SamplingParams(max_tokens=9))] == want
    assert engine.stats().graphs.num_replays == 0 and engine.debug.decoder.num_ahead > 3
