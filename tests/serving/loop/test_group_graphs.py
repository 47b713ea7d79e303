"""Captured decode steps of each kind of model: tokens of plain steps, padding that spoils nothing."""

import logging

import pytest
import torch
from support.cpu_graphs import CpuCapturer
from support.group_engines import FULL, STATES, WINDOWS, GroupKind
from support.state_engines import B, finished, greedy, random_prompt

MOST = 6
OTHERS = "mistral", "jamba", "nemotron_h", "recurrent_gemma", "zamba"
"""Without full layers; with attention beside; with steps that are not scans; with held states; with a shared module."""


@pytest.fixture(params=[*FULL, *WINDOWS, *STATES], scope="module")
def kind(request: pytest.FixtureRequest) -> GroupKind:
    return GroupKind(request.param)


def engine_of(kind: GroupKind, **options: object):
    return kind.on_device(runs_ahead=False, **{"max_num_seqs": MOST, **options})


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_without_attention_no_table_is_kept() -> None:
    engine = engine_of(GroupKind("mamba2"))
    static = engine.debug.batch_runner.graphs._inputs
    assert static.num_bytes == MOST * 8 * (5 + 1), "columns, with one of slots, and the newest tokens"


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_seqs", range(1, MOST + 1))
def test_tokens_are_those_of_generate(kind: GroupKind, num_seqs: int) -> None:
    """Of every number of sequences, which comes down as some end before others. What nobody owns is poisoned."""
    engine = engine_of(kind, capturer=CpuCapturer(finds_waits=True))
    prompts = [random_prompt(B + 3 * index, num_seqs + index) for index in range(num_seqs)]
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(5 + 2 * index))
    found = {}
    while engine.has_unfinished:
        kind.engines.poison(engine)
        for one in engine.step():
            if one.output is not None:
                found[tuple(one.output.prompt_token_ids)] = one.output.samples[0].token_ids
    assert found == {tuple(prompt): kind.answer(prompt, 5 + 2 * index) for index, prompt in enumerate(prompts)}
    stats = engine.stats().graphs
    assert stats.sizes == (1, 2, 4, 6) and stats.num_replays >= 4 and not stats.misses
    kind.engines.check_nothing_held(engine)


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    kind, prompts = GroupKind(name), [random_prompt(length, length) for length in (3, 9, 2 * B)]
    engine = engine_of(kind, capturer=CpuCapturer(finds_waits=True))
    outputs = engine.generate(prompts, greedy(9))
    assert [one.samples[0].token_ids for one in outputs] == [kind.answer(prompt, 9) for prompt in prompts]
    assert engine.stats().graphs.num_replays >= 6
    kind.engines.check_nothing_held(engine)


def test_samples_that_copy_blocks_and_states(kind: GroupKind) -> None:
    """The copies of a fork come before the replay that is its first step."""
    engine, prompt = engine_of(kind), random_prompt(2 * B + 2)
    engine.add_request(prompt, greedy(9, n=3))
    (output,) = finished(engine)
    assert [sample.token_ids for sample in output.samples] == [kind.answer(prompt, 9)] * 3
    assert engine.stats().graphs.num_replays >= 7
    kind.engines.check_nothing_held(engine)


def test_logits_of_a_replay_serve_other_rules(kind: GroupKind) -> None:
    """Log-probabilities need the logits on the host."""
    prompts, params = [random_prompt(length, length) for length in (5, 9)], greedy(6, logprobs=2)
    expected = kind.plain().generate(prompts, params)
    engine = engine_of(kind)
    for output, other in zip(engine.generate(prompts, params), expected, strict=True):
        assert output.samples[0].token_ids == other.samples[0].token_ids
        pairs = zip(output.samples[0].logprobs, other.samples[0].logprobs, strict=True)
        assert all(one.logprob == pytest.approx(another.logprob, abs=1e-4) for one, another in pairs)
    assert engine.stats().graphs.num_replays == 5


def test_padding_writes_nothing_that_others_have(kind: GroupKind) -> None:
    """Every byte of free blocks and slots is as before. Its own state is that of nobody, and may be anything."""
    engine = engine_of(kind)
    for length in (5, 6, 7):
        engine.add_request(random_prompt(length, length), greedy(40))
    for _ in range(3):
        engine.step()
    kind.engines.poison(engine)
    if kind.has_states:
        engine.states.slots[-1] = 0xFF
        assert engine.states.num_slots == engine.manager.states.options.num_slots + 1
    before = snapshot(engine)
    assert len(engine.step()) == 3 and engine.stats().graphs.num_replays >= 3
    written = {name: (rows != before[name]).flatten(1).any(dim=1) for name, rows in snapshot(engine).items()}
    for name, of_rows in written.items():
        num_rows = int(of_rows.sum())
        assert num_rows == (4 if name == "states" else 3), "a row of each sequence, and the slot of padding"
    if kind.has_states:
        slots = [engine.manager.states.slot_of(one.seq_id) for one in engine.scheduler.running]
        assert written["states"].nonzero().flatten().tolist() == sorted([*slots, engine.states.num_slots - 1])


def snapshot(engine) -> dict[str, torch.Tensor]:
    """Bytes of each row of each layer's K and V, and of each state slot."""
    rows = {
        f"{group} {layer}": cache.views[0].rows.clone().flatten(0, 1).contiguous().view(torch.uint8)
        for group, blocks in enumerate((engine.cache, *engine.window_caches))
        for layer, cache in enumerate(blocks.bound_caches)
    }
    if engine.states is not None:
        rows["states"] = engine.states.slots.clone()
    return rows


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_weights_and_memory_at_fixed_addresses(name: str) -> None:
    """Steps are computed anew once a tensor that a capture has read lies elsewhere."""
    kind = GroupKind(name)
    engine = engine_of(kind)
    graphs = engine.debug.batch_runner.graphs
    tensors = graphs._model._tensors
    expected = [*engine.window_caches[0].gpu_cache] if engine.window_caches else [engine.states.slots]
    addresses = {tensor.data_ptr() for tensor in tensors}
    assert {tensor.data_ptr() for tensor in expected} <= addresses


# --- reasons ---------------------------------------------------------------------------------------------------------


class Waiting(torch.nn.Module):
    """A part of a mixer that reads a number on the host."""

    __module__ = "transformers.made_up"

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 if x.isfinite().any().item() else 2)


def test_a_mixer_that_waits_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    kind, prompts = GroupKind("lfm2"), [random_prompt(5, 1), random_prompt(9, 2)]
    expected = [kind.answer(prompt, 6) for prompt in prompts]
    mixer = kind.model.model.layers[0].conv
    mixer.out_proj = Waiting(mixer.out_proj)
    with caplog.at_level(logging.INFO, "kvpage"):
        engine = engine_of(kind, capturer=CpuCapturer(finds_waits=True))
        outputs = engine.generate(prompts, greedy(6))
    assert [one.samples[0].token_ids for one in outputs] == expected
    stats = engine.stats().graphs
    assert stats.sizes == () and stats.misses == {"the model waits for the device, in _local_scalar_dense": 5}
    assert caplog.text.count("not captured as graphs, because the model waits for the device") == 1


def test_steps_with_prompts_say_why(kind: GroupKind) -> None:
    engine = engine_of(kind)
    engine.add_request(random_prompt(5), greedy(9))
    for _ in range(3):
        engine.step()
    engine.add_request(random_prompt(9, 1), greedy(2))
    finished(engine)
    assert engine.stats().graphs.misses == {"prompts are computed beside it": 1}
