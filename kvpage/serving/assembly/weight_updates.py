"""WeightUpdates: an engine's way from one version of its model's weights to the next.

finish     requests that have begun run to their ends ─► change ─► the next version
restart    change ─► the next version ─► requests that have begun compute all of their K and V again
stale      change ─► the next version ─► requests that have tokens go on with older K and V, which nobody else finds
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol, get_args

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.namespaces import WeightsName
from kvpage.checks.interrupts import HeldInterrupts
from kvpage.observe.telemetry import Telemetry
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.request import Entry
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.serving.weights.engine_weights import EngineWeights, check_version
from kvpage.serving.weights.watch import ChangedWeights, WeightsChanged, WeightWatch
from kvpage.store.kv_store import KVStore

logger = logging.getLogger(__name__)
Running = Literal["finish", "restart", "stale"]
Change = Callable[[], object]
MOST_NAMESPACES = 2**31 - 1


class UpdatedLoop(Protocol):
    """The loop whose requests an update concerns; see ServingLoop."""

    @property
    def num_begun(self) -> int:
        """Unfinished requests that have had blocks."""

    def watch_weights(self, look: Callable[[bool], None]) -> None:
        """Have this called before each step."""

    @property
    def is_due_later(self) -> bool:
        """Whether there is work of `finish_then`."""

    def finish_then(self, work: Callable[[], None], future: "Future[None]") -> None:
        """Do work once all requests that have begun have ended, unless its future is cancelled."""

    def withdraw(self, reason: str) -> None:
        """Forget that work; its future raises RuntimeError."""

    def entries(self, version: str) -> list[Entry]:
        """Return the unfinished requests, each with its namespace and adapter under a version."""

    def go_stale(self) -> int:
        """Let running requests that have tokens keep their K and V; return how many."""

    def restart(self, entries: Sequence[Entry], keeps_stale: bool = False) -> None:
        """Have requests compute all of their K and V again."""

    def check_between_steps(self, call: str) -> None:
        """RuntimeError during a step."""


class WeightUpdates:
    """The updates of one engine, and its watch over weights that change without a word.

    on_change: what to do about these.
    """

    def __init__(
        self,
        loop: UpdatedLoop,
        scheduler: Scheduler,
        connectors: Connectors,
        telemetry: Telemetry,
        weights: EngineWeights,
        watch: WeightWatch,
        on_change: ChangedWeights,
    ) -> None:
        self._loop, self._scheduler, self._connectors, self._telemetry = loop, scheduler, connectors, telemetry
        self._weights, self._watch, self._on_change = weights, watch, on_change
        loop.watch_weights(self._look)

    @property
    def _manager(self) -> BlockManager:
        return self._scheduler.manager

    def begin(self, version: str, change: Change | None, running: Running) -> "Future[None]":
        """Begin an update; the future is done when the version is. With "finish", steps of the loop bring it there.

        A cancelled future is an update that never comes. "restart" and "stale" take the place of one that waits.
        ValueError and RuntimeError, before anything changes, as of Engine.update_weights.
        """
        self._check(version, running)
        finishes = running == "finish" and self._loop.num_begun > 0
        if finishes and (path := self._watch.all_changed()):
            raise ValueError(
                f"running must be 'restart' or 'stale' where weights have changed already, {path} has: requests can "
                f"finish on the weights that they have where `change` changes these"
            )
        if finishes and change is None:
            raise ValueError("change must be a function that changes the weights, for requests to finish before that")
        is_due_later = self._loop.is_due_later
        if is_due_later and running == "finish":
            raise RuntimeError(
                "update_weights must not be called with running='finish' before the update under way has ended: "
                "'restart' and 'stale' take its place"
            )
        future: Future[None] = Future()
        if finishes:
            self._loop.finish_then(lambda: self._do(future, version, change, running), future)
            return future
        self._do(future, version, change, running)
        if is_due_later and future.exception() is None:
            self._loop.withdraw(f"the update was withdrawn, version {version!r} has begun in its place")
        return future

    def drop(self, version: str, records: bool) -> int:
        """Forget the cached blocks of a version; see Engine.drop_version."""
        self._loop.check_between_steps("drop_version")
        if not isinstance(version, str):
            raise TypeError(f"version must be a str, got {type(version).__name__}")
        if version == self._weights.version:
            raise ValueError(f"version must not be the current one, {version!r} is")
        store = None if self._connectors.store is None else self._connectors.store.store
        if records and not isinstance(store, KVStore):
            raise ValueError("records needs an engine with a KVStore")
        self._connectors.drain()
        tree = self._manager.tree
        with HeldInterrupts():
            names = [name for name in tree.names(MOST_NAMESPACES) if _version_of(name) == version]
            num_dropped = sum([self._manager.space.drop_namespace(name) for name in names])
            self._telemetry.tell()
        if records and isinstance(store, KVStore):
            store.remove_namespaces(lambda name: _version_of(name) == version)
        return num_dropped

    def accept(self) -> None:
        """Take the weights as they are: nothing of before is cached."""
        self._watch.accept()

    # --- an update ---------------------------------------------------------------------------------------------------

    def _check(self, version: str, running: Running) -> None:
        check_version(version)
        if running not in get_args(Running):
            raise ValueError(f"running must be one of {', '.join(get_args(Running))}, got {running!r}")
        if version == self._weights.version:
            raise ValueError(f"version must be another than the current one, got {version!r}")
        self._loop.check_between_steps("update_weights")
        self._check_branches()

    def _check_branches(self) -> None:
        num_branches = self._manager.stats().num_sequences - len(self._scheduler.running)
        if num_branches:
            raise RuntimeError(f"update_weights needs all Branches to be closed, {num_branches} are live")

    def _do(self, future: "Future[None]", version: str, change: Change | None, running: Running) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._check_branches()  # some may have come while requests finished
            self._connectors.drain()
            if change is not None:
                change()
            self._enter(version, running)
        except BaseException as error:  # it is the caller's, who waits for the future
            future.set_exception(error)
        else:
            future.set_result(None)

    def _enter(self, version: str, running: Running, is_noticed: bool = False) -> None:
        with HeldInterrupts():
            entries = self._loop.entries(version)
            num_stale = self._loop.go_stale() if running == "stale" else 0
            num_restarted = self._loop.num_begun - num_stale
            self._weights.begin(version, is_noticed=is_noticed, num_restarted=num_restarted, num_stale=num_stale)
            self._loop.restart(entries, keeps_stale=running == "stale")
            self._watch.accept()
            self._telemetry.tell()

    # --- changes without a word --------------------------------------------------------------------------------------

    def _look(self, may_admit: bool) -> None:
        """Look at some weights before a step. may_admit: whether a prompt may find something then."""
        path = self._watch.any_changed() if may_admit else self._watch.changed()
        if path is None:
            return
        if self._has_nothing:
            self._watch.accept()
            return
        if self._on_change == "error" or self._manager.stats().num_sequences > len(self._scheduler.running):
            raise WeightsChanged(
                f"weights must not change in place without update_weights or reset_prefix_cache, {path} has"
            )
        version = self._weights.unused_version()
        logger.warning("weights have changed in place, %s among them: what follows is of version %s", path, version)
        self._connectors.drain()
        self._enter(version, "restart", is_noticed=True)

    @property
    def _has_nothing(self) -> bool:
        """Whether nothing that older weights have computed can be read: it is neither cached nor under way."""
        is_idle = not self._loop.num_begun and not self._manager.stats().num_sequences
        return is_idle and not self._manager.enable_prefix_caching


def _version_of(namespace: bytes) -> str:
    return WeightsName.split(namespace)[0].version
