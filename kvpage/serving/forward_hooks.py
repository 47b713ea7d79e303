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

    @property
    def has_written(self) -> bool:
        """Whether K and V of the forward under way have come already."""

    def finish_forward(self) -> None:
        """The call has returned."""

    def end_forward(self) -> None:
        """The call has raised, or was interrupted some time ago. Again is fine."""


class ForwardHooks:
    """Hooks for one listener, which they do not keep alive.

    Not every call begins at the same module: `generate` may call the model's forward itself, past its hooks, and some
    models leave out the module between. The outermost that is called with the listener tells of the tokens.
    """

    def __init__(self, model: PreTrainedModel, listener: ForwardListener) -> None:
        self._listener = weakref.ref(listener)
        self._handles: list[RemovableHandle] = []
        self._outermost: torch.nn.Module | None = None  # of the last forward; and its input_ids:
        self._tokens: weakref.ref[torch.Tensor] | None = None
        modules = {id(module): module for module in (model, model.base_model, model.get_decoder())}
        for module in modules.values():
            if module is not None:
                self._hook(module)

    def remove(self) -> None:
        """Not within a forward of the model."""
        for handle in self._handles:
            handle.remove()

    def _is_within(self, module: torch.nn.Module, tokens: torch.Tensor | None) -> bool:
        """Whether it is called by the outermost, of the forward that has begun: with the same tokens, or embedded
        ones.
        """
        if module is self._outermost:
            return False
        begun = self._tokens() if self._tokens else None
        return tokens is None or tokens is begun or (begun is not None and torch.equal(tokens, begun))

    def _hook(self, module: torch.nn.Module) -> None:
        signature = inspect.signature(module.forward)

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            listener = self._listener()
            if listener is None:
                return
            arguments = named_arguments(signature, args, kwargs)
            is_given = arguments.get("past_key_values") is listener
            if not is_given:
                return
            tokens = arguments.get("input_ids")
            if listener.is_in_forward:
                if not listener.has_written and self._is_within(module, tokens):
                    return
                listener.end_forward()  # torch calls no hooks behind KeyboardInterrupt
            self._outermost, self._tokens = module, None if tokens is None else weakref.ref(tokens)
            listener.begin_forward(arguments)

        def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            listener = self._listener()
            if listener is None:
                return
            if output is None:  # it has raised
                listener.end_forward()
            elif module is self._outermost:
                listener.finish_forward()

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))
