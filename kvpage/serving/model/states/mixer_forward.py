"""MixerForward: the forward of a mixer's copy in a view of the model."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from kvpage.serving.model.attention import StepMissing, current_step
from kvpage.serving.model.native.bits.row_bits import RowBits
from kvpage.serving.model.states.fixed.fixed_scans import FixedForward
from kvpage.serving.model.states.held_states import with_held_states
from kvpage.serving.model.states.mixer import StateMixer
from kvpage.serving.model.states.piece_cache import PieceCache
from kvpage.serving.model.states.scan_start import ScannedForward
from kvpage.serving.model.states.scan_step import scan_step


class MixerForward:
    """The forward of one copy: it computes the packed row of the current step, with the step's states.

    It takes the place of the forward that the copy has when it is made, and calls that one for each piece.

    bits: of the view, whose mixers may be fixed; None for other views.
    """

    def __init__(self, mixer: StateMixer, copy: nn.Module, bits: RowBits | None = None) -> None:
        self.mixer, self._copy, self._bits = mixer, copy, bits
        assert bits is not None or not mixer.is_fixed, "mixers are fixed for row_bits alone"
        self._fixed = FixedForward(mixer, copy, bits) if mixer.is_fixed and bits is not None else None
        self._own: Any = vars(copy).get("forward")
        self._scanned = ScannedForward.of(mixer, copy) if mixer.is_stepwise else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = current_step.get()
        if step is None or step.states is None:
            raise StepMissing(f"{type(self._copy).__name__} was called without states, outside Engine.step()")
        return step.states.compute(self, args, kwargs)

    @property
    def is_stepwise(self) -> bool:
        """Whether several tokens after a state must be computed one by one."""
        return self.mixer.is_stepwise and not (self._scanned and self._scanned.is_current)

    def compute(self, cache: PieceCache, args: tuple[Any, ...], kwargs: dict[str, Any], is_answer: bool = False) -> Any:
        """Call the copy's own forward for a piece, whose states are in the cache.

        is_answer: Whether its tokens were generated: `generate` computes these one by one.
        """
        args, kwargs = self._with_cache(args, kwargs, cache)
        with self._looked_at():
            return self._compute(cache, args, kwargs, is_answer)

    def _looked_at(self) -> AbstractContextManager[object]:
        return nullcontext() if self._bits is None else self._bits.of_mixer()

    def _compute(self, cache: PieceCache, args: tuple[Any, ...], kwargs: dict[str, Any], is_answer: bool) -> Any:
        if self._fixed is not None:
            return self._fixed.compute(cache, args, kwargs)
        if self.mixer.steps_apart and not is_answer:
            return self._by_scan()(*args, **kwargs)
        if self._scanned and self._scanned.is_current:
            return self._scanned.compute(cache, args, kwargs)
        return self._computing()(*args, **kwargs)

    def _by_scan(self) -> Callable[..., Any]:
        """Return the forward that computes one token as several. It is made anew: the class may have another now."""
        forward = scan_step(self._copy)
        if forward is None or self._own is not None:
            raise ValueError(f"the forward of {type(self._copy).__name__} must be that of its class, as at load")
        return forward

    def _computing(self) -> Callable[..., Any]:
        """Return the forward that computes: that of the class, or one that somebody gave to the module."""
        forward = self._own or partial(type(self._copy).forward, self._copy)
        return with_held_states(self.mixer, self._copy, forward) if self.mixer.holds else forward

    def _with_cache(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], cache: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, with this cache among them."""
        cache_place = self.mixer.cache_place
        if len(args) > cache_place:
            return (*args[:cache_place], cache, *args[cache_place + 1 :]), kwargs
        return args, {**kwargs, self.mixer.cache_name: cache}


def view_forwards(
    mixers: Iterable[StateMixer], bits: RowBits | None = None
) -> dict[nn.Module, Callable[[nn.Module], Any] | None]:
    """Return what a view does with the modules of mixers: see ModelView. bits: of the view."""
    forwards: dict[nn.Module, Callable[[nn.Module], Any] | None] = {}
    for mixer in mixers:
        forwards[mixer.module] = partial(MixerForward, mixer, bits=bits)
        forwards.update((mixer.module.get_submodule(name), None) for name in mixer.holds)
    return forwards
