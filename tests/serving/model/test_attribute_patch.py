"""AttributePatch against the attributes of modules before it."""

import pytest
import torch
from torch import nn

from kvpage.serving.model.attribute_patch import AttributePatch


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def state(*modules: nn.Module) -> list[dict[str, object]]:
    return [dict(vars(module)) for module in modules]


def test_an_attribute_of_the_class_is_patched_and_comes_back() -> None:
    one, other = Doubling(), Doubling()
    before = state(one, other)
    with AttributePatch("forward", {one: lambda x: 3 * x}):
        assert one(torch.ones(1)).item() == 3
        assert other(torch.ones(1)).item() == 2
    assert one(torch.ones(1)).item() == 2
    assert state(one, other) == before


def test_an_attribute_of_the_module_itself_comes_back() -> None:
    module = Doubling()
    vars(module)["forward"] = lambda x: 5 * x
    before = state(module)
    with AttributePatch("forward", {module: lambda x: 3 * x}):
        assert module(torch.ones(1)).item() == 3
    assert module(torch.ones(1)).item() == 5
    assert state(module) == before


def test_a_submodule_is_hidden_and_stays_registered() -> None:
    module = Doubling()
    inner = module.inner
    with AttributePatch("inner", {module: lambda x: 10 * x}):
        assert module(torch.ones(1)).item() == 20
        assert dict(module.named_children()) == {"inner": inner}
    assert module.inner is inner


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_is_undone_after_an_error(error: type[BaseException]) -> None:
    modules = [Doubling(), Doubling()]
    before = state(*modules)
    with pytest.raises(error), AttributePatch("forward", {module: lambda x: x for module in modules}):
        raise error
    assert state(*modules) == before


def test_patches_nest() -> None:
    module = Doubling()
    with AttributePatch("forward", {module: lambda x: 3 * x}):
        with AttributePatch("forward", {module: lambda x: 4 * x}):
            assert module(torch.ones(1)).item() == 4
        assert module(torch.ones(1)).item() == 3
    assert module(torch.ones(1)).item() == 2
