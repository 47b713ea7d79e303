"""The tokens out of paged blocks are those of `model.generate` with transformers' eager attention, in fp32."""

from functools import cache

import pytest
import torch
from support.cache_rows import split_kv
from support.engines import B, make_engine
from support.models import CONFIGS, generate_each, make_model, make_prompts

from kvpage import CacheConfig, ops
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.model import step as step_module

KINDS = list(CONFIGS)
LENGTHS = [1, B - 1, B, B + 1, 3 * B + 2, 5 * B]
MAX_TOKENS = 12
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
LAYOUTS = [
    {"backend": backend, "kv_layout": kv_layout, "layer_layout": layer_layout}
    for backend in ("flash", "flashinfer")
    for kv_layout in ("NHD", "HND")
    for layer_layout in ("separate", "packed")
]


def sharing_prompts() -> list[list[int]]:
    """Three that begin alike, one of these wholly the beginning of another, and one twice."""
    shared = make_prompts([4 * B + 1], seed=1)[0]
    tails = make_prompts([1, B, 2 * B + 3], seed=2)
    return [shared + tail for tail in tails] + [shared, shared + tails[1]]


PROMPTS = {"different": make_prompts(LENGTHS), "sharing": sharing_prompts()}


@cache
def expected(kind: str, prompts: str) -> list[list[int]]:
    tokens = generate_each(make_model(kind), PROMPTS[prompts], MAX_TOKENS)
    distinct = {token for row in tokens for token in row}
    assert len(distinct) > 20, f"{kind} generates {len(distinct)} different tokens, too few to tell right from wrong"
    return tokens


