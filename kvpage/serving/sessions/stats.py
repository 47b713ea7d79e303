"""SessionStats: the counters of an engine's sessions, and their state now."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Counters since the engine was made, and the state now.

    Attributes:
        num_sessions: Sessions now.
        num_tokens: Tokens of all their branches.
        num_paused: Sessions that pause now.
        num_retained_blocks: Blocks that they keep. A block of two branches counts twice.
        num_opened: Sessions that were opened.
        num_restored: Of these, those that a record has brought back.
        num_forgotten: Sessions that were closed to make room for others.
        num_refused: Times that a branch was not kept, since a quota has no room.
    """

    num_sessions: int = 0
    num_tokens: int = 0
    num_paused: int = 0
    num_retained_blocks: int = 0
    num_opened: int = 0
    num_restored: int = 0
    num_forgotten: int = 0
    num_refused: int = 0
