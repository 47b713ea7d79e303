"""Which attention function a model's layers call: set to ours for a step, and put back after it.

transformers keeps the name in every config, the nested ones too, and layers read it at each call. Outside a step the
caller's configs say what they said before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from kvpage.serving.attention import IMPLEMENTATION, register


class AttentionSwitch:
    """Switches one model's attention. ValueError if its class does not go through AttentionInterface."""

    def __init__(self, model: PreTrainedModel) -> None:
        name = type(model).__name__
        if not model._can_set_attn_implementation():
            raise ValueError(f"attention must go through transformers' AttentionInterface, that of {name} does not")
        register()
        self._configs = _configs(model)
        before = self._names()
        try:
            model.set_attn_implementation(IMPLEMENTATION)
            self._switched = [config for config in self._configs if _name(config) == IMPLEMENTATION]
        finally:
            self._restore(before)
        if not any(config is model.config.get_text_config(decoder=True) for config in self._switched):
            raise ValueError(f"attention must go through transformers' AttentionInterface, that of {name} does not")

    @contextmanager
    def on(self) -> Iterator[None]:
        """Our function inside, what was there before outside, also after an exception."""
        before = self._names()
        try:
            for config in self._switched:
                config._attn_implementation_internal = IMPLEMENTATION
            yield
        finally:
            self._restore(before)

    def _names(self) -> list[str | None]:
        return [_name(config) for config in self._configs]

    def _restore(self, names: list[str | None]) -> None:
        # Past the property: its setter would hand a name on to nested configs, which have their own here.
        for config, name in zip(self._configs, names, strict=True):
            config._attn_implementation_internal = name


def _name(config: Any) -> str | None:
    return config._attn_implementation_internal


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every config that a module of the model or another config holds, each once."""
    found: dict[int, Any] = {}
    queue: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while queue:
        config = queue.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        queue += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
