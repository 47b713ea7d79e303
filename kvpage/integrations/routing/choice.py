"""rank: the order in which replicas are asked to take a prompt.

1. Replicas that are much busier than the least busy one come last.
2. Among the others, the one that holds most of the prompt is first.
3. Among equals, the least busy one.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take a prompt.

    Attributes:
        replica: Its name.
        num_matched: Leading blocks of the prompt that it holds.
        load: Requests that it has.
    """

    replica: Hashable
    num_matched: int
    load: int


def rank(candidates: Sequence[Candidate], imbalance: int) -> list[Candidate]:
    """Return the candidates, the best one first. Equal ones keep their order: shuffle them before.

    Args:
        candidates: The replicas.
        imbalance: A replica with more requests than the least busy one, by more than this, is much busier.
    """
    least = min((candidate.load for candidate in candidates), default=0)

    def worth(candidate: Candidate) -> tuple[bool, int, int]:
        is_busy = candidate.load > least + imbalance
        return is_busy, candidate.load if is_busy else -candidate.num_matched, candidate.load

    return sorted(candidates, key=worth)
