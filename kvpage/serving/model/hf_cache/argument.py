"""The argument of a forward that is its cache. Its name is `cache` since transformers 5.24.

    past_key_values     before, and in models of other authors
    cache_params        Mamba's, before

Later versions of transformers take the older names too, with a warning.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

KV_ARGUMENTS = ("past_key_values", "cache")
"""Names of a cache of K and V, and of states beside them."""
CACHE_ARGUMENTS = (*KV_ARGUMENTS, "cache_params")
"""Names of a cache of any kind."""


def cache_argument(forward: Callable[..., Any], names: Sequence[str] = KV_ARGUMENTS) -> str | None:
    """Return the first of the names that is an argument of a forward; None if none is."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in names if name in parameters), None)


def checked_cache_argument(model: Any, names: Sequence[str] = KV_ARGUMENTS) -> str:
    """Return the name of a model's cache. ValueError if its forward takes none of the names."""
    name = cache_argument(model.forward, names)
    if name is None:
        words = " or ".join(names)
        raise ValueError(f"forward must take {words}, that of {type(model).__name__} does not")
    return name


def given_cache(arguments: Mapping[str, Any]) -> object:
    """Return the cache among the named arguments of a call; None if there is none."""
    return next((arguments[name] for name in KV_ARGUMENTS if arguments.get(name) is not None), None)
