"""ForwardHooks: tell a cache which forwards of a model are given it, with what, and when they end."""

import inspect
import sys
import weakref
from collections.abc import Mapping
from threading import Lock
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvpage.serving.generate.forward_inputs import named_arguments


class ForwardListener(Protocol):
    @property
    def is_in_forward(self) -> bool:
        """Whether a forward has begun whose call is on the stack still: see is_on_stack."""

    def begin_forward(self, arguments: Mapping[str, Any], call: FrameType) -> None:
        """The model has been called with the listener as its past_key_values, by torch in that frame. What this raises,
        the call raises.
        """

    def finish_forward(self) -> None:
        """The call has returned."""

    def end_forward(self) -> None:
        """The call has raised. Again is fine."""


class ForwardHooks:
    """Hooks for one listener, which they do not keep alive. Forwards without it, in whatever thread, are let pass.

    Not every call begins at the same module: `generate` may call the model's forward itself, past its hooks, and some
    models leave out the module between. The outermost that is called with the listener tells of the tokens.
    """

    _registering = Lock()  # torch numbers hooks without one: two threads at once could take one number

    def __init__(self, model: PreTrainedModel, listener: ForwardListener) -> None:
        self._listener: weakref.ref[ForwardListener] = weakref.ref(listener)
        self._handles: list[RemovableHandle] = []
        self._outermost: torch.nn.Module | None = None  # of the last forward
        modules = {id(module): module for module in (model, model.base_model, model.get_decoder())}
        with self._registering:
            for module in modules.values():
                if module is not None:
                    self._hook(module)

    def remove(self) -> None:
        """Not within a forward that is given the listener."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: torch.nn.Module) -> None:
        signature = inspect.signature(module.forward)

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            listener = self._given(args, kwargs)
            if listener is None or listener.is_in_forward:
                return
            arguments = named_arguments(signature, args, kwargs or {})
            if arguments.get("past_key_values") is listener:
                self._outermost = module
                listener.begin_forward(arguments, sys._getframe(1))

        def after(module: torch.nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
            kwargs, output = rest if len(rest) == 2 else (None, *rest)
            listener = self._given(args, kwargs)
            if listener is None:
                return
            if output is None:  # it has raised
                listener.end_forward()
            elif module is self._outermost:
                listener.finish_forward()

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> ForwardListener | None:
        """The listener, if it is among a call's arguments. Nothing else is asked of it: it is its own thread's.

        kwargs: None of a call in another thread that began before the hooks were registered, or ends after: torch
        hands them to hooks that are registered for them.
        """
        listener: ForwardListener | None = self._listener()
        if listener is None or kwargs is None:
            return None
        return listener if any(value is listener for value in (*kwargs.values(), *args)) else None


def is_on_stack(frame: FrameType) -> bool:
    """Whether its call has not ended. torch calls hooks behind Exceptions, and none behind KeyboardInterrupt."""
    found: FrameType | None = sys._getframe(1)
    while found is not None and found is not frame:
        found = found.f_back
    return found is not None
