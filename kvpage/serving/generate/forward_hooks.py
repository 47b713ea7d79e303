"""ForwardHooks: report to a cache the forwards of a model that are given it, their arguments, and their ends."""

import inspect
import sys
import weakref
from collections.abc import Mapping, Sequence
from threading import Lock
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvpage.serving.model.hf_cache.argument import given_cache

REGISTERING = Lock()
"""Held while hooks are registered: torch numbers them without a lock, so two threads could take one number."""


def named_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, with those of its **kwargs; nothing for a call that does not fit."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call itself will raise it
        return {}
    named: dict[str, Any] = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


class ForwardListener(Protocol):
    """A cache, as the hooks see it."""

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward has begun whose call is still on the stack: see is_on_stack."""

    def begin_forward(self, arguments: Mapping[str, Any], call: FrameType) -> object:
        """Begin a forward: torch has called the model, in that frame, with the listener as its cache.

        An error raised here is raised by the model's call.
        """

    def finish_forward(self) -> None:
        """End the forward whose call has returned."""

    def end_forward(self) -> None:
        """End a forward whose call has raised. Calling it again does nothing."""


class ForwardHooks:
    """Hooks for one listener, which they do not keep alive. They ignore forwards without it, in any thread.

    Calls may begin at different modules: `generate` may call the model's forward past its hooks, and some models skip
    the module between. The outermost module that is called with the listener gives the tokens.
    """

    def __init__(self, model: PreTrainedModel, listener: ForwardListener) -> None:
        self._listener: weakref.ref[ForwardListener] = weakref.ref(listener)
        self._handles: list[RemovableHandle] = []
        self._outermost: torch.nn.Module | None = None  # in the last forward
        # transformers does not annotate get_decoder.
        decoder: torch.nn.Module | None = model.get_decoder()  # type: ignore[no-untyped-call, unused-ignore]
        modules = {id(module): module for module in (model, model.base_model, decoder)}
        with REGISTERING:
            for module in modules.values():
                if module is not None:
                    self._hook(module)

    def remove(self) -> None:
        """Remove the hooks. Not within a forward that is given the listener."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: torch.nn.Module) -> None:
        signature = inspect.signature(module.forward)

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            listener = self._given(args, kwargs)
            if listener is None or listener.is_in_forward:
                return
            arguments = named_arguments(signature, args, kwargs or {})
            if given_cache(arguments) is listener:
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
        """Return the listener if it is among a call's arguments. It is not touched: it belongs to its own thread.

        kwargs: None for a call in another thread that began before the hooks were registered, or ends after. Only
        hooks that are registered for keywords get them from torch.
        """
        listener: ForwardListener | None = self._listener()
        if listener is None or kwargs is None:
            return None
        return listener if any(value is listener for value in (*kwargs.values(), *args)) else None


def is_on_stack(frame: FrameType) -> bool:
    """Whether the frame's call has not ended. torch calls hooks after an Exception, none after KeyboardInterrupt."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
