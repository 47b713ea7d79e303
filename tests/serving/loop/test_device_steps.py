"""The work of a decode step for a device: one upload, one fetch, one wait, and captured a few launches."""

import pytest
import torch
from support.fake_device import CUDA, Capturer, FakeDevice, move, on_device
from support.models import CONFIGS, make_model, make_prompts
from support.state_models import make_state_model

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams


def decoding(
    device: FakeDevice,
    patch: pytest.MonkeyPatch,
    kind: str,
    captures: bool,
    runs_ahead: bool,
    lengths: tuple[int, ...] = (5, 6, 7),
    **options: object,
) -> Engine:
    config = EngineConfig(CacheConfig(4, 64), max_num_seqs=6, native_layers=False, **options)
    model = make_model(kind) if kind in CONFIGS else make_state_model(kind)
    engine = Engine.from_model(model, config)
    for prompt in make_prompts(list(lengths), seed=2):
        engine.add_request(prompt, SamplingParams(max_tokens=40))
    engine.step()
    move(engine, device, patch, runs_ahead)
    if captures:
        engine.debug.use_graphs(Capturer(device))
        with device:
            if engine.states is None:
                engine.warmup(lambda num: None)
            else:  # a warm-up allocates states of padding, which the device cannot
                engine.debug.batch_runner.graphs.capture()
        assert engine.stats().graphs.sizes == (1, 2, 4, 6), engine.stats().graphs
    return engine


GROUPS = ["gemma3", "mistral", "falcon_h1", "lfm2", "mamba2", "qwen3_5_text", "zamba"]
"""Models with windows and with states, whose slots and tables come with the others."""


@pytest.mark.parametrize(
    ("kind", "captures"),
    [*((kind, captures) for kind in ("llama", "gemma2") for captures in (False, True)), *((g, True) for g in GROUPS)],
)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_one_upload_one_fetch_one_wait(
    monkeypatch: pytest.MonkeyPatch, kind: str, captures: bool, runs_ahead: bool
) -> None:
    device = FakeDevice()
    options = {"num_window_blocks": 40} if kind in GROUPS and kind in CONFIGS else {}
    engine = decoding(device, monkeypatch, kind, captures, runs_ahead, **options)
    with device:
        for _ in range(3):  # the first step ahead is begun
            engine.step()
        device.clear()
        for _ in range(4):
            assert len(engine.step()) == 3
    assert device.waits == []
    assert (device.num_uploads, device.num_fetches, device.num_events_waited) == (4, 4, 4)
    if captures:  # the copies of inputs to their places, and the replay; no layer of mamba2 attends
        assert device.num_launches == 4 * (2 if kind == "mamba2" else 3)
    else:
        assert device.num_launches > 4 * 50


def test_a_step_launches_as_much_for_many_sequences_as_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched for each sequence alone would take longer than the step itself."""
    launches = []
    for lengths in ((5,), (5, 6, 7), (2, 3, 4, 9, 11, 20)):
        device = FakeDevice()
        with monkeypatch.context() as patch:
            engine = decoding(device, patch, "llama", False, False, lengths)
            with device:
                engine.step()
                device.clear()
                assert len(engine.step()) == len(lengths)
        launches.append((device.num_launches, device.num_uploads, device.num_fetches, device.waits))
    assert launches[0] == launches[1] == launches[2], launches


def test_the_fake_device_sees_what_waits() -> None:
    device = FakeDevice()
    x = on_device(torch.arange(4.0))
    with device:
        for work in (
            x.tolist, x[0].item, x.cpu, lambda: bool(x[0] > 1), lambda: x[x > 1], lambda: x[[0, 1]],
            lambda: torch.ones(2).to(CUDA), lambda: torch.tensor([1], device=CUDA), lambda: x.nonzero(),
        ):  # fmt: skip
            work()
        assert len(device.waits) == 9
        device.clear()
        there = torch.ones(2).pin_memory().to(CUDA, non_blocking=True)
        assert there.device == CUDA and (there + there).is_cuda and device.waits == []
        assert (device.num_uploads, device.num_launches) == (1, 1)
        with pytest.raises(AssertionError, match="one device"):
            there + torch.ones(2)
