"""torch has one thread while a view whose products are all native computes. The caller's number stays what it was."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.models import generate_each, make_model, make_prompts
from torch import nn

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams
from kvpage.serving.model.native.layers import NativeLayers, is_wholly_native
from kvpage.serving.model.native.torch_threads import TorchThreads, is_torchs, openmp_setter
from kvpage.serving.model.view import ModelView

CACHE = CacheConfig(block_size=4, num_gpu_blocks=64)
NUM = 3  # threads of the caller, more than one on every machine
needs_openmp = pytest.mark.skipif(openmp_setter() is None, reason="torch does not use an OpenMP that can be found")


@pytest.fixture(autouse=True)
def caller() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM)
    yield
    assert torch.get_num_threads() == NUM, "a test has changed it"
    torch.set_num_threads(before)


def in_thread(function: Callable[[], Any]) -> Any:
    """Return what the function returns in a new thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


class Setter:
    """In place of OpenMP's function: it keeps the numbers."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, num: int) -> None:
        self.calls.append(num)


# --- the limit --------------------------------------------------------------------------------------------------------


@needs_openmp
def test_inside_torch_has_one_thread_and_outside_the_callers() -> None:
    threads = TorchThreads()
    assert threads.caller is None
    with threads.limited():
        assert (torch.get_num_threads(), threads.caller) == (1, NUM)
        with threads.limited():  # does nothing
            assert (torch.get_num_threads(), threads.caller) == (1, NUM)
        assert (torch.get_num_threads(), threads.caller) == (1, NUM)
        with threads.lifted():
            assert (torch.get_num_threads(), threads.caller) == (NUM, None)
            with threads.limited():
                assert (torch.get_num_threads(), threads.caller) == (1, NUM)
            with threads.lifted():
                assert (torch.get_num_threads(), threads.caller) == (NUM, None)
        assert (torch.get_num_threads(), threads.caller) == (1, NUM)
    assert (torch.get_num_threads(), threads.caller) == (NUM, None)


@needs_openmp
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["limited", "lifted"])
def test_errors_restore_the_callers_number(error: type[BaseException], name: str) -> None:
    threads = TorchThreads()
    with pytest.raises(error), threads.limited(), getattr(threads, name)():
        raise error
    assert (torch.get_num_threads(), threads.caller) == (NUM, None)
    with pytest.raises(error), threads.limited():
        try:
            with threads.lifted():
                raise error
        finally:
            assert (torch.get_num_threads(), threads.caller) == (1, NUM)


@needs_openmp
def test_other_threads_have_their_own_numbers() -> None:
    before = in_thread(torch.get_num_threads)
    with TorchThreads().limited():
        assert in_thread(torch.get_num_threads) == before
    assert in_thread(torch.get_num_threads) == before


def test_without_a_runtime_nothing_happens() -> None:
    threads = TorchThreads(lambda: None)
    with threads.limited():
        assert (torch.get_num_threads(), threads.caller) == (NUM, None)
        with threads.lifted():
            assert (torch.get_num_threads(), threads.caller) == (NUM, None)


def test_a_caller_with_one_thread_needs_no_limit() -> None:
    setter = Setter()
    torch.set_num_threads(1)
    with TorchThreads(lambda: setter).limited():
        pass
    torch.set_num_threads(NUM)
    assert setter.calls == []


def test_an_openmp_that_torch_does_not_ask_is_none_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    setter = Setter()
    assert not is_torchs(setter) and setter.calls == [NUM + 1, NUM]

    def fail(name: None) -> None:
        raise OSError("no names of the process")

    monkeypatch.setattr("ctypes.PyDLL", fail)
    assert openmp_setter() is None


# --- in an engine -----------------------------------------------------------------------------------------------------


def numbers_of(model: nn.Module, watched: str) -> tuple[Engine, list[int]]:
    """An engine, and torch's number of threads at each call of a module of the model."""
    found: list[int] = []
    engine = Engine.from_model(model, EngineConfig(CACHE))
    model.get_submodule(watched).register_forward_pre_hook(lambda *_: found.append(torch.get_num_threads()))
    return engine, found


@needs_openmp
def test_a_step_limits_torch_and_computes_the_same() -> None:
    model, prompts = make_model("llama"), make_prompts([5, 9], seed=3)
    expected = generate_each(model, prompts, 4)
    engine, found = numbers_of(model, "model.embed_tokens")
    tokens = [one.token_ids for one in engine.generate(prompts, SamplingParams(max_tokens=4))]
    assert tokens == expected and set(found) == {1}
    assert torch.get_num_threads() == NUM


@needs_openmp
def test_native_layers_and_attention_have_the_callers_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvpage._C as _C

    found: list[int] = []
    engine = Engine.from_model(make_model("llama"), EngineConfig(CACHE))
    for name in ("linear", "rms_norm", "reshape_and_cache", "paged_attention"):
        own = getattr(_C, name)
        monkeypatch.setattr(_C, name, lambda *args, own=own: (found.append(args[-1]), own(*args))[1])
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    assert len(found) > 20 and set(found) == {NUM}


@needs_openmp
def test_a_model_that_raises_leaves_the_callers_number() -> None:
    model = make_model("llama")
    engine = Engine.from_model(model, EngineConfig(CACHE))

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    model.model.norm.register_forward_pre_hook(fail)
    (output,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    assert output.finish_reason == "error" and torch.get_num_threads() == NUM


@needs_openmp
def test_a_product_that_is_left_to_torch_has_the_callers_threads() -> None:
    model, found = make_model("llama"), []
    engine = Engine.from_model(model, EngineConfig(CACHE))

    class Watched(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is nn.functional.linear:
                found.append(torch.get_num_threads())
            return super().__torch_function__(function, types, args, kwargs or {})

    model.lm_head.weight = Watched(model.lm_head.weight.detach(), requires_grad=False)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
    assert found and set(found) == {NUM}


# --- which views ------------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A layer of the caller's own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base(rows)


@pytest.mark.parametrize(
    ("kind", "is_whole"), [("llama", True), ("qwen3", True), ("gemma3", True), ("gpt2", False), ("gpt_oss", False)]
)
def test_the_views_whose_products_are_all_native(kind: str, is_whole: bool) -> None:
    assert is_wholly_native(ModelView(make_model(kind), NativeLayers()).module) == is_whole


def test_a_layer_that_is_replaced_counts_at_the_next_step() -> None:
    model = make_model("llama")
    engine, found = numbers_of(model, "model.embed_tokens")
    projection = model.model.layers[1].self_attn.q_proj
    for layer, expected in ((Adapter(projection), NUM), (projection, 1)):
        model.model.layers[1].self_attn.q_proj = layer
        found.clear()
        engine.reset_prefix_cache()
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1))
        assert openmp_setter() is None or set(found) == {expected}
