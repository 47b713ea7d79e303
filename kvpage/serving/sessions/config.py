"""SessionConfig: the limits of an engine's sessions."""

from dataclasses import dataclass

from kvpage.checks.values import as_real, check_at_least, check_flag


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The limits of all sessions of an engine. It checks itself.

    What sessions retain counts in the engine's `pin_quota`, with all pins.

    Attributes:
        max_sessions: Sessions at most. Beyond it, one is closed: of the owner who has most, the one that was not used
            for longest, those that keep no blocks first.
        max_tokens: Tokens of all branches of all sessions at most; the same holds. A session does not grow where those
            of owners with fewer tokens would have to go for it.
        max_branches: Branches of one session at most.
        owner_quota: Blocks that the sessions of one owner retain at most; None for all of `pin_quota`. The owner is
            the namespace, unless a session is told another one.
        return_lead: Seconds before the end of a pause at which blocks come back from the host, if nothing is known of
            the host's speed. Otherwise it is twice the time that loading takes, if that is longer.
        keeps_records: Whether sessions are written to the engine's KVStore, and read from there after a restart.
        record_deadline: Seconds that reading a record may take at most; a later one is none.

    Raises:
        ValueError: A number is out of range.
        TypeError: A value is of another type.
    """

    max_sessions: int = 1024
    max_tokens: int = 2**24
    max_branches: int = 64
    owner_quota: int | None = None
    return_lead: float = 0.25
    keeps_records: bool = True
    record_deadline: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_tokens", "max_branches"):
            check_at_least(name, getattr(self, name), 1)
        if self.owner_quota is not None:
            check_at_least("owner_quota", self.owner_quota, 0)
        check_flag("keeps_records", self.keeps_records)
        for name in ("return_lead", "record_deadline"):
            if not 0 <= as_real(name, getattr(self, name)) < float("inf"):
                raise ValueError(f"{name} must be finite seconds of at least 0, got {getattr(self, name)}")
