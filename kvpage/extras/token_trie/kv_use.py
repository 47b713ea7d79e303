"""KVUse: the nodes of one trie that have K and V, by last use."""

from typing import Any


class KVUse:
    """The nodes of one trie that have K and V, in a ring by last use. The root and all its nodes share it.

        ring ── oldest ── ... ── newest ── back to the ring

    A node without such nodes below it (a KV-leaf) is always listed, and the oldest listed KV-leaf is evicted first. A
    node above a KV-leaf was used at the latest when the leaf was. So it may be listed earlier than it should, or not at
    all. When a node below it goes, it takes that node's place.
    """

    __slots__ = ("clock", "era", "num_kv", "newer", "older")

    def __init__(self) -> None:
        self.clock = 0
        self.era = 0  # the next one begins when a node gets K and V above others, whose keeper it then is
        self.num_kv = 0
        self.newer: Any = self
        self.older: Any = self

    def list_before(self, newer: Any, node: Any) -> None:
        """List a node before another one."""
        older = newer.older
        node.older, node.newer = older, newer
        older.newer = newer.older = node

    def unlist(self, node: Any) -> None:
        """Take a node out of the ring."""
        if node.newer is not None:
            node.older.newer, node.newer.older = node.newer, node.older
            node.older = node.newer = None

    def oldest_leaf(self) -> Any:
        """Return the oldest KV-leaf, of at least one.

        Nodes that come before their descendants are unlisted, each once for every time that it was used.
        """
        while self.newer.num_live > 0:
            self.unlist(self.newer)
        return self.newer
