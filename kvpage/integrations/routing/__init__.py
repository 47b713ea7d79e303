"""Routing by prefixes, for routers of any kind: which replica holds how much of a prompt, and which one gets it.

replica:  tree ─► CacheDigest ─► a few KiB, now and then ─┐
router:   prompt ─► block hashes ─► PrefixIndex ─► rank ──┴► replicas, the best first
"""

from kvpage.integrations.routing.cache_digest import CacheDigest, DigestReport
from kvpage.integrations.routing.choice import Candidate, rank
from kvpage.integrations.routing.prefix_index import PrefixIndex

__all__ = ["CacheDigest", "Candidate", "DigestReport", "PrefixIndex", "rank"]
