"""Containers: modules of a model's own code that hold its linear layers, at whatever depth."""

from collections.abc import Iterable

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
LIBRARIES = ("transformers", "transformers_modules")
"""Top-level packages of a model's own code. The second holds code that comes with weights."""


def containers_of(copied: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of the model's own code, in copied ones, that have linear layers inside.

    copied: the modules that are copied anyway.
    """
    modules = dict.fromkeys(copied)
    num_copied, left = len(modules), [*modules]
    while left:
        children = [child for child in [*left.pop()._modules.values()] if child is not None and child not in modules]
        inner = [child for child in children if is_the_models(child) and _has_layers(child)]
        modules.update(dict.fromkeys(inner))
        left += inner
    return [*modules][num_copied:]


def is_the_models(module: nn.Module) -> bool:
    """Whether nobody but the model's own code sets attributes of the module, to all that is usual."""
    return type(module) in CONTAINERS or type(module).__module__.split(".")[0] in LIBRARIES


def _has_layers(module: nn.Module) -> bool:
    return any(type(part) is nn.Linear for part in module.modules() if part is not module)
