"""EngineConfig(compile_model=True): the tokens of the model as it is, from code that is compiled once."""

import os
import shutil
from collections.abc import Callable

import pytest
import torch
from support.models import make_model, make_prompts
from torch._dynamo.utils import counters

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, SamplingParams

PARAMS = SamplingParams(max_tokens=6)
PROMPTS = make_prompts([5, 9, 1], seed=3)
HAS_COMPILER = shutil.which(os.environ.get("CXX", "c++")) is not None
LONG = os.environ.get("KVPAGE_TEST_COMPILER") == "1"


def tokens_of(model: torch.nn.Module, **options: object) -> list[list[int]]:
    engine = Engine.from_model(model, EngineConfig(CacheConfig(4, 64), max_num_seqs=3, **options))
    return [one.token_ids for one in engine.generate(PROMPTS, PARAMS)]


def small() -> torch.nn.Module:
    return make_model("llama", num_hidden_layers=1)


@pytest.fixture
def compile_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], list[dict]]:
    """Returns a function that names the backend of torch.compile; it returns the list of its calls."""
    own = torch.compile

    def by(backend: object) -> list[dict]:
        calls: list[dict] = []
        torch._dynamo.reset()
        monkeypatch.setattr(
            torch, "compile", lambda module, **given: calls.append(given) or own(module, backend=backend, **given)
        )
        return calls

    return by


def test_tokens_are_the_same_and_nothing_is_compiled_anew(compile_by: Callable) -> None:
    """By torch's tracer alone, which takes seconds where a compiler takes half a minute."""
    calls, model = compile_by("eager"), small()
    counters.clear()
    engine = Engine.from_model(model, EngineConfig(CacheConfig(4, 64), max_num_seqs=3, compile_model=True))
    assert calls == [{"dynamic": True}] and engine.debug.runner.view.config._attn_implementation == "kvpage_uncompiled"
    assert model.config._attn_implementation == "eager" and type(model.lm_head) is torch.nn.Linear
    first = [one.token_ids for one in engine.generate(PROMPTS, PARAMS)]
    num_graphs = counters["stats"]["unique_graphs"]
    engine.reset_prefix_cache()
    assert first == [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == tokens_of(small())
    assert counters["stats"]["unique_graphs"] == num_graphs > 0


def test_without_a_compiler_it_is_refused_with_the_reason(compile_by: Callable) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no compiler here")

    compile_by(broken)
    with pytest.raises(ValueError, match="compile_model must be False, .* no compiler here"):
        tokens_of(small(), compile_model=True)


@pytest.mark.skipif(not (HAS_COMPILER and LONG), reason="needs a C++ compiler, KVPAGE_TEST_COMPILER=1, half a minute")
def test_with_a_compiler() -> None:
    assert tokens_of(small(), compile_model=True) == tokens_of(small())
