"""ModelView: copies of a model's modules over the same weights, with kvpage's attention. The model does not change.

                     the model                                  its view
    modules with     config: sdpa, forward(), layers, ...       a copy: config "kvpage", forward(), layers, ...
    a config ...     _parameters, _buffers, hooks  ◄─────────── the same dicts
    Linear, RMSNorm  all attributes                ◄─────────── NativeLinear, AdaptedLinear, ...: the same attributes
    all others       Embedding, adapters           ◄─────────── the same modules

Both compute with the same weights, also after these change, and call the same hooks. One thread may use the model
while another uses the view. A view takes some hundred bytes a module, and no tensor. Native layers are optional: see
ViewLayers.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvpage.serving.model.attention import IMPLEMENTATION, register
from kvpage.serving.model.native.containers import containers_of
from kvpage.serving.model.native.layers import ViewLayers, is_wholly_native
from kvpage.serving.weights.adapters.adapted_linear import AdaptedPass, adapted_layers
from kvpage.serving.weights.adapters.adapter import Adapter


class ModelView:
    """One view of one model, for one thread. Raises ValueError if the model's attention is not named by its configs.

    `module` follows submodules that are replaced later, as adapters are. Other attributes of a module with a config,
    and the config, are read when the view is made and at the next replacement. A forward that was replaced by a method,
    or by a functools.partial with its module, gets the copy. Any other gets the model's own module.

    native: makes the layers that compute with kvpage's operations; None to leave all layers as they are.
    implementation: the name of kvpage's attention.
    forwards: for some modules of the model, what makes the forward of the copy. It gets the copy, and takes the place
        of the forward that this has. None for a module that must only be a copy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        native: ViewLayers | None = None,
        implementation: str = IMPLEMENTATION,
        forwards: Mapping[nn.Module, Callable[[nn.Module], object] | None] | None = None,
    ) -> None:
        if not model._can_set_attn_implementation():
            raise _bypasses_interface(model)
        register()
        self._model: nn.Module = model
        self._native = native
        self._forwards = dict(forwards or {})
        self._implementation = implementation
        self._is_wholly_native = False
        self._adapters: Sequence[Adapter] = ()
        self.adapted = AdaptedPass()
        self._num_builds = 0
        self._copies: dict[nn.Module, Any] = {}
        self._layers: dict[nn.Module, nn.Module] = {}  # native ones, by the model's own
        self._configs: dict[int, tuple[Any, Any]] = {}  # of each config, by its id: itself, and its copy
        self._modules_now: list[
            dict[str, nn.Module | None]
        ] = []  # those of the model, and as they were at the last look
        self._modules_before: list[dict[str, nn.Module | None]] = []
        self._build()
        if _implementation(self._copies[model].config.get_text_config(decoder=True)) != implementation:
            raise _bypasses_interface(model)

    @property
    def module(self) -> Any:
        """The copy of the model. It stays the same object, as do the copies of modules that are not replaced."""
        if self._modules_now != self._modules_before:
            self._build()
        return self._copies[self._model]

    @property
    def version(self) -> int:
        """A number that grows whenever modules were replaced."""
        if self._modules_now != self._modules_before:
            self._build()
        return self._num_builds

    def use_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Have the layers that these change add their parts from now on, where `adapted` tells which rows are whose."""
        self._adapters = adapters
        self._build()

    def one_thread_in_torch(self) -> AbstractContextManager[None]:
        """Return the limit of torch's threads for a forward of `module`: none, unless all its products are native."""
        if self._modules_now != self._modules_before:
            self._build()
        return nullcontext() if self._native is None or not self._is_wholly_native else self._native.threads.limited()

    def _build(self) -> None:
        """Copy the modules that need it. Earlier copies stay, and get the state that their modules have now."""
        modules = _modules_to_copy(self._model, self._forwards.keys())
        if self._native is not None:
            modules += self._native.containers(modules)
            self._layers = self._native.stand_ins(modules)
        elif self._adapters:
            modules += containers_of(modules)
        bases = self._layers if self._native is not None else {}
        self._layers = {**bases, **adapted_layers(self._model, self._adapters, bases, self.adapted)}
        self._copies = {module: self._copies.get(module) or type(module).__new__(type(module)) for module in modules}
        for module in modules:
            attributes = vars(self._copies[module])
            attributes.clear()
            attributes.update(self._state(module))
        if self._native is not None:
            self._fuse(modules, self._native)
        self._replace_forwards()
        if self._native is not None:
            self._is_wholly_native = is_wholly_native(self._copies[self._model])
        self._modules_now = [module._modules for module in modules]
        self._modules_before = [dict(module._modules) for module in modules]
        self._switch()
        self._num_builds += 1

    def _fuse(self, modules: Iterable[nn.Module], native: ViewLayers) -> None:
        """Give copies whose operations can be fewer another forward."""
        for module in modules:
            forward = native.fused_forward(module, self._copies[module])
            if forward is not None:
                vars(self._copies[module])["forward"] = forward

    def _replace_forwards(self) -> None:
        """Give the copies of some modules a forward that others make. Modules that the model lost have no copy."""
        for module, make in self._forwards.items():
            copy_of_module = self._copies.get(module)
            if make is not None and copy_of_module is not None:
                vars(copy_of_module)["forward"] = make(copy_of_module)

    def _of_view(self, module: Any) -> Any:
        """Return what the view has in place of a module of the model: a copy, a native layer, or the same."""
        return self._copies.get(module, self._layers.get(module, module))

    def _switch(self) -> None:
        """Name kvpage's attention in the copies of configs, also for modules that came from another model."""
        self._copies[self._model].set_attn_implementation(self._implementation)
        configs = [config for _, config in self._configs.values()]
        kinds = {type(config) for config in configs if _implementation(config) == self._implementation}
        for config in configs:
            if type(config) in kinds:  # the property's setter would also set nested configs
                config._attn_implementation_internal = self._implementation

    def _state(self, module: nn.Module) -> dict[str, Any]:
        """Return the attributes of the module's copy."""
        state = dict(vars(module))  # in one call: other threads may change it
        attributes = {name: self._own(value) for name, value in state.items()}
        children = copy(state["_modules"])
        children.update((name, self._of_view(child)) for name, child in children.items())
        attributes["_modules"] = children
        if _keeps_tables(module):
            attributes["_buffers"] = copy(state["_buffers"])
        if attributes.get("_compiled_call_impl") is not None:  # it calls the model's own modules
            attributes["_compiled_call_impl"] = None
        return attributes

    def _own(self, value: Any) -> Any:
        """Return the view's copy of a module or config of the model, or of a function bound to one."""
        if isinstance(value, nn.Module):
            return self._of_view(value)
        if _is_config(value):
            return self._config(value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._own(value.__self__))
        if isinstance(value, partial):
            bound = partial(self._own(value.func), *map(self._own, value.args), **value.keywords)
            vars(bound).update((name, self._own(content)) for name, content in vars(value).items())
            return bound
        return value

    def _config(self, config: Any) -> Any:
        """Return the config's copy, with copies of nested configs. It is made once."""
        if id(config) not in self._configs:
            config_copy = copy(config)
            self._configs[id(config)] = config, config_copy
            for name in getattr(config, "sub_configs", ()):
                if _is_config(nested := getattr(config, name, None)):
                    vars(config_copy)[name] = self._config(nested)
        return self._configs[id(config)][1]


