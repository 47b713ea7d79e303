"""StateParts: what the records of groups need of the store that makes them."""

import threading
from dataclasses import dataclass

from kvpage.store.stack.call_gate import CallGate
from kvpage.store.stack.tier_stack import TierStack


@dataclass(frozen=True, slots=True)
class StateParts:
    """Parts of a store. lock: one for all indexes of states."""

    tiers: TierStack
    gate: CallGate
    lock: threading.Lock
