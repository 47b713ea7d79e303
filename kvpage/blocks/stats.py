"""BlockStats: what a BlockManager has done, and what its blocks are doing now."""

from dataclasses import dataclass

from kvpage.blocks.space import SpaceStats


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Counters since the manager was made, and the state of the blocks now.

    num_used_blocks: held by sequences, whether their own or pinned in the tree.
    num_evictable_blocks: cached, in nobody's use.
    space: the same of both tiers, in more detail.
    """

    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    num_used_blocks: int
    num_sequences: int
    query_tokens: int
    hit_tokens: int
    evicted_blocks: int
    space: SpaceStats

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
