"""Bounds on the tokens that a trace's requests can find: with every state kept, and with so many slots at a time.

The second bound is by prices. A state that request i leaves, and request j begins at, takes a slot in each gap between
them. Let every gap have a price of at least 0. Whatever a schedule finds, less the price of the slots that it takes, is
at most the sum of each request's best offer at these prices. All slots together cost `num_slots` times the sum of
prices. So the two sums bound every schedule, for any prices; the search only makes the bound smaller. It knows the
future, and may keep a state of any token.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpage.benchmarks.hybrid_traces import Request

NUM_STEPS = 3000


@dataclass(frozen=True, slots=True)
class Offers:
    """What each request could begin at: `gain` tokens, left by request `since`, for request `until`."""

    since: npt.NDArray[np.int64]
    until: npt.NDArray[np.int64]
    gain: npt.NDArray[np.float64]
    num_requests: int

    @property
    def most(self) -> int:
        """Tokens found where every state of every token is kept."""
        best = np.zeros(self.num_requests)
        np.maximum.at(best, self.until, self.gain)
        return int(best.sum())


def offers_of(requests: list[Request]) -> Offers:
    """Return each request's offers: of earlier ones that share more than all between."""
    found = []
    computed = [request.computed for request in requests]
    for until, request in enumerate(requests):
        best, limit = 0, len(request.prompt) - 1
        for since in range(until - 1, -1, -1):
            shared = min(_num_shared(request.prompt, computed[since]), limit)
            if shared > best:
                best = shared
                found.append((since, until, shared))
    columns = np.array(found, np.int64).reshape(-1, 3)
    return Offers(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.float64), len(requests))


def bound(offers: Offers, num_slots: int) -> int:
    """Return a number of tokens that no policy with so many slots exceeds."""
    prices = np.zeros(offers.num_requests)
    least = float(offers.most)
    for step in range(NUM_STEPS):
        value, surplus = _value(offers, num_slots, prices)
        least = min(least, value)
        if not surplus.any():
            break
        # The step that would reach a value a little below the best one, if the value were linear.
        length = (value - 0.98 * least) / float(surplus @ surplus) / (1 + step / 100)
        prices = np.maximum(prices - length * surplus, 0)
    return int(np.ceil(least))


def _value(offers: Offers, num_slots: int, prices: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
    """Return the bound at these prices, and the slots of each gap that no best offer takes."""
    paid = np.concatenate([[0.0], np.cumsum(prices)])
    left = offers.gain - (paid[offers.until] - paid[offers.since])
    best = np.zeros(offers.num_requests)
    np.maximum.at(best, offers.until, left)
    taken = np.flatnonzero((left == best[offers.until]) & (left > 0))
    _, first = np.unique(offers.until[taken], return_index=True)
    taken = taken[first]
    change = np.zeros(offers.num_requests + 1)
    np.add.at(change, offers.since[taken], 1)
    np.add.at(change, offers.until[taken], -1)
    return float(best.sum() + num_slots * prices.sum()), num_slots - np.cumsum(change)[:-1]


def _num_shared(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    count = min(len(a), len(b))
    if count == 0 or a[0] != b[0]:
        return 0
    different = np.flatnonzero(a[:count] != b[:count])
    return int(different[0]) if len(different) else count
