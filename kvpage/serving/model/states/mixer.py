"""StateMixer: a module of a model that reads and writes states."""

from dataclasses import dataclass

from torch import nn

from kvpage.cache.state_cache import StateKey


@dataclass(frozen=True, slots=True, eq=False)
class StateMixer:
    """A module of the model, whose forward takes a cache.

    module: of the model, not of a view.
    cache_name: the argument of its forward that is the cache. cache_place: its place among the positional ones.
    keys: the parts that it reads and writes.
    is_stepwise: whether it reads its state only where it computes one token.
    holds: submodules that hold states as the module itself does, in attributes; empty where states are in the cache.
    """

    module: nn.Module
    cache_name: str
    cache_place: int
    keys: frozenset[StateKey]
    is_stepwise: bool = False
    holds: tuple[str, ...] = ()
