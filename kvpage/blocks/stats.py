"""Statistics of blocks: counters since a BlockManager was made, and the state of its blocks now."""

from dataclasses import dataclass
from typing import NamedTuple

from kvpage._C import BlockPool, PrefixTree


class Query(NamedTuple):
    """A prompt that is counted. num_part_tokens: that it shares in a part of a block. num_refused: host blocks."""

    num_tokens: int
    num_part_tokens: int = 0
    num_refused: int = 0


class PromptCounts(NamedTuple):
    """Tokens of prompts; see SpaceStats. All change at once: another thread may read them."""

    query: int = 0
    device_hit: int = 0
    host_hit: int = 0
    part_hit: int = 0
    refused: int = 0

    def plus(self, query: Query, num_device_tokens: int, num_host_tokens: int, block_size: int) -> "PromptCounts":
        """Count one more prompt, and all that was found of it."""
        return PromptCounts(
            self.query + query.num_tokens,
            self.device_hit + num_device_tokens,
            self.host_hit + num_host_tokens,
            self.part_hit + query.num_part_tokens,
            self.refused + query.num_refused * block_size,
        )


class Preemptions(NamedTuple):
    """How often requests gave their blocks back, and how often they kept computed K and V on the host.

    Both change at once: another thread may read them.
    """

    num: int = 0
    num_swaps: int = 0

    def plus(self, is_swap: bool) -> "Preemptions":
        """Count one more."""
        return Preemptions(self.num + 1, self.num_swaps + is_swap)


@dataclass(frozen=True, slots=True)
class SpaceStats:
    """Counters of both tiers, in tokens or blocks as the names say, and the state of the host tier now.

    Attributes:
        query_tokens: Tokens of all prompts. A prompt counts once, when it first gets blocks, and so does all that is
            found of it then.
        device_hit_tokens: Prompt tokens found on the device.
        host_hit_tokens: Prompt tokens found on the host.
        part_hit_tokens: Prompt tokens found in parts of blocks, and copied.
        refused_tokens: Prompt tokens found on the host and left there, since computing them was expected to be faster.
        evicted_blocks: Cached blocks that have left the device.
        demoted_blocks: Those of them that were copied to the host for it.
        written_blocks: Blocks that were copied to the host before their eviction.
        promoted_blocks: Blocks that came back from the host.
        num_host_blocks: Blocks of the host tier.
        num_free_host_blocks: Host blocks that are free.
        num_cached_host_blocks: Host blocks in the tree.
        num_pinned_blocks: Blocks that users have pinned. A block of two pins counts twice.
        host_evicted_blocks: Cached blocks that have left the host, also those that were dropped.
        eviction: The policy of eviction, of both tiers.
    """

    query_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    part_hit_tokens: int
    refused_tokens: int
    evicted_blocks: int
    demoted_blocks: int
    written_blocks: int
    promoted_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_cached_host_blocks: int
    num_pinned_blocks: int
    host_evicted_blocks: int
    eviction: str = "lru"

    @property
    def miss_tokens(self) -> int:
        """Prompt tokens that were not found."""
        return self.query_tokens - self.device_hit_tokens - self.host_hit_tokens - self.part_hit_tokens


@dataclass(frozen=True, slots=True)
class SlotStats:
    """State slots of a hybrid model in both tiers now, and counters since the manager was made.

    Attributes:
        num_slots: Slots of the device tier.
        num_free_slots: Those without contents.
        num_checkpoints: Those that are checkpoints.
        num_host_slots: Slots of the host tier.
        num_free_host_slots: Those without contents.
        num_host_checkpoints: Those that are checkpoints.
        kept: Checkpoints that were taken.
        restored: Sequences that began at a checkpoint.
        evicted: Checkpoints that have left the device for another's sake.
        demoted: Those of them that went to the host.
        lost: Checkpoints that were dropped since their K and V were.
    """

    num_slots: int
    num_free_slots: int
    num_checkpoints: int
    num_host_slots: int
    num_free_host_slots: int
    num_host_checkpoints: int
    kept: int
    restored: int
    evicted: int
    demoted: int
    lost: int

    @property
    def num_used_slots(self) -> int:
        """Slots of the device that sequences hold, for their states and for checkpoints to come."""
        return self.num_slots - self.num_free_slots - self.num_checkpoints

    @property
    def num_used_host_slots(self) -> int:
        """Slots of the host with the states of sequences that are swapped out."""
        return self.num_host_slots - self.num_free_host_slots - self.num_host_checkpoints


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Counters since the manager was made, and the state of the device blocks now.

    Attributes:
        num_blocks: Blocks of the device tier.
        num_free_blocks: Blocks without contents.
        num_evictable_blocks: Cached blocks that are not in use.
        num_used_blocks: Blocks that sequences hold, whether their own or pinned in the tree.
        num_sequences: Sequences on the device.
        query_tokens: Tokens of all prompts.
        hit_tokens: Prompt tokens found on either tier.
        evicted_blocks: Cached blocks that have left the device.
        space: The same of both tiers, in more detail.
        slots: The state slots of a hybrid model; None for other models.
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
    slots: SlotStats | None = None

    @classmethod
    def of(
        cls, pool: BlockPool, tree: PrefixTree, space: SpaceStats, num_sequences: int, slots: SlotStats | None = None
    ) -> "BlockStats":
        """Return the statistics of a pool and its tree, with the counters of both tiers.

        Args:
            pool: The device tier's blocks.
            tree: The tree that caches them.
            space: Counters of both tiers.
            num_sequences: Sequences on the device.
            slots: Of a model with states.
        """
        return cls(
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_evictable_blocks=tree.num_evictable,
            num_used_blocks=pool.num_blocks - pool.num_free - tree.num_evictable,
            num_sequences=num_sequences,
            query_tokens=space.query_tokens,
            hit_tokens=space.device_hit_tokens + space.host_hit_tokens + space.part_hit_tokens,
            evicted_blocks=space.evicted_blocks,
            space=space,
            slots=slots,
        )

    @property
    def hit_rate(self) -> float:
        """The part of the prompt tokens that was found, 0 to 1."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
