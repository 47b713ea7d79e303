"""BlockConfig: the options of a BlockManager, as the parts of an engine or of a pool hand them on."""

from dataclasses import dataclass
from typing import Any

from kvpage._C import eviction_policies
from kvpage.checks.values import as_integer, check_at_least, check_flag
from kvpage.layout.config import CacheConfig

EVICTIONS = eviction_policies()
"""The policies of eviction: of both tiers of blocks, and of a store's tiers."""


def check_eviction(eviction: object) -> None:
    """Raise ValueError unless it names a policy of eviction."""
    if eviction not in EVICTIONS:
        raise ValueError(f"eviction must be one of {', '.join(EVICTIONS)}, got {eviction!r}")


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """The time at which a cached block gets its copy on the host.

    Attributes:
        after_hits: None: when it is evicted from the device. 0: as soon as it is cached. n: when n requests have found
            it. An early copy costs a transfer that may never be needed, and makes a later eviction free.

    Raises:
        ValueError: after_hits is neither None nor an integer of at least 0.
    """

    after_hits: int | None = None

    def __post_init__(self) -> None:
        hits = self.after_hits
        if hits is not None and (isinstance(hits, bool) or not isinstance(hits, int) or hits < 0):
            raise ValueError(f"after_hits must be None or an integer of at least 0, got {hits!r}")


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The options of a BlockManager. It checks itself.

    Attributes:
        num_blocks: Blocks of the device tier.
        block_size: Tokens of a block.
        enable_prefix_caching: Whether sequences share blocks. Without it every sequence has blocks of its own.
        num_host_blocks: Blocks of the host tier.
        share_parts: Whether a new sequence also gets a copy of the longest part of the next block that a cached block
            shares.
        host_policy: When cached blocks are copied to the host; None for HostPolicy's own rule.
        pin_quota: How many blocks `space.pin` may keep.
        eviction: Which cached blocks go first where room is needed, in both tiers: one of EVICTIONS. See the page
            on serving.

    Raises:
        ValueError: A number is out of range, or eviction is none of these.
        TypeError: An option is of another type.
    """

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0
    share_parts: bool = True
    host_policy: HostPolicy | None = None
    pin_quota: int = 0
    eviction: str = "lru"

    @classmethod
    def of_cache(cls, cache: CacheConfig, **options: Any) -> "BlockConfig":
        """Return the options of a manager that gives out the blocks of a cache.

        Args:
            cache: The cache's config, with the block size and the numbers of blocks.
            options: The other options, by name.

        Raises:
            ValueError: As for the class.
            TypeError: `cache` is no CacheConfig, or as for the class.
        """
        if not isinstance(cache, CacheConfig):
            raise TypeError(f"cache must be a CacheConfig, got {type(cache).__name__}")
        return cls(cache.num_gpu_blocks, cache.block_size, num_host_blocks=cache.num_cpu_blocks, **options)

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 0), ("block_size", 1), ("num_host_blocks", 0)):
            if as_integer(name, getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        check_flag("share_parts", self.share_parts)
        if self.host_policy is not None and not isinstance(self.host_policy, HostPolicy):
            raise TypeError(f"host_policy must be a HostPolicy, got {type(self.host_policy).__name__}")
        check_at_least("pin_quota", self.pin_quota, 0)
        check_eviction(self.eviction)
