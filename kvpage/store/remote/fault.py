"""Fault: why a server has no answer for a key, by kind. A backend returns it for a key, or raises it for a call.

absent      there is nothing under the key                        a miss
full        there is no room for the value                        it is not stored
forbidden   the server refuses this, and will again               a miss, counted as an error
busy        the server cannot now; another key may be served      a miss, counted; it may open the breaker
broken      the server is not reached, or serves no call          a miss, counted; it may open the breaker
"""

from collections.abc import Sequence
from typing import Literal

FaultKind = Literal["absent", "full", "forbidden", "busy", "broken"]


class Fault(Exception):
    """Why there is no answer for a key.

    Attributes:
        kind: absent, full, forbidden, busy or broken.
        is_partial: whether the same call was answered for other keys, so that it says nothing about the server.
    """

    def __init__(self, kind: FaultKind, message: str, *, is_partial: bool = False) -> None:
        super().__init__(message)
        self.kind, self.is_partial = kind, is_partial

    @property
    def is_error(self) -> bool:
        """Return whether it is counted: an absent value and a full server are no errors."""
        return self.kind not in ("absent", "full")

    @property
    def is_of_server(self) -> bool:
        """Return whether the server is in trouble. A server that refuses is not."""
        return self.kind in ("busy", "broken") and not self.is_partial


def raise_if_none(answers: Sequence[object]) -> None:
    """Raise the mildest fault if all answers are errors: one of the server only if all are."""
    faults = [answer for answer in answers if isinstance(answer, Fault) and answer.is_error]
    if faults and len(faults) == len(answers):
        raise min(faults, key=lambda fault: (fault.is_of_server, fault.kind == "broken"))
