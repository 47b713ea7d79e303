"""Libraries that attend over blocks: their rules, their plans, and their results against the reference.

Their modules are fakes that compute on the CPU, and are strict about all that they are given.
"""

import dataclasses
import types

import pytest
import torch
from support.fake_libraries import Fakes
from support.threads import one_thread  # noqa: F401

from kvpage import CacheLayout, KVScales, ops
from kvpage.layout.attention import Attention
from kvpage.ops import reference
from kvpage.ops.args.sequences import Sequences
from kvpage.ops.cuda.libraries import choice, flashinfer
from kvpage.ops.cuda.libraries.parts import parts_of, used_block_ids
from kvpage.ops.cuda.libraries.rules import ATTENTION_BACKENDS, LIBRARY_NAMES, RULES, layout_refusal
from kvpage.serving.model import step

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CPU = torch.device("cpu")
BLOCKS = {"flashinfer": 16, "flash_attn": 256, "flash_attn_3": 16}
STEPS = {  # tokens and queries of each sequence
    "decode": ([1, 15, 16, 17, 70], [1, 1, 1, 1, 1]),
    "a whole prompt": ([33], [33]),
    "chunks": ([40, 17, 70], [7, 17, 2]),
    "long": ([256, 257, 513], [1, 1, 5]),
    "mixed": ([5, 66, 40, 33], [1, 1, 9, 33]),
}
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.31},
    "window": {"sliding_window": 6},
    "softcap": {"softcap": 1.5, "sliding_window": 20},
}


@pytest.fixture
def fakes(monkeypatch):
    made = Fakes()
    made.install(monkeypatch)
    monkeypatch.setattr(choice, "capability_of", lambda device: 90)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    return made


def make_library(layout, name="auto"):
    return choice.candidates(name, layout, CPU)[0]()


