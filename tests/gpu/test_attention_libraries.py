"""The libraries themselves against kvpage's kernels, where they are installed: by operation, and by engine."""

import pytest
import torch
from support.models import make_model, make_prompts

from kvpage import CacheConfig, CacheLayout, KVScales, ops
from kvpage.layout.attention import Attention
from kvpage.ops.args.sequences import Sequences
from kvpage.ops.cuda.libraries import choice
from kvpage.ops.cuda.libraries.rules import RULES
from kvpage.serving import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.gpu
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LENGTHS = [1, 15, 16, 300, 70, 1030]
QUERIES = {"decode": [1] * 6, "mixed": [1, 1, 1, 40, 70, 513]}
OPTIONS = {"plain": {}, "window": {"sliding_window": 33}, "softcap": {"softcap": 20.0, "scale": 0.1}}


def make_layout(rules, dtype, kv_layout="NHD"):
    if "mla" in rules.backends:
        return CacheLayout(64, 1, 576, dtype, "mla")
    return CacheLayout(max(rules.block_multiple, 16), 2, 128, dtype, kv_layout=kv_layout)


def skip_unless_it_fits(rules, layout):
    try:
        return choice.candidates(rules.name, layout, torch.device("cuda"))[0]()
    except (ValueError, ImportError) as error:
        pytest.skip(str(error))


def make_case(layout, step):
    counts, device = QUERIES[step], torch.device("cuda", torch.cuda.current_device())
    widths = [-(-length // layout.block_size) for length in LENGTHS]
    cache = layout.allocate(sum(widths), 1, device)[0]
    cache.copy_(torch.randn(cache.shape, device=device).to(layout.dtype))
    tables = torch.zeros(len(LENGTHS), max(widths), dtype=torch.int32)
    for table, own in zip(tables, torch.randperm(sum(widths)).to(torch.int32).split(widths), strict=True):
        table[: len(own)] = own
    scales = KVScales.of(0.5, 2.0, device) if layout.dtype == E4M3 else None
    bound = ops.BoundCache(cache, layout, scales)
    query = torch.randn(sum(counts), 8, layout.head_size, device=device).to(BF16)
    queries = None if step == "decode" else counts
    return bound, Sequences(bound, sum(counts), tables.to(device), LENGTHS, queries), query


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("step", QUERIES)
@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: f"{rules.name}-{rules.backends[0]}")
def test_a_library_computes_what_we_do(rules, kv_layout, dtype, step, options):
    layout = make_layout(rules, dtype, kv_layout)
    given = {**OPTIONS[options], **({"value_size": 512} if "mla" in rules.backends else {})}
    if set(given) & {"sliding_window", "softcap"} - set(rules.options):
        pytest.skip(f"{rules.name} has no {options}")
    library = skip_unless_it_fits(rules, layout)
    cache, sequences, query = make_case(layout, step)
    want = ops.attend(query, cache, sequences, Attention(**given))
    cache.use_library(library)
    found = ops.attend(query, cache, sequences, Attention(**given))
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: f"{rules.name}-{rules.backends[0]}")
def test_a_graph_of_a_library_reads_new_lengths(rules):
    layout = make_layout(rules, BF16)
    library = skip_unless_it_fits(rules, layout)
    cache, sequences, query = make_case(layout, "decode")
    options = Attention(value_size=512 if layout.backend == "mla" else None)
    wants = [ops.attend(query, cache, sequences, options)]
    shorter = [max(length - 3, 1) for length in LENGTHS]
    few = Sequences(cache, len(query), sequences.block_tables, shorter)
    wants.append(ops.attend(query, cache, few, options))
    cache.use_library(library)
    ops.attend(query, cache, sequences, options)
    fixed = Sequences(cache, len(query), sequences.block_tables, LENGTHS)
    if not library.plan_for_graph(fixed, cache):
        pytest.skip(f"{rules.name} is not captured")
    ops.attend(query, cache, fixed, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.attend(query, cache, fixed, options)
    for lengths, want in zip((LENGTHS, shorter), wants, strict=True):
        library.plan_again(fixed, lengths)
        graph.replay()
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("name", "block_size"), [("flashinfer", 16), ("flash_attn", 256), ("flash_attn_3", 16)])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_an_engine_over_a_library(name, block_size, kind):
    if choice.installed_libraries()[name] is None:
        pytest.skip(f"{name} is not installed")
    model = make_model(kind, head_dim=64).bfloat16().cuda()
    prompts = make_prompts([1, 33, 120, 17], seed=5)
    found = []
    for backend in (name, "kvpage"):
        config = EngineConfig(CacheConfig(block_size, 64), attention_backend=backend)
        engine = Engine.from_model(model, config)
        forward, seen = engine.debug.runner.forward, []
        engine.debug.runner.forward = lambda *args, forward=forward, seen=seen: seen.append(forward(*args)) or seen[-1]
        engine.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        found.append(seen[0])
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0.05 * found[1].abs().max().item())
