"""Case: one call that a world of objects could take next; Fuzzer: makes it, as it is or made wrong, and judges it.

world.case(rng) ─► Case ─► as it is ────────► must succeed, and do what `judge` says
                      └──► made wrong ──────► succeeds, and `world.check()` finds nothing
                                         └──► or raises a typed error, and `world.snapshot()` is what it was
"""

import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from fuzz_values import hostile, junk

from kvpage import OutOfBlocks

TYPED = (TypeError, ValueError, OutOfBlocks)
VALID_SHARE = 0.3


@dataclass(slots=True)
class Case:
    """args: by name, in order. positional: how many of the first have no names.
    errors: besides TypeError, ValueError and OutOfBlocks, those that are documented. may_raise: what a valid call may.
    fixed: args that are never made wrong. done: told the result, of wrong calls that succeeded, too.
    judge: asserts that a valid call's result is right.
    """

    name: str
    function: Callable[..., Any]
    args: dict[str, Any] = field(default_factory=dict)
    positional: int = 0
    errors: tuple[type[BaseException], ...] = ()
    may_raise: tuple[type[BaseException], ...] = ()
    fixed: Iterable[str] = ()
    done: Callable[[Any], object] | None = None
    judge: Callable[[Any], object] | None = None


class World:
    """Objects under test with all that is needed to call them. covers: the public names it exercises."""

    covers: tuple[str, ...]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Give everything back. kind: of the error that ended the calls; None if none did."""

    def case(self, rng: random.Random) -> Case:
        """Return the next call."""
        raise NotImplementedError

    def snapshot(self) -> object:
        """All that a failed call must leave as it was; compared with ==."""
        return None

    def check(self) -> None:
        """Raises if an invariant is broken."""


class PlayedWorld(World):
    """A world that makes its calls by itself, wrong ones by `Fuzzer.is_taken`."""

    def play(self, fuzzer: "Fuzzer") -> None:
        """Make some calls."""
        raise NotImplementedError


class Wrong(Exception):
    """A promise that was not kept."""


@dataclass(slots=True)
class Figures:
    valid: int = 0
    refused: int = 0
    taken: int = 0  # wrong in intent, and taken


class Fuzzer:
    """One world's calls. told: is given each call before it is made."""

    def __init__(self, rng: random.Random, told: Callable[[str], None]) -> None:
        self.rng, self.told, self.figures = rng, told, Figures()

    def call(self, world: World) -> None:
        if isinstance(world, PlayedWorld):
            world.play(self)
            return
        case = world.case(self.rng)
        if self.rng.random() < VALID_SHARE:
            self._valid(world, case)
        else:
            self._wrong(world, case)

    def _valid(self, world: World, case: Case) -> None:
        args = list(case.args.values())[: case.positional]
        names = dict(list(case.args.items())[case.positional :])
        self.told(describe(case, args, names))
        before = world.snapshot() if case.may_raise else None
        try:
            result = case.function(*args, **names)
        except case.may_raise as error:
            _same(world, before, error)
        else:
            if case.judge:
                case.judge(result)
            if case.done:
                case.done(result)
        self.figures.valid += 1

    def _wrong(self, world: World, case: Case) -> None:
        args, names = self._mutate(case)
        self.told(describe(case, args, names))
        before = world.snapshot()
        try:
            result = case.function(*args, **names)
        except (*TYPED, *case.errors) as error:
            if not isinstance(error, case.errors):
                _no_accident(error)
            _same(world, before, error)
            self.figures.refused += 1
        else:
            if case.done:
                case.done(result)
            world.check()
            self.figures.taken += 1

    def is_taken(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        named: dict[str, Any],
        errors: tuple[type[BaseException], ...],
    ) -> bool:
        """Make a call wrong, and return whether it was taken. A refusal must be typed."""
        given = {str(place): arg for place, arg in enumerate(args)} | named
        wrong_args, wrong_named = self._mutate(Case(name, function, given, len(args)))
        self.told(f"{name}({', '.join(map(brief, [*wrong_args, *wrong_named.items()]))})")
        try:
            function(*wrong_args, **wrong_named)
        except (*TYPED, *errors) as error:
            if not isinstance(error, errors):
                _no_accident(error)
            self.figures.refused += 1
            return False
        self.figures.taken += 1
        return True

    def _mutate(self, case: Case) -> tuple[list[Any], dict[str, Any]]:
        rng, given = self.rng, dict(case.args)
        free = [name for name in given if name not in case.fixed]
        for name in rng.sample(free, min(len(free), 1 if rng.random() < 0.8 else 2)):
            given[name] = hostile(given[name], rng)
        args = list(given.values())[: case.positional]
        names = dict(list(given.items())[case.positional :])
        if rng.random() < 0.04 and not case.fixed:
            self._misname(args, names)
        return args, names

    def _misname(self, args: list[Any], names: dict[str, Any]) -> None:
        kind = self.rng.randrange(3)
        if kind == 0:
            names["unknown"] = junk(self.rng)
        elif kind == 1 and names:
            del names[self.rng.choice(sorted(names))]
        elif args:
            args.pop()


def _same(world: World, before: object, error: BaseException) -> None:
    if world.snapshot() != before:
        raise Wrong(f"a call that raised has changed something: {type(error).__name__}: {error}")
    world.check()


def _no_accident(error: BaseException) -> None:
    """An error of a subclass that means something else is an accident; so is one without a word."""
    if isinstance(error, (OverflowError, ArithmeticError)) or (not str(error) and not isinstance(error, KeyError)):
        raise Wrong(f"{type(error).__name__} is no typed error: {error}")


def describe(case: Case, args: Iterable[Any], names: dict[str, Any]) -> str:
    parts = [*map(brief, args), *(f"{name}={brief(value)}" for name, value in names.items())]
    return f"{case.name}({', '.join(parts)})"


def brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        try:
            text = f"tensor({list(value.shape)}, {value.stride()}, {value.dtype}, {value.device})"
            has_numbers = value.numel() <= 8 and value.device.type == "cpu" and value.untyped_storage().nbytes()
            return f"{text}={value.tolist()}" if has_numbers else text
        except Exception:  # of a kind that has no strides
            return f"tensor({type(value).__name__}, {value.layout})"
    if isinstance(value, np.ndarray):
        return f"array({value.shape}, {value.dtype}, {value.tolist() if value.size <= 8 else '...'})"
    if isinstance(value, (list, tuple)) and len(value) <= 8:
        return f"{type(value).__name__}({', '.join(map(brief, value))})"
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."


def failures(error: BaseException) -> Iterator[str]:
    yield from traceback.format_exception(error)
