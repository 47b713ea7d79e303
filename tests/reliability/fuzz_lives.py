"""Lives as worlds of the fuzzer: calls of a random life are made wrongly before they are made as the life wants them.

life ─► its operation ─► Watched part ─► the call made wrong ─► refused: the life goes on, and equals its model
                                    │                      └──► taken: invariants hold, and another life begins
                                    └──► the call as it is
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fuzz_case import Fuzzer, PlayedWorld
from support import group_worlds, session_life, slot_life, store_life, tree_life
from support.life import Life, World

from kvpage.serving import Session

CALM_STEPS = 60  # of a life before its calls are made wrong, too: blocks are cached and scarce by then
WRONG_SHARE = 0.2  # of the calls
PARTS = ("pool", "tree", "space", "windows", "states", "rows")  # of a part, whose calls are made wrong, too
READS = frozenset(  # which leave all as it was, also when they are taken
    ["block_ids", "block_tables", "check", "explain", "first_forkable", "has_room", "inputs"]
    + ["is_free", "is_swapped", "look", "lookup", "num_pinned_only_by", "of", "ref_count", "retrieve"]
    + ["slot_mapping", "slot_of", "slots", "state", "stats", "tables", "tokens", "version"]
)


class Spoiled(Exception):
    """A wrong call was taken: the model knows nothing of it."""


class Watched:
    """A part of a life. Some of its calls are made wrongly first."""

    def __init__(self, part: Any, call: Callable[..., Any]) -> None:
        self._part, self._call = part, call

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if name in PARTS and value is not None:
            return Watched(value, self._call)
        if not callable(value) or name.startswith("_"):
            return value
        return lambda *args, **named: self._call(self._part, name, args, named)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._part)

    def __len__(self) -> int:
        return len(self._part)

    def __bool__(self) -> bool:
        return bool(self._part)


class LifeWorld(PlayedWorld):
    """worlds: of lives, of which one is drawn for each. parts: attributes of a life whose calls are made wrong.

    errors: besides those that any call may have.
    """

    covers: tuple[str, ...]
    worlds: Sequence[World]
    parts: tuple[str, ...] = ("manager",)
    errors: tuple[type[Exception], ...] = (KeyError, RuntimeError)  # of unknown ids, and of calls amid others

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.life: Life | None = None

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None and self.life is not None:
            for name in self.parts:
                self._set(name, self._real[name])
            self.life.end()

    def play(self, fuzzer: Fuzzer) -> None:
        """Do one operation of a life."""
        life = self.life or self._begin()
        self.fuzzer = fuzzer
        weights = life.operations()
        (operation,) = self.rng.choices(list(weights), list(weights.values()))
        try:
            life.do(operation)
            life.compare()
        except Spoiled:
            self.life = None
            for part in self._real.values():
                for end in ("check", "close"):
                    getattr(part, end, lambda: None)()

    def _begin(self) -> Life:
        self.life = life = self.rng.choice(self.worlds).life(self.rng.getrandbits(32))
        weights = life.operations()
        for operation in self.rng.choices(list(weights), list(weights.values()), k=self.rng.randrange(CALM_STEPS)):
            life.do(operation)
        self._real = {name: getattr(life, name) for name in self.parts}
        for name, part in self._real.items():
            self._set(name, Watched(part, self._call))
        return life

    def _set(self, name: str, part: object) -> None:
        setattr(self.life, name, part)

    def _call(self, part: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        function = getattr(part, name)
        args = tuple(arg._part if isinstance(arg, Watched) else arg for arg in args)
        if (args or named) and self.rng.random() < WRONG_SHARE:
            title = f"{type(part).__name__}.{name}"
            if self.fuzzer.is_taken(title, function, args, named, self.errors) and name not in READS:
                raise Spoiled
        return function(*args, **named)


class TreeLives(LifeWorld):
    covers = ("kvpage.BlockPool", "kvpage.PrefixTree", "kvpage.Match", "kvpage.PartMatch")
    worlds = tree_life.WORLDS
    parts = ("pool", "tree")


class ManagerLives(LifeWorld):
    covers = ("kvpage.BlockManager", "kvpage.Allocation", "kvpage.BlockStats")
    worlds = group_worlds.ALONE


class GroupLives(LifeWorld):
    covers = ("kvpage.BlockManager", "kvpage.HeldBlocks", "kvpage.HeldWindow", "kvpage.States", "kvpage.Window")
    worlds = group_worlds.WORLDS


class SlotLives(LifeWorld):
    covers = ("kvpage._C.SlotAllocator", "kvpage._C.SlotTree")
    worlds = slot_life.WORLDS
    parts = ("slots", "cache")
    errors = (OverflowError,)


class StoreLives(LifeWorld):
    covers = ("kvpage.store.KVStore", "kvpage.store.KVStoreStats", "kvpage.store.Pin")
    worlds = store_life.WORLDS
    parts = ("store",)


class SessionLives(LifeWorld):
    """Each session that a life opens is watched, too."""

    covers = ("kvpage.serving.Session", "kvpage.serving.SessionState")
    worlds = session_life.WORLDS
    parts = ("sessions",)

    def _call(self, part: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = super()._call(part, name, args, named)
        return Watched(result, self._call) if isinstance(result, Session) else result