def _modules_to_copy(model: nn.Module, named: Container[nn.Module]) -> list[nn.Module]:
    """Return the modules that are named, that have a config or tables, and those that contain such modules."""
    known: dict[nn.Module, bool] = {}

    def visit(module: nn.Module) -> bool:
        if module not in known:
            inside = [visit(child) for child in [*module._modules.values()] if child is not None]
            is_special = module in named or _has_config(vars(module).values()) or _keeps_tables(module)
            known[module] = any(inside) or is_special
        return known[module]

    visit(model)
    return [module for module, is_copied in known.items() if is_copied]


def _has_config(values: Iterable[Any]) -> bool:
    return any(_is_config(value) for value in [*values])


def _is_config(value: Any) -> bool:
    return hasattr(value, "_attn_implementation_internal") and not isinstance(value, (nn.Module, type))


def _implementation(config: Any) -> str | None:
    name: str | None = config._attn_implementation_internal
    return name


def _keeps_tables(module: nn.Module) -> bool:
    """Whether a module has tables that its forward may replace, by length: model and view have their own."""
    return any(name.endswith(("inv_freq", "_cached")) for name in module._buffers)


def _bypasses_interface(model: PreTrainedModel) -> ValueError:
    return ValueError(
        f"attention must go through transformers' AttentionInterface, that of {type(model).__name__} does not"
    )
