"""Shared by hooks on modules of a model: a lock for registering them, and a call's arguments by name."""

import inspect
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

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
