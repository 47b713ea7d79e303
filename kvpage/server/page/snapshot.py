"""Snapshot: an engine's values for the page at one moment, taken on the stepping thread."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpage._C import HotPrefix
from kvpage.serving import EngineStats, RequestState, SessionState
from kvpage.serving.sessions.session_engine import SessionEngine

MAX_PREFIXES, MAX_TEXT_TOKENS, MAX_LANES, MAX_SESSIONS = 14, 48, 24, 10


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine at one moment, as far as a reader with these namespaces may see it.

    Attributes:
        stats: Counters, and how full the engine is; of all namespaces.
        prefixes: The runs that most requests have found, of each namespace.
        requests: Unfinished requests of these namespaces.
        sessions: Sessions of these namespaces, those that were used last first.
        time: Seconds of time.monotonic().
        seconds: How long the stepping thread was busy with it.
    """

    stats: EngineStats
    prefixes: list[list[HotPrefix]]
    requests: list[RequestState]
    sessions: list[SessionState]
    time: float
    seconds: float


def take_snapshot(engine: Any, namespaces: Sequence[bytes]) -> Snapshot:
    """Look at an engine. It reads a bounded number of requests and of the tree's entries.

    Args:
        engine: The engine, between two steps.
        namespaces: Whose prefixes and requests to look at.

    Returns:
        The snapshot.
    """
    begin = time.monotonic()
    names = [engine.kv_namespace(name) for name in namespaces]
    prefixes = [engine.manager.tree.hottest(MAX_PREFIXES, MAX_TEXT_TOKENS, name) for name in names]
    states = engine.request_states(4 * MAX_LANES)
    requests = [state for state in states if state.namespace in namespaces][:MAX_LANES]
    has_sessions = isinstance(engine, SessionEngine)
    sessions = engine.sessions.states(namespaces, MAX_SESSIONS) if has_sessions else []
    return Snapshot(engine.stats(), prefixes, requests, sessions, begin, time.monotonic() - begin)
