"""A worker, driven as Dynamo's runtime drives it: tokens are those of the engine, and nothing is left behind."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from support import fake_dynamo
from support.fake_dynamo import Context, EngineShutdown, HttpError, InvalidArgument, Metrics, Publisher, Unknown
from support.insides import served_by
from support.model_folder import make_model_folder
from transformers import AutoModelForCausalLM

from kvpage import CacheConfig
from kvpage.integrations.dynamo import DynamoWorker, WorkerOptions, snapshots
from kvpage.integrations.dynamo.served_model import ServedModel
from kvpage.serving import Engine, EngineConfig, SamplingParams

B = 16
PROMPT = [3 + i % 290 for i in range(3 * B + 5)]


@pytest.fixture(autouse=True)
def dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dynamo.installed(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model_folder(tmp_path_factory.mktemp("models") / "tiny"))


Use = Callable[[DynamoWorker], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def served(folder: str) -> Iterator[ServedModel]:
    loaded = ServedModel.load(options_of(folder))
    yield loaded
    loaded.engine.close()


def options_of(folder: str, **options: Any) -> WorkerOptions:
    return WorkerOptions(folder, **{"num_gpu_blocks": 64, "max_model_len": 512, **options})


def check_drained(served: ServedModel, worker: DynamoWorker) -> None:
    stats = served.engine.stats()
    assert (stats.num_unfinished, stats.engine.num_used_blocks) == (0, 0) and not worker._live


def with_worker(folder: str, served: ServedModel, use: Use) -> None:
    """Use a worker of a loaded model whose cache is empty."""

    async def run() -> None:
        worker = DynamoWorker(options_of(folder))
        served.engine.call(lambda engine: engine.reset_prefix_cache()).result()
        worker.serve(served)
        try:
            await use(worker)
            check_drained(served, worker)
        finally:
            await worker._snapshots.end()

    asyncio.run(run())


def with_own_worker(folder: str, use: Use, **options: Any) -> None:
    """Use a worker from its start to its end."""

    async def run() -> None:
        worker = DynamoWorker(options_of(folder, **options))
        await worker.start(7)
        served = served_by(worker)
        try:
            await use(worker)
        finally:
            await worker.cleanup()
            await worker.cleanup()
        assert not served.engine.takes_requests and not worker._live

    asyncio.run(run())


async def chunks_of(worker: DynamoWorker, context: Context | None = None, **parts: Any) -> list[dict[str, Any]]:
    request = {"token_ids": PROMPT, "sampling_options": {"temperature": 0.0}, **parts}
    return [chunk async for chunk in worker.generate(request, context or Context())]


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


@functools.cache
def expected(folder: str, params: SamplingParams) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = Engine.from_model(model, EngineConfig(CacheConfig(B, 64), max_model_len=512))
    return [sample.token_ids for sample in engine.generate([PROMPT], params)[0].samples]


def test_what_a_worker_registers(folder, served):
    async def use(worker: DynamoWorker) -> None:
        registered = worker.serve(served)
        assert (registered.model, registered.served_model_name) == (folder, "tiny")
        numbers = registered.llm
        assert (numbers.context_length, numbers.kv_cache_block_size, numbers.total_kv_blocks) == (512, B, 64)
        assert (numbers.max_num_seqs, numbers.max_num_batched_tokens) == (64, 2048)
        (source,) = await worker.kv_event_sources()
        assert source.endpoint == served_by(worker).engine.engine.telemetry.event_endpoints[0] and source.dp_rank == 0
        assert worker.component_metrics_dp_ranks() == [0]
        assert (await worker.health_check_payload())["token_ids"] == [served_by(worker).tokenizer.bos_token_id]

    with_worker(folder, served, use)


def test_tokens_and_usage(folder, served):
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (tokens,) = expected(folder, params)

    async def use(worker: DynamoWorker) -> None:
        for num_cached in (0, len(PROMPT) - 1):
            chunks = await chunks_of(worker, stop_conditions={"max_tokens": 12, "ignore_eos": True})
            assert tokens_of(chunks) == tokens
            assert all("finish_reason" not in chunk for chunk in chunks[:-1])
            assert chunks[-1]["finish_reason"] == "length"
            usage = chunks[-1]["completion_usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (53, 12, 65)
            assert usage["prompt_tokens_details"] == {"cached_tokens": num_cached}

    with_worker(folder, served, use)


def test_a_stop_token_ends_it(folder, served):
    (tokens,) = expected(folder, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))

    async def use(worker: DynamoWorker) -> None:
        stops = {"max_tokens": 12, "ignore_eos": True, "stop_token_ids_hidden": [tokens[5]]}
        chunks = await chunks_of(worker, stop_conditions=stops)
        assert tokens_of(chunks) == tokens[: tokens.index(tokens[5]) + 1] and chunks[-1]["finish_reason"] == "stop"

    with_worker(folder, served, use)


def test_samples_are_drawn_by_the_seed(folder, served):
    (tokens,) = expected(folder, SamplingParams(max_tokens=9, temperature=1.0, seed=5, ignore_eos=True))

    async def use(worker: DynamoWorker) -> None:
        stops = {"max_tokens": 9, "ignore_eos": True}
        chunks = await chunks_of(worker, sampling_options={"temperature": 1.0, "seed": 5}, stop_conditions=stops)
        assert tokens_of(chunks) == tokens and {chunk["index"] for chunk in chunks} == {0}

    with_worker(folder, served, use)


def test_logprobs(folder, served):
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = Engine.from_model(model, EngineConfig(CacheConfig(B, 64), max_model_len=512))
    (output,) = engine.generate([PROMPT], params)

    async def use(worker: DynamoWorker) -> None:
        stops, asked = {"max_tokens": 4, "ignore_eos": True}, {"logprobs": 2, "prompt_logprobs": 1}
        chunks = await chunks_of(worker, stop_conditions=stops, output_options=asked)
        found = [value for chunk in chunks for value in chunk["log_probs"]]
        assert found == pytest.approx([one.logprob for one in output.samples[0].logprobs], abs=1e-5)
        tops = [top for chunk in chunks for top in chunk["top_logprobs"]]
        first = served.tokenizer.decode([output.samples[0].logprobs[0].top[0][0]])
        assert [len(top) for top in tops] == [2] * 4 and tops[0][0]["token"] == first and tops[0][0]["rank"] == 1
        of_prompt = chunks[-1]["engine_data"]["prompt_logprobs"]
        assert len(of_prompt) == len(PROMPT) and of_prompt[0] is None
        for token, entries, one in zip(PROMPT[1:], of_prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entries[str(token)]["logprob"] == pytest.approx(one.logprob, abs=1e-5)

    with_worker(folder, served, use)


def test_many_at_once_are_each_their_own(folder, served):
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (tokens,) = expected(folder, params)

    async def use(worker: DynamoWorker) -> None:
        stops = {"max_tokens": 8, "ignore_eos": True}
        several = [chunks_of(worker, Context(str(i % 5)), stop_conditions=stops) for i in range(20)]
        assert [tokens_of(chunks) for chunks in await asyncio.gather(*several)] == [tokens] * 20

    with_worker(folder, served, use)


def test_salts_share_nothing(folder, served):
    async def use(worker: DynamoWorker) -> None:
        found = []
        for salt in ("a", "b", "a", None):
            routing = {"cache_salt": salt, "dp_rank": 0}
            chunks = await chunks_of(worker, routing=routing, stop_conditions={"max_tokens": 1})
            found.append(chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, 0, 3 * B, 0]

    with_worker(folder, served, use)


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_an_aborted_request_ends_as_cancelled(folder, served, num_chunks):
    async def use(worker: DynamoWorker) -> None:
        context, chunks = Context("gone"), list[dict[str, Any]]()
        stops = {"max_tokens": 400, "ignore_eos": True}
        if num_chunks == 0:
            context.has_stopped = True
        request = {"token_ids": PROMPT, "sampling_options": {"temperature": 0.0}, "stop_conditions": stops}
        async for chunk in worker.generate(request, context):
            chunks.append(chunk)
            if len(chunks) == num_chunks:
                context.has_stopped = True
                await worker.abort(context)
        assert chunks[-1]["finish_reason"] == "cancelled"
        assert chunks[-1]["completion_usage"]["completion_tokens"] == len(tokens_of(chunks)) < 400
        await worker.abort(Context("unknown"))

    with_worker(folder, served, use)


def test_a_stream_that_is_left_ends_its_request(folder, served):
    async def use(worker: DynamoWorker) -> None:
        stream = worker.generate({"token_ids": PROMPT, "stop_conditions": {"max_tokens": 400}}, Context())
        await anext(stream)
        await stream.aclose()
        del stream
        for _ in range(1000):
            if served_by(worker).engine.stats().num_unfinished == 0:
                break
            await asyncio.sleep(0.01)

    with_worker(folder, served, use)


def test_bad_requests_are_refused_and_others_go_on(folder, served):
    async def use(worker: DynamoWorker) -> None:
        for parts, message in (
            ({"token_ids": []}, "token"),
            ({"token_ids": [10**6]}, "ids in"),
            ({"token_ids": [1] * 600}, "512"),
            ({"token_ids": ["a"]}, "token"),
            ({"stop_conditions": {"max_tokens": 9000}}, "512"),
            ({"sampling_options": {"temperature": float("nan")}}, "temperature"),
            ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                await chunks_of(worker, **parts)
        assert len(tokens_of(await chunks_of(worker, stop_conditions={"max_tokens": 2, "ignore_eos": True}))) == 2

    with_worker(folder, served, use)


def test_a_form_of_answers(folder, served):
    async def use(worker: DynamoWorker) -> None:
        sampling = {"temperature": 0.0, "guided_decoding": {"choice": ["yes", "no"]}}
        chunks = await chunks_of(worker, sampling_options=sampling, stop_conditions={"max_tokens": 8})
        text = served.tokenizer.decode(tokens_of(chunks), skip_special_tokens=True)
        assert text in ("yes", "no") and chunks[-1]["finish_reason"] == "stop"
        with pytest.raises(InvalidArgument, match="guide"):
            await chunks_of(worker, sampling_options={"guided_decoding": {"regex": "("}})

    with_worker(folder, served, use)


def test_hints_pin_a_prompt_within_the_quota(folder):
    def hinted(*, ttl: float) -> dict[str, Any]:
        payload = {"ttl_seconds": ttl}
        pin = {"action_id": "a", "action_type": "kv.pin", "action_version": "1.0", "payload": payload}
        return {"protocol_version": "0.1", "message_id": "m", "actions": [pin]}

    async def use(worker: DynamoWorker) -> None:
        live = served_by(worker).engine
        one = {"max_tokens": 1}
        for tokens, num_pinned in ((PROMPT, 3), ([7] * 2 * B, 3)):  # the second one exceeds the quota
            await chunks_of(worker, token_ids=tokens, stop_conditions=one, kv_hint=hinted(ttl=60.0))
            stats = await asyncio.wrap_future(live.call(lambda engine: engine.stats()))
            assert stats.blocks.space.num_pinned_blocks == num_pinned

    with_own_worker(folder, use, pin_quota=4)


def test_a_full_queue_is_503(folder):
    async def use(worker: DynamoWorker) -> None:
        stops = {"max_tokens": 64, "ignore_eos": True}
        several = [chunks_of(worker, Context(str(i)), stop_conditions=stops) for i in range(40)]
        done = await asyncio.gather(*several, return_exceptions=True)
        refused = [one for one in done if isinstance(one, HttpError)]
        assert refused and {error.code for error in refused} == {503}
        assert all(len(tokens_of(one)) == 64 for one in done if not isinstance(one, HttpError))

    with_own_worker(folder, use, max_num_waiting=1, max_num_seqs=2)


def test_requests_that_a_closing_worker_leaves_go_to_another(folder):
    async def use(worker: DynamoWorker) -> None:
        stream = worker.generate(
            {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 450, "ignore_eos": True}}, Context("long")
        )
        served = served_by(worker)
        await anext(stream)
        draining = asyncio.create_task(served.engine.drain(0.0))
        with pytest.raises(EngineShutdown):
            async for _ in stream:
                pass
        await draining
        with pytest.raises(EngineShutdown):
            await chunks_of(worker)

    with_own_worker(folder, use)


def test_a_request_that_the_model_fails_at_is_an_error(folder, served, monkeypatch):
    async def use(worker: DynamoWorker) -> None:
        engine = served_by(worker).engine.engine

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("the model has failed")

        monkeypatch.setattr(engine.debug.runner, "forward", fail)
        with pytest.raises(Unknown, match="the model has failed"):
            await chunks_of(worker)
        monkeypatch.undo()
        fake_dynamo.installed(monkeypatch)
        assert tokens_of(await chunks_of(worker, stop_conditions={"max_tokens": 3, "ignore_eos": True}))

    with_worker(folder, served, use)


def test_numbers_for_the_router_and_for_prometheus(folder, served, monkeypatch):
    monkeypatch.setattr(snapshots, "INTERVAL", 0.001)

    async def use(worker: DynamoWorker) -> None:
        publisher, metrics = Publisher(), Metrics()
        worker.attach_snapshot_publisher(publisher)
        await worker.register_prometheus(metrics)
        for _ in range(2):
            await chunks_of(worker, stop_conditions={"max_tokens": 8, "ignore_eos": True})
        worker._snapshots.tell(served_by(worker).engine)
        last = publisher.told[-1]
        assert {rank for rank, _ in publisher.told} == {0}
        assert 0 < last[1].kv_cache_hit_rate == served_by(worker).engine.engine.stats().hit_rate
        assert (last[1].kv_used_blocks, last[1].kv_total_blocks) == (0, 64)
        assert max(one.kv_used_blocks for _, one in publisher.told) >= 4
        assert b"kvpage_computed_tokens_total" in generate_latest(metrics.registries[0])

    with_worker(folder, served, use)


def test_controls(folder, served):
    async def use(worker: DynamoWorker) -> None:
        await chunks_of(worker, stop_conditions={"max_tokens": 1})
        assert worker.supported_controls() == {"clear_kv_blocks"}
        assert await worker.engine_control("clear_kv_blocks", {}) == {"status": "ok"}
        chunks = await chunks_of(worker, stop_conditions={"max_tokens": 1})
        assert chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await worker.engine_control("fly", {}))["status"] == "error"

    with_worker(folder, served, use)


@pytest.mark.parametrize("mode, component", [("agg", "backend"), ("prefill", "prefill"), ("decode", "backend")])
def test_the_command_line(folder, mode, component):
    words = ["--model", folder, "--discovery-backend", "file", "--disaggregation-mode", mode, "--block-size", "8"]
    words += ["--store", "redis://host:1", "--pin-quota", "7"]
    worker, config = asyncio.run(DynamoWorker.from_args(words))
    assert (worker.options.block_size, worker.options.tokens_of_chunk, worker.options.name) == (8, 64, "tiny")
    assert worker.options.pin_quota == 7
    assert (config.namespace, config.component, config.endpoint) == ("dynamo", component, "generate")
    assert (config.model_name, config.served_model_name, config.discovery_backend) == (folder, "tiny", "file")
    assert config.disaggregation_mode.value == mode


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"layers_per_record": 0}, "layers_per_record must be an integer of at least 1, got 0"),
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 1, got 0"),
        ({"disaggregation_mode": "encode"}, "disaggregation_mode must be one of agg, prefill, decode, got 'encode'"),
        ({"drain_timeout": -1.0}, "drain_timeout must be finite and not negative, got -1.0"),
        ({"max_pin_seconds": float("nan")}, "max_pin_seconds must be finite and not negative, got nan"),
        ({"disaggregation_mode": "decode"}, "store must be given with disaggregation_mode='decode'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        WorkerOptions("model", **options)


def test_a_worker_that_never_started_ends_too(folder):
    asyncio.run(DynamoWorker(WorkerOptions(folder)).cleanup())


def test_a_folder_without_a_model_is_an_error(tmp_path: Path):
    with pytest.raises((OSError, ValueError)):
        asyncio.run(DynamoWorker(WorkerOptions(str(tmp_path))).start(0))
