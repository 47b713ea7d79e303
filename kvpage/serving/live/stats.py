"""AsyncEngineStats: the counters of an AsyncEngine, and of its engine."""

from dataclasses import dataclass

from kvpage.serving.stats.engine_stats import EngineStats


@dataclass(frozen=True, slots=True)
class AsyncEngineStats:
    """Counters since the AsyncEngine was made, and its state now.

    Attributes:
        engine: The numbers of the engine.
        num_unfinished: Requests that have been submitted and have not ended.
        num_waiting: Those of them that wait, preempted ones included.
        num_submitted: Requests that were taken.
        num_refused: Requests that were refused by QueueFull.
        num_aborted: Requests that were aborted, by callers or because their readers went.
        num_late: Requests that reached their deadlines.
        num_slow: Requests whose readers fell too far back.
        num_failed: Requests that ended with an error.
        is_draining: Whether no more requests are taken.
    """

    engine: EngineStats
    num_unfinished: int
    num_waiting: int
    num_submitted: int
    num_refused: int
    num_aborted: int
    num_late: int
    num_slow: int
    num_failed: int
    is_draining: bool
