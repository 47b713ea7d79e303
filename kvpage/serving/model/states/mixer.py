"""StateMixer: a module of a model that reads and writes states. PieceForward: what computes a piece of its tokens."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from kvpage.cache.state_cache import StateKey

LIMITS = "time_step_limit"
NO_LIMITS = 0.0, float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class StateMixer:
    """A module of the model, whose forward takes a cache.

    module: of the model, not of a view.
    cache_name: the argument of its forward that is the cache. cache_place: its place among the positional ones.
    keys: the parts that it reads and writes.
    is_stepwise: whether it reads its state only where it computes one token.
    steps_apart: whether it computes one token after a state by another rule than it computes a prompt; see scan_step.
    is_fixed: whether its scans are to compute token by token; see fixed_scans.
    holds: submodules that hold states as the module itself does, in attributes; empty where states are in the cache.
    """

    module: nn.Module
    cache_name: str
    cache_place: int
    keys: frozenset[StateKey]
    is_stepwise: bool = False
    steps_apart: bool = False
    is_fixed: bool = False
    holds: tuple[str, ...] = ()


def limits_of(module: nn.Module) -> tuple[float, float]:
    """Return the limits of a mixer's time step; those that limit nothing where it has none."""
    limits = getattr(module, LIMITS, None)
    return NO_LIMITS if limits is None else (float(limits[0]), float(limits[1]))


class PieceForward(Protocol):
    """The forward of a mixer, called for a piece of its tokens; MixerForward is one."""

    mixer: StateMixer

    @property
    def is_stepwise(self) -> bool:
        """Whether several tokens after a state must be computed one by one."""

    def compute(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_answer: bool = False) -> Any:
        """Call the mixer's own forward for a piece, whose states are in the cache.

        is_answer: Whether its tokens were generated: `generate` computes these one by one.
        """
