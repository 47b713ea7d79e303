"""VictimOrder: which record of a tier goes first, by key. The policies are those of blocks in the prefix tree.

keys        RecordOrder, in C++
b"a" ─► 0   place 0: used last, found how often, ...
b"c" ─► 1   place 1
"""

from collections.abc import Iterator

from kvpage._C import RecordOrder, eviction_policies

Key = bytes

POLICIES = eviction_policies()
WALKED = 32  # victims that are asked for at once: most tiers take the first


class VictimOrder:
    """An order of keys by a policy. Not thread-safe: callers hold the tier's lock.

    Raises ValueError for a policy that is none of POLICIES.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        self._order = RecordOrder(policy)
        self._place_ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    def add(self, key: Key, age: float = 0.0) -> None:
        """Add a key that is not there yet. age: seconds since its last use, for a policy that heeds time."""
        place_id = self._order.add(age)
        self._place_ids[key], self._keys[place_id] = place_id, key

    def use(self, key: Key) -> None:
        """Note that a key was read."""
        self._order.use(self._place_ids[key])

    def remove(self, key: Key, is_evicted: bool = False) -> None:
        """Take a key out; KeyError if it is not there. is_evicted: to make room, which policies learn from."""
        place_id = self._place_ids.pop(key)
        del self._keys[place_id]
        self._order.remove(place_id, is_evicted)

    def victims(self) -> Iterator[Key]:
        """Walk over all keys, the first to go first. The order must not change meanwhile."""
        walk = self._order.walk()
        while place_ids := walk.take(WALKED):
            for place_id in place_ids:
                yield self._keys[place_id]
