"""ModelView: a model's modules once more, over the same weights, whose attention is kvpage's. The model is not touched.

                     the model                                  its view
    modules with     config: sdpa, forward(), layers, ...       config: a copy, "kvpage"; forward(), layers, ... anew
    a config ...     _parameters, _buffers, hooks  ◄─────────── the same dicts
    all others       Linear, Embedding, adapters   ◄─────────── the same modules

So both compute with the same weights, whatever is done to these, and call the same hooks, and any thread may use the
model while another uses the view. A view costs some hundred bytes a module, and no tensor.
"""

from collections.abc import Iterable
from copy import copy
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvpage.serving.model.attention import IMPLEMENTATION, register


class ModelView:
    """One view of one model, for one thread. ValueError if the model's attention is not given by its configs.

    Submodules that are replaced later, as adapters do, are found by `module`. What else is set on a module that has a
    config, or in the config, is seen when the view is made and at the next replacement. A forward that was replaced by
    a method, or by a functools.partial with its module, goes on with the copy; any other with the model's own module.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not model._can_set_attn_implementation():
            raise _bypasses_interface(model)
        register()
        self._model: nn.Module = model
        self._copies: dict[nn.Module, Any] = {}
        self._configs: dict[int, tuple[Any, Any]] = {}  # of each config, by its id: itself, and its copy
        self._modules_now: list[
            dict[str, nn.Module | None]
        ] = []  # those of the model, and as they were at the last look
        self._modules_before: list[dict[str, nn.Module | None]] = []
        self._build()
        if _implementation(self._copies[model].config.get_text_config(decoder=True)) != IMPLEMENTATION:
            raise _bypasses_interface(model)

    @property
    def module(self) -> Any:
        """What to call in place of the model. It stays the same object, as do the copies of modules that stay."""
        if self._modules_now != self._modules_before:
            self._build()
        return self._copies[self._model]

    def _build(self) -> None:
        """Copies what has to be, or, of modules that were copied before, what they hold."""
        modules = _modules_to_copy(self._model)
        self._copies = {module: self._copies.get(module) or type(module).__new__(type(module)) for module in modules}
        for module in modules:
            held = vars(self._copies[module])
            held.clear()
            held.update(self._state(module))
        self._modules_now = [module._modules for module in modules]
        self._modules_before = [dict(module._modules) for module in modules]
        self._switch()

    def _switch(self) -> None:
        """Names kvpage's attention in the copies of configs, also in those of modules that came from another model."""
        self._copies[self._model].set_attn_implementation(IMPLEMENTATION)
        configs = [config for _, config in self._configs.values()]
        kinds = {type(config) for config in configs if _implementation(config) == IMPLEMENTATION}
        for config in configs:
            if type(config) in kinds:  # past the property, whose setter would hand the name on to nested configs
                config._attn_implementation_internal = IMPLEMENTATION

    def _state(self, module: nn.Module) -> dict[str, Any]:
        """What the module's copy holds."""
        state = dict(vars(module))  # in one go: other threads may be at work on it
        held = {name: self._own(value) for name, value in state.items()}
        children = copy(state["_modules"])
        children.update((name, self._copies.get(child, child)) for name, child in children.items())
        held["_modules"] = children
        if _keeps_tables(module):
            held["_buffers"] = copy(state["_buffers"])
        if held.get("_compiled_call_impl") is not None:  # it would go on with the model's own modules
            held["_compiled_call_impl"] = None
        return held

    def _own(self, value: Any) -> Any:
        """The view's own for what is the model's: modules, configs, and what is bound to them."""
        if isinstance(value, nn.Module):
            return self._copies.get(value, value)
        if _is_config(value):
            return self._config(value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._own(value.__self__))
        if isinstance(value, partial):
            bound = partial(self._own(value.func), *map(self._own, value.args), **value.keywords)
            vars(bound).update((name, self._own(held)) for name, held in vars(value).items())
            return bound
        return value

    def _config(self, config: Any) -> Any:
        """Its copy, with copies of the configs in it: made once."""
        if id(config) not in self._configs:
            own = copy(config)
            self._configs[id(config)] = config, own
            for name in getattr(config, "sub_configs", ()):
                if _is_config(nested := getattr(config, name, None)):
                    vars(own)[name] = self._config(nested)
        return self._configs[id(config)][1]


def _modules_to_copy(model: nn.Module) -> list[nn.Module]:
    """Modules that go by a config or keep tables, and whatever contains such."""
    found: dict[nn.Module, bool] = {}

    def visit(module: nn.Module) -> bool:
        if module not in found:
            inside = [visit(child) for child in [*module._modules.values()] if child is not None]
            found[module] = any(inside) or _has_config(vars(module).values()) or _keeps_tables(module)
        return found[module]

    visit(model)
    return [module for module, is_copied in found.items() if is_copied]


def _has_config(values: Iterable[Any]) -> bool:
    return any(_is_config(value) for value in [*values])


def _is_config(value: Any) -> bool:
    return hasattr(value, "_attn_implementation_internal") and not isinstance(value, (nn.Module, type))


def _implementation(config: Any) -> str | None:
    return config._attn_implementation_internal


def _keeps_tables(module: nn.Module) -> bool:
    """Rotary embeddings may exchange their tables in a forward, by its length: each user of the weights has its own."""
    return any(name.endswith(("inv_freq", "_cached")) for name in module._buffers)


def _bypasses_interface(model: PreTrainedModel) -> ValueError:
    return ValueError(
        f"attention must go through transformers' AttentionInterface, that of {type(model).__name__} does not"
    )
