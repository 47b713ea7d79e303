"""Native layers after someone has put another function, or no memory, in the place of what they stand in for.

Libraries replace forwards by class, for all models of the process. The oracle is the model's own module.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support.models import generate_each, make_model, make_prompts
from torch import nn

from kvpage import CacheConfig
from kvpage.ops.cpu.host_layers import host_product, host_rms_norm
from kvpage.serving import Engine, EngineConfig, SamplingParams

CACHE = CacheConfig(block_size=4, num_gpu_blocks=64)
PROMPTS = make_prompts([1, 5, 9], seed=3)


@contextmanager
def replaced(holder: object, name: str) -> Iterator[None]:
    """Let `holder.name` give other numbers than before, inside."""
    own = getattr(holder, name)

    def other(*args: object, **kwargs: object) -> torch.Tensor:
        return own(*args, **kwargs) * 1.5 + 0.3

    setattr(holder, name, other)
    try:
        yield
    finally:
        setattr(holder, name, own)


PLACES: dict[str, Callable[[nn.Module], tuple[object, str]]] = {
    "linear": lambda model: (nn.Linear, "forward"),
    "product": lambda model: (nn.functional, "linear"),
    "norm": lambda model: (type(model.model.norm), "forward"),
    "mlp": lambda model: (type(model.model.layers[0].mlp), "forward"),
    "activation": lambda model: (type(model.model.layers[0].mlp.act_fn), "forward"),
}


def served(engine: Engine) -> list[list[int]]:
    return [one.token_ids for one in engine.generate(PROMPTS, SamplingParams(max_tokens=4))]


@pytest.mark.parametrize("place", PLACES)
def test_a_function_that_a_class_gets_later_is_called(place: str) -> None:
    model = make_model("llama")
    engine = Engine.from_model(model, EngineConfig(CACHE))
    before = served(engine)
    engine.reset_prefix_cache()
    with replaced(*PLACES[place](model)):
        expected = generate_each(model, PROMPTS, 4)
        assert served(engine) == expected != before
    engine.reset_prefix_cache()
    assert served(engine) == before


@pytest.mark.parametrize("place", PLACES)
def test_a_function_that_a_class_has_got_before_is_called(place: str) -> None:
    model = make_model("llama")
    with replaced(*PLACES[place](model)):
        assert served(Engine.from_model(model, EngineConfig(CACHE))) == generate_each(model, PROMPTS, 4)


def freed(*shape: int) -> nn.Parameter:
    """A parameter whose memory is gone, as sharded training leaves it between its uses."""
    parameter = nn.Parameter(torch.ones(*shape), requires_grad=False)
    parameter.untyped_storage().resize_(0)
    return parameter


def test_tensors_without_memory_are_not_read() -> None:
    rows, weight = torch.ones(2, 8), torch.ones(4, 8)
    assert host_product(rows, freed(4, 8), None, None, 0, 1) is None
    assert host_product(rows, weight, freed(4), None, 0, 1) is None
    assert host_product(rows, weight, None, freed(4, 8), 1, 1) is None
    assert host_rms_norm(rows, freed(8), 1e-6, 0.0, True, 1) is None


def test_a_model_without_memory_ends_its_request_with_torchs_error() -> None:
    model = make_model("llama")
    engine = Engine.from_model(model, EngineConfig(CACHE))
    model.lm_head.weight.untyped_storage().resize_(0)
    output = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=2))[0]
    assert output.finish_reason == "error" and "storage" in str(output.error)
