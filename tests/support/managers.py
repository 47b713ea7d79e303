"""Managers of models whose layers keep states, by the options of their group and the manager's own."""

from typing import Any

from kvpage import BlockManager, States

OPTIONS = ("num_slots", "num_host_slots", "num_checkpoints", "checkpoint_every", "shares_answers")


def manager_of_states(num_blocks: int, block_size: int, *flags: bool, **options: Any) -> BlockManager:
    states = States(**{name: options.pop(name) for name in OPTIONS if name in options})
    return BlockManager(num_blocks, block_size, *flags, groups=[states], **options)