def check_drained(engine: Engine) -> None:
    engine.manager.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_of_different_lengths_then_wholly_cached(kind: str) -> None:
    engine = make_engine(kind=kind)
    first = engine.generate(PROMPTS["different"], PARAMS)
    again = engine.generate(PROMPTS["different"], PARAMS)
    assert [output.token_ids for output in first] == expected(kind, "different")
    assert [output.token_ids for output in again] == expected(kind, "different")
    assert [output.num_cached_tokens for output in first] == [0] * len(LENGTHS)
    # Generated tokens have filled each prompt's last block, whose part is shared as well.
    assert [output.num_cached_tokens for output in again] == [length - 1 for length in LENGTHS]
    check_drained(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes_in_chunks_of_seven_tokens(kind: str) -> None:
    engine = make_engine(kind=kind, max_num_batched_tokens=7)
    outputs = engine.generate(PROMPTS["sharing"], PARAMS)
    assert [output.token_ids for output in outputs] == expected(kind, "sharing")
    assert [output.num_cached_tokens for output in outputs] == [0, 4 * B, 4 * B, 4 * B, 5 * B]
    assert engine.stats().num_steps > sum(map(len, PROMPTS["sharing"])) // 7 // 2
    check_drained(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_scarce_blocks(kind: str) -> None:
    longest = max(map(len, PROMPTS["different"])) + MAX_TOKENS - 1
    engine = make_engine(kind=kind, num_blocks=-(-longest // B) + 3, max_num_batched_tokens=16)
    outputs = engine.generate(PROMPTS["different"], PARAMS)
    assert [output.token_ids for output in outputs] == expected(kind, "different")
    assert engine.stats().num_preemptions > 0
    check_drained(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_gathering_instead_of_reading_in_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices for which no operation reads blocks in place."""
    monkeypatch.setattr(step_module, "attends_in_place", lambda device: False)
    for name in ("attend", "write_and_attend"):
        monkeypatch.setattr(ops, name, None)
    engine = make_engine(kind=kind, max_num_batched_tokens=7)
    outputs = engine.generate(PROMPTS["sharing"], PARAMS)
    assert [output.token_ids for output in outputs] == expected(kind, "sharing")
    check_drained(engine)


def test_double_precision() -> None:
    model = make_model("llama").double()
    engine = Engine.from_model(model, EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=128)))
    assert engine.cache.layout.dtype == torch.float64
    outputs = engine.generate(PROMPTS["sharing"], PARAMS)
    assert [output.token_ids for output in outputs] == generate_each(model, PROMPTS["sharing"], MAX_TOKENS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()))
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind: str, layout: dict) -> None:
    engine = make_engine(kind=kind, layout=layout)
    assert [output.token_ids for output in engine.generate(PROMPTS["sharing"], PARAMS)] == expected(kind, "sharing")
    check_drained(engine)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_block_sizes(block_size: int) -> None:
    config = CacheConfig(block_size=block_size, num_gpu_blocks=512 // block_size)
    engine = Engine.from_model(make_model("mistral"), EngineConfig(config))
    outputs = engine.generate(PROMPTS["sharing"], PARAMS)
    assert [output.token_ids for output in outputs] == expected("mistral", "sharing")
    check_drained(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"num_blocks": -(-(max(map(len, PROMPTS["sharing"])) + MAX_TOKENS - 1) // B), "max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 2, "max_num_seqs": 4},
    ],
    ids=["no caching", "blocks for one request", "fewer tokens a step than sequences"],
)
@pytest.mark.parametrize("prompts", PROMPTS)
def test_other_options(prompts: str, options: dict) -> None:
    blocks = {} if "num_blocks" not in options or prompts == "sharing" else {"num_blocks": options["num_blocks"] + 2}
    engine = make_engine(**{**options, **blocks})
    outputs = engine.generate(PROMPTS[prompts], PARAMS)
    assert [output.token_ids for output in outputs] == expected("llama", prompts)
    assert "enable_prefix_caching" not in options or {output.num_cached_tokens for output in outputs} == {0}
    check_drained(engine)


def test_requests_that_join_and_end_midway() -> None:
    engine = make_engine(kind="qwen3")
    outputs = {}
    for number, prompt in enumerate(PROMPTS["different"]):
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS - number), str(number))
        outputs |= {output.request_id: output.output for output in engine.step() if output.output}
    while engine.has_unfinished:
        outputs |= {output.request_id: output.output for output in engine.step() if output.output}
    for number, tokens in enumerate(expected("qwen3", "different")):
        assert outputs[str(number)].token_ids == tokens[: MAX_TOKENS - number]


@pytest.mark.parametrize("gather", [False, True], ids=["in place", "gathered"])
@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("kind", ["mistral", "phi3"])
def test_blocks_behind_the_window_are_free_while_a_request_runs(
    kind: str, num_host_blocks: int, gather: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models see 6 tokens only. Blocks that nobody owns are poisoned before each step."""
    if gather:
        monkeypatch.setattr(step_module, "attends_in_place", lambda device: False)
    prompts, max_tokens = make_prompts([3, 9, 14]), 40
    config = CacheConfig(block_size=B, num_gpu_blocks=14, num_cpu_blocks=num_host_blocks)
    engine = Engine.from_model(make_model(kind), EngineConfig(config, enable_prefix_caching=False))
    outputs, most_used = {}, 0
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]
    while engine.has_unfinished:
        poison_free_blocks(engine)
        outputs |= {one.request_id: one.output.token_ids for one in engine.step() if one.output}
        most_used = max(most_used, engine.stats().num_used_blocks)
        engine.manager.check()
    assert [outputs[request_id] for request_id in ids] == generate_each(make_model(kind), prompts, max_tokens)
    assert most_used <= 14 and engine.stats().num_preemptions == 0  # all that they wrote takes 37 blocks
    check_drained(engine)


def poison_free_blocks(engine: Engine) -> None:
    free = [block for block in range(engine.manager.num_blocks) if engine.manager.pool.ref_count(block) == 0]
    for layer in engine.cache.gpu_cache:
        for part in split_kv(engine.cache.layout, layer):
            part[free] = float("nan")


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_requests_behind_a_window_are_preempted(num_host_blocks: int) -> None:
    prompts, max_tokens = make_prompts([16, 15, 14, 13]), 12
    config = CacheConfig(block_size=B, num_gpu_blocks=8, num_cpu_blocks=num_host_blocks)
    engine = Engine.from_model(make_model("mistral"), EngineConfig(config, enable_prefix_caching=False))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=max_tokens))
    assert [output.token_ids for output in outputs] == generate_each(make_model("mistral"), prompts, max_tokens)
    assert num_host_blocks == 0 or engine.stats().num_swaps == engine.stats().num_preemptions
    check_drained(engine)


def test_end_of_sequence_ends_as_generate_does() -> None:
    tokens = expected("llama", "different")[4]
    eos = tokens[5]
    model = make_model("llama")
    model.generation_config.eos_token_id = [eos, 10**6]
    engine = Engine.from_model(model, EngineConfig(CacheConfig(block_size=B, num_gpu_blocks=32)))
    prompt = PROMPTS["different"][4]
    (ended,) = engine.generate([prompt], PARAMS)
    (ignored,) = engine.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    assert ended.token_ids == generate_each(model, [prompt], MAX_TOKENS)[0] == tokens[: tokens.index(eos) + 1]
    assert (ended.finish_reason, ignored.finish_reason) == ("stop", "length")
    assert ignored.token_ids == tokens


def test_half_precision_cache_of_a_single_precision_model() -> None:
    """A cache in bf16 changes the logits by its rounding, and by no more."""
    prompt, logits = PROMPTS["different"][5], {}
    for dtype in ("fp32", "bf16"):
        model = make_model("llama")
        config = CacheConfig(block_size=B, num_gpu_blocks=32, cache_dtype=dtype)
        engine = Engine.from_model(model, EngineConfig(config, max_num_batched_tokens=7))
        seen: list[torch.Tensor] = []
        model.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.logits[0, -1:].clone()))
        engine.generate([prompt], SamplingParams(max_tokens=1))
        logits[dtype] = seen[-1]
    error = (logits["bf16"] - logits["fp32"]).norm() / logits["fp32"].norm()
    assert 0 < error < 0.1
