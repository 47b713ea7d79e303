"""ForwardHooks: tell a cache which forwards of a model are given it, with what, and when they end."""

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvpage.serving.forward_inputs import named_arguments


class ForwardListener(Protocol):
    @property
    def is_in_forward(self) -> bool:
        """Whether a forward has begun, and its last K and V are yet to come."""

    def begin_forward(self, arguments: Mapping[str, Any]) -> None:
        """The model has been called with the listener as its past_key_values. What this raises, the call raises."""

    def end_forward(self) -> None:
        """The call has returned, or raised."""


class ForwardHooks:
    """Hooks for one listener, which they do not keep alive.

    Not every call begins at the same module: `generate` may call the model's forward itself, past its hooks, and some
    models leave out the module between. The outermost that is called with the listener tells of the tokens.
    """

    def __init__(self, model: PreTrainedModel, listener: ForwardListener) -> None:
        self._listener = weakref.ref(listener)
        self._handles: list[RemovableHandle] = []
        modules = {id(module): module for module in (model, model.base_model, model.get_decoder())}
        for module in modules.values():
            if module is not None:
                self._hook(module)

    def remove(self) -> None:
        """Not within a forward of the model."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: torch.nn.Module) -> None:
        signature = inspect.signature(module.forward)

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            listener = self._listener()
            if listener is None or listener.is_in_forward:
                return
            arguments = named_arguments(signature, args, kwargs)
            is_given = arguments.get("past_key_values") is listener
            if is_given:
                listener.begin_forward(arguments)

        def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            listener = self._listener()
            if listener is not None:
                listener.end_forward()

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))