def make_case(layout, step="mixed", num_heads=4, num_layers=1):
    """Caches with poison past the tokens of each sequence, the sequences, and a query."""
    lengths, counts = STEPS[step]
    widths = [-(-length // layout.block_size) for length in lengths]
    caches = layout.allocate(sum(widths) + 2, num_layers, CPU)
    ids = torch.randperm(sum(widths)).to(torch.int32) + 1
    tables = torch.full((len(lengths), max(widths) + 1), 2**31 - 1, dtype=torch.int32)
    for table, own in zip(tables, ids.split(widths), strict=True):
        table[: len(own)] = own
    for cache in caches:
        cache.copy_(torch.randn(cache.shape).to(cache.dtype))
    slots = torch.cat([
        table[torch.arange(length) // layout.block_size].long() * layout.block_size
        + torch.arange(length) % layout.block_size
        for table, length in zip(tables, lengths, strict=True)
    ])  # fmt: skip
    bound = [ops.BoundCache(cache, layout) for cache in caches]
    for one in bound:  # slots that no sequence has: NaN
        free = torch.ones(one.shape[0] * layout.block_size, dtype=torch.bool)
        free[slots] = False
        for view in filter(None, one.views):
            nan = torch.tensor(float("nan")).to(layout.dtype)
            view.rows[free.view(one.shape[0], -1).nonzero(as_tuple=True)] = nan
    size = layout.head_size
    query = torch.randn(sum(counts), num_heads, size).to(BF16)
    return bound, make_sequences(bound[0], tables, lengths, counts), query, torch.tensor(lengths), torch.tensor(counts)


def make_sequences(cache, tables, lengths, counts):
    return Sequences(cache, sum(counts), tables, lengths, None if set(counts) == {1} else counts)


def expected(cache, sequences, query, lengths, counts, **options):
    return reference.paged_attention(
        query, cache.tensor, sequences.block_tables, lengths, cache.layout, query_lens=counts, scales=cache.scales,
        **options,
    )  # fmt: skip


def check(found, want):
    torch.testing.assert_close(found, want, rtol=1e-2, atol=2e-2)


def with_library(caches, library):
    for cache in caches:
        cache.use_library(library)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("step", ["decode", "a whole prompt", "chunks", "mixed"])
@pytest.mark.parametrize("name", BLOCKS)
def test_results_are_those_of_the_reference(fakes, name, step, options):
    layout = CacheLayout(BLOCKS[name], 2, 64, BF16)
    (cache,), sequences, query, *lengths = make_case(layout, step)
    cache.use_library(make_library(layout, name))
    check(
        ops.attend(query, cache, sequences, Attention(**options)),
        expected(cache, sequences, query, *lengths, **options),
    )
    assert sum(fakes.calls.values()) > 0


def test_sequences_in_several_blocks_of_256(fakes):
    layout = CacheLayout(256, 2, 64, BF16)
    (cache,), sequences, query, *lengths = make_case(layout, "long")
    cache.use_library(make_library(layout, "flash_attn"))
    check(ops.attend(query, cache, sequences, Attention()), expected(cache, sequences, query, *lengths))
    assert fakes.calls == {"flash_attn.with_kvcache": 1, "flash_attn.varlen": 1}


@pytest.mark.parametrize("layer_layout", ["separate", "packed"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", ["flash", "flashinfer"])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_layout_that_a_library_takes(fakes, name, backend, kv_layout, layer_layout):
    layout = CacheLayout(BLOCKS[name], 2, 64, BF16, backend, kv_layout, layer_layout)
    caches, sequences, query, *lengths = make_case(layout, num_layers=2)
    with_library(caches, make_library(layout, name))
    for cache in caches:
        out = torch.empty_like(query)
        assert ops.attend(query, cache, sequences, Attention(), out) is out
        check(out, expected(cache, sequences, query, *lengths))


@pytest.mark.parametrize("step", ["decode", "a whole prompt", "chunks", "mixed"])
@pytest.mark.parametrize("name", ["flashinfer", "flash_mla"])
def test_latents(fakes, name, step):
    layout = CacheLayout(64, 1, 576, BF16, "mla")
    (cache,), sequences, query, *lengths = make_case(layout, step, num_heads=3)
    cache.use_library(make_library(layout, name))
    options = {"value_size": 512, "scale": 0.05}
    check(
        ops.attend(query, cache, sequences, Attention(**options)),
        expected(cache, sequences, query, *lengths, **options),
    )
    decodes = step == "decode"
    assert (sum(fakes.calls.values()) > 0) == (decodes or name == "flashinfer"), "FlashMLA decodes; the rest is ours"


@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_8_bit_floats_with_scales(fakes, step):
    layout = CacheLayout(16, 2, 64, E4M3)
    (cache,), sequences, query, *lengths = make_case(layout, step)
    cache = ops.BoundCache(cache.tensor, layout, KVScales.of(0.5, 3.0))
    cache.use_library(make_library(layout, "flashinfer"))
    check(ops.attend(query, cache, sequences, Attention()), expected(cache, sequences, query, *lengths))
    assert fakes.calls["flashinfer.decode.run"] == 1


def test_one_plan_a_step_for_all_layers_of_the_same_options(fakes):
    layout = CacheLayout(16, 2, 64, BF16)
    caches, sequences, query, *lengths = make_case(layout, "decode", num_layers=3)
    with_library(caches, make_library(layout, "flashinfer"))
    for cache in caches:
        ops.attend(query, cache, sequences, Attention())
    assert fakes.calls == {"flashinfer.decode.plan": 1, "flashinfer.decode.run": 3}
    for cache in caches:
        ops.attend(query, cache, sequences, Attention(sliding_window=6))
    assert fakes.calls["flashinfer.decode.plan"] == 2, "a window is another plan"


def test_a_plan_that_another_step_has_replaced_is_made_again(fakes):
    layout = CacheLayout(16, 2, 64, BF16)
    (cache,), sequences, query, *lengths = make_case(layout, "decode")
    cache.use_library(make_library(layout, "flashinfer"))
    other = make_sequences(cache, sequences.block_tables[:2], [1, 15], [1, 1])
    want = expected(cache, sequences, query, *lengths)
    for _ in range(2):
        check(ops.attend(query, cache, sequences, Attention()), want)
        check(ops.attend(query[:2], cache, other, Attention()), want[:2])


@pytest.mark.parametrize(("name", "layout"), [
    ("flashinfer", CacheLayout(16, 2, 64, BF16)), ("flash_attn", CacheLayout(256, 2, 64, BF16)),
    ("flash_attn_3", CacheLayout(16, 2, 64, BF16)), ("flashinfer", CacheLayout(16, 1, 576, BF16, "mla")),
])  # fmt: skip
def test_a_graphs_plan_is_renewed_in_its_own_memory(fakes, name, layout):
    """As around a replay: the same sequences have more tokens, and the call finds them where it looked before."""
    (cache,), sequences, query, lengths, counts = make_case(layout, "decode")
    options = {"value_size": 512} if layout.backend == "mla" else {}
    library = make_library(layout, name)
    cache.use_library(library)
    ops.attend(query, cache, sequences, Attention(**options))
    shorter = torch.tensor([1, 9, 1, 16, 60])
    fixed = make_sequences(cache, sequences.block_tables, shorter.tolist(), counts.tolist())
    assert library.plan_for_graph(fixed, cache)
    call = fixed.plans[library, next(iter(library._seen))].calls[0][1]
    for now in (shorter, lengths):
        library.plan_again(fixed, now.tolist())
        want = expected(cache, sequences, query, now, counts, **options)
        check(ops.attend(query, cache, fixed, Attention(**options)), want)
        assert fixed.plans[library, next(iter(library._seen))].calls[0][1] is call


def test_a_graph_over_8_bit_floats_after_a_trial_over_the_models_own_dtype(fakes):
    """As at load: the model is tried out over blocks of its dtype, then over those that quantise."""
    trial, sequences, query, *_ = make_case(CacheLayout(16, 2, 64, BF16), "decode")
    library = make_library(trial[0].layout, "flashinfer")
    trial[0].use_library(library)
    ops.attend(query, trial[0], sequences, Attention())
    (cache,), sequences, query, *lengths = make_case(CacheLayout(16, 2, 64, E4M3), "decode")
    cache.use_library(library)
    want = expected(cache, sequences, query, *lengths)
    check(ops.attend(query, cache, sequences, Attention()), want)
    assert library.plan_for_graph(sequences, cache)
    check(ops.attend(query, cache, sequences, Attention()), want)


def test_what_has_no_plan_in_a_graph(fakes):
    latents, heads = CacheLayout(64, 1, 576, BF16, "mla"), CacheLayout(16, 2, 64, BF16)
    (cache,), sequences, query, *_ = make_case(latents, "decode")
    cache.use_library(make_library(latents, "flash_mla"))
    ops.attend(query, cache, sequences, Attention(value_size=512))
    assert not cache.library.plan_for_graph(sequences, cache), "FlashMLA's tiles are of the lengths at the capture"
    (cache,), sequences, query, *_ = make_case(heads, "mixed")
    assert not make_library(heads, "flashinfer").plan_for_graph(sequences, cache), "prefills are not captured"


def test_calls_that_are_no_librarys_kind_are_ours(fakes):
    layout = CacheLayout(16, 2, 64, BF16)
    (cache,), sequences, query, lengths, counts = make_case(layout, "chunks")
    cache.use_library(make_library(layout, "flashinfer"))
    positions = torch.cat(
        [torch.arange(length - count, length) for length, count in zip(*STEPS["chunks"], strict=True)]
    )
    found = ops.attend(query, cache, sequences, Attention(query_positions=positions))
    check(found, expected(cache, sequences, query, lengths, counts))
    empty = make_sequences(cache, sequences.block_tables[:2], [40, 0], [1, 0])
    ops.attend(query[:1], cache, empty, Attention())
    assert ops.attend(
        query[:0], cache, make_sequences(cache, sequences.block_tables[:1], [40], [0]), Attention()
    ).shape == (0, 4, 64)
    assert not fakes.calls


def test_lengths_that_only_the_device_knows_give_no_parts():
    layout = CacheLayout(16, 2, 64, BF16)
    (cache,), sequences, *_ = make_case(layout)
    assert [part.rows for part in parts_of(sequences)] == [slice(0, 2), slice(2, 44)]
    of_step = Sequences.of_step(cache, 2, sequences.block_tables[:2], torch.tensor([5, 66]), None, 1, 66)
    assert parts_of(of_step) is None
    of_step = Sequences.of_step(
        cache, 2, sequences.block_tables[:2], torch.tensor([5, 66]), None, 1, 66, host_lengths=([5, 66], [1, 1])
    )
    assert [part.is_decode for part in parts_of(of_step)] == [True]


def test_block_ids_without_those_past_the_tokens():
    (cache,), sequences, *_ = make_case(CacheLayout(16, 2, 64, BF16), "decode")
    (part,) = parts_of(sequences)
    want = torch.cat(
        [row[: -(-length // 16)] for row, length in zip(sequences.block_tables, part.seq_lens, strict=True)]
    )
    found = used_block_ids(part, 16)
    assert torch.equal(found, want) and found.dtype == torch.int32


OF_LAYOUTS = {
    "backend must be mla for flash_mla, got 'flash'": ("flash_mla", {}),
    "backend must be flash or flashinfer for flash_attn_3, got 'paged'": ("flash_attn_3", {"backend": "paged"}),
    "the cache's dtype must be torch.float16 or torch.bfloat16 for flash_attn, got torch.float32": (
        "flash_attn", {"dtype": torch.float32, "block_size": 256}
    ),
    "head_size must be in (64, 128, 256) for flashinfer, got 96": ("flashinfer", {"head_size": 96}),
    "head_size must be in (8, 16, ... 256) for flash_attn_3, got 20": ("flash_attn_3", {"head_size": 20}),
    "block_size must be a multiple of 256 for flash_attn, got 16": ("flash_attn", {}),
    "block_size must be 64 for flash_mla, got 128": (
        "flash_mla", {"backend": "mla", "num_kv_heads": 1, "head_size": 576, "block_size": 128}
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", OF_LAYOUTS)
def test_a_named_library_says_which_rule_the_cache_breaks(fakes, message):
    name, fields = OF_LAYOUTS[message]
    layout = dataclasses.replace(CacheLayout(16, 2, 64, BF16), **fields)
    with pytest.raises(ValueError) as raised:
        choice.candidates(name, layout, CPU)
    assert str(raised.value) == message


@pytest.mark.parametrize(("capability", "message"), [
    (None, "the model must be on a CUDA device for flash_attn_3"),
    (80, "compute capability must be 9.0 for flash_attn_3, got 8.0"),
])  # fmt: skip
def test_a_device_that_a_library_does_not_take(fakes, monkeypatch, capability, message):
    monkeypatch.setattr(choice, "capability_of", lambda device: capability)
    with pytest.raises(ValueError) as raised:
        choice.candidates("flash_attn_3", CacheLayout(16, 2, 64, BF16), CPU)
    assert str(raised.value) == message


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(choice, "_is_installed", lambda rules: False)
    assert choice.candidates("auto", CacheLayout(16, 2, 64, BF16), CPU) == []
    with pytest.raises(ValueError, match="attention_backend 'flashinfer' needs flashinfer-python, which is not inst"):
        choice.candidates("flashinfer", CacheLayout(16, 2, 64, BF16), CPU)
    with pytest.raises(ValueError, match="attention_backend must be one of auto, kvpage, flash_attn_3, flashinfer,"):
        choice.candidates("xformers", CacheLayout(16, 2, 64, BF16), CPU)


CALLS = {
    "sinks must be None for flashinfer": {"sinks": torch.zeros(4)},
    "heads of K and V must have 64 and 64 elements for flashinfer, got 64 and 32": {"value_size": 32},
    "queries must be torch.bfloat16 as the cache for flashinfer, got torch.float32": {"dtype": torch.float32},
}


@pytest.mark.parametrize("message", CALLS)
def test_options_of_a_call_are_errors_where_the_library_is_named(fakes, message):
    layout, options = CacheLayout(16, 2, 64, BF16), dict(CALLS[message])
    (cache,), sequences, query, *lengths = make_case(layout)
    query = query.to(options.pop("dtype", BF16))
    cache.use_library(make_library(layout, "flashinfer"))
    with pytest.raises(ValueError) as raised:
        ops.attend(query, cache, sequences, Attention(**options))
    assert str(raised.value) == message
    cache.use_library(make_library(layout))
    found = ops.attend(query, cache, sequences, Attention(**options))
    check(found, expected(cache, sequences, query, *lengths, **options))
    assert not fakes.calls


def test_scales_of_each_head_are_ours(fakes):
    layout = CacheLayout(16, 2, 64, E4M3)
    (cache,), sequences, query, *_ = make_case(layout)
    cache = ops.BoundCache(cache.tensor, layout, KVScales.of([0.5, 1.0], 3.0))
    cache.use_library(make_library(layout, "flashinfer"))
    with pytest.raises(ValueError, match="kv_scales must be one number for all heads of a layer for flashinfer"):
        ops.attend(query, cache, sequences, Attention())


AUTOMATIC = [
    (CacheLayout(16, 2, 128, BF16), 90, "flash_attn_3"),
    (CacheLayout(16, 2, 128, BF16), 80, "flashinfer"),
    (CacheLayout(256, 2, 96, BF16), 80, "flash_attn"),
    (CacheLayout(16, 2, 128, E4M3), 90, "flashinfer"),
    (CacheLayout(64, 1, 576, BF16, "mla"), 90, "flash_mla"),
    (CacheLayout(16, 1, 576, BF16, "mla"), 100, "flashinfer"),
    (CacheLayout(16, 2, 128, torch.int8), 90, "kvpage"),
    (CacheLayout(16, 2, 128, torch.float32), 90, "kvpage"),
    (CacheLayout(16, 2, 128, BF16, "paged"), 90, "kvpage"),
    (CacheLayout(16, 2, 128, BF16), None, "kvpage"),
]


@pytest.mark.parametrize(("layout", "capability", "name"), AUTOMATIC)
def test_auto_takes_the_first_that_takes_the_cache(fakes, layout, capability, name):
    assert choice.automatic_choice(layout, capability) == name


def test_every_rule_has_kernels_and_a_name(fakes):
    assert ("auto", "kvpage", *LIBRARY_NAMES) == ATTENTION_BACKENDS
    for rules in RULES:
        size = next(size for size in range(8, 577) if size in rules.head_sizes)
        layout = CacheLayout(256 if rules.block_multiple == 256 else 64, 1, size, BF16, rules.backends[0])
        assert layout_refusal(rules, layout, 90) is None
        assert choice.Candidate(rules, CPU, True)().name == rules.name


def test_versions_are_found_without_an_import(monkeypatch):
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    assert choice.installed_libraries() == dict.fromkeys(LIBRARY_NAMES)
    Fakes().install(monkeypatch, "flash_attn")
    monkeypatch.undo()
    fakes = Fakes()
    fakes.install(monkeypatch, "flash_attn")
    monkeypatch.setattr(choice.importlib.metadata, "version", lambda name: f"{name} 2.8.3")
    assert choice.installed_libraries()["flash_attn"] == "flash-attn 2.8.3"


class FakeStream:
    """A device's stream, which tells of its events."""

    def __init__(self):
        self.said = []

    def record_event(self):
        self.said.append("record")
        return self

    def synchronize(self):
        self.said.append("wait")


def test_a_plan_waits_until_the_last_one_has_left_pinned_memory(monkeypatch):
    """FlashInfer writes a plan to pinned memory, and copies it asynchronously: the next one must not overwrite it."""
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    planned = flashinfer.PlannedWrapper(types.SimpleNamespace(plan=lambda *args: stream.said.append(args)))
    assert [planned.plan(torch.device("cuda"), number) for number in (1, 2)] == [1, 2]
    assert stream.said == [(1,), "record", "wait", (2,), "record"]
    assert planned.plan(CPU, 3) == 3 and stream.said[-2:] == ["wait", (3,)]


def test_a_step_on_a_device_keeps_its_lengths_on_the_host(fakes):
    """As Step makes it for a GPU: tensors of lengths for the kernels, lists for a library's plan."""
    layout = CacheLayout(16, 2, 64, BF16)
    (cache,), sequences, query, lengths, counts = make_case(layout, "mixed")
    cache.is_cuda = True
    given = sequences.block_tables, lengths, counts, counts.tolist(), lengths.tolist()
    made = step._sequences({0: cache}, *given)
    assert made.seq_lens is lengths and made.host_lengths() == (lengths.tolist(), counts.tolist())
    assert [part.rows for part in parts_of(made)] == [slice(0, 2), slice(2, 44)]
    decode = step._sequences({0: cache}, sequences.block_tables, lengths, None, [1] * 4, lengths.tolist())
    assert [part.is_decode for part in parts_of(decode)] == [True]
