"""The budget of state slots: how many there are, and the blocks that each cache of blocks has for their tails."""

from dataclasses import replace

from kvpage.blocks.groups.states.state_space import States
from kvpage.layout.config import CacheConfig


def slots_within(field: str, num_bytes: int, slot_bytes: int, least: int = 0) -> int:
    """Return how many slots fit into num_bytes. ValueError for less than one slot, and more than none.

    field: of StateConfig. slot_bytes: of a state and its tail. least: slots that there must be.
    """
    num_slots = num_bytes // slot_bytes
    if num_slots < least or (num_bytes and not num_slots):
        others = "" if least else "0, or "
        raise ValueError(f"{field} must be {others}{slot_bytes} or more, a state and its tail, got {num_bytes}")
    return num_slots


def with_tails(cache: CacheConfig, slots: States | None) -> CacheConfig:
    """Return the config of a cache that has the tail blocks, too, after the blocks of each tier."""
    if slots is None:
        return cache
    num_blocks, num_host_blocks = cache.num_gpu_blocks + slots.num_slots, cache.num_cpu_blocks + slots.num_host_slots
    return replace(cache, num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks)
