"""HybridReplay: a replay for a model with states. Requests begin where there are K and V, and a checkpoint.

    match ─► the longest checkpoint in it ─► restore ─► compute, with checkpoints on the way ─► commit ─► release

A trace names blocks, not tokens. So states are kept at ends of blocks, and a prompt is seen to diverge there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvpage._C import BlockPool, PrefixTree
from kvpage.blocks.config import HostPolicy
from kvpage.blocks.groups.states.state_group import StateGroup
from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import BlockMove
from kvpage.tools.replay import Replay, ReplayConfig, ReplayReport, Served


class HybridReplay(Replay):
    """Both tiers, with blocks and state slots, that requests fill, and the counts.

    Args:
        config: The simulated machine. It has state slots.
    """

    manager: BlockManager
    states: StateGroup

    def finish(self) -> ReplayReport:
        """Return the counts."""
        stats = self.manager.stats()
        slots, space = stats.slots, stats.space
        assert slots is not None
        self.report = replace(
            super().finish(),
            kept_states=slots.kept,
            restored_states=slots.restored,
            evicted_states=slots.evicted,
            lost_states=slots.lost,
            evicted_blocks=space.evicted_blocks,
            demoted_blocks=space.demoted_blocks,
        )
        return self.report

    def _tiers(self) -> tuple[BlockPool, BlockPool | None, PrefixTree]:
        config = self.config
        interval = config.checkpoint_every
        states = States(
            config.state_slots, config.host_state_slots, checkpoint_every=interval and interval // config.block_size
        )
        self.manager = BlockManager(
            config.device_blocks,
            1,
            num_host_blocks=config.host_blocks,
            host_policy=HostPolicy(0 if config.policy == "at_once" else None),
            groups=[states],
        )
        assert self.manager.states is not None
        self.states = self.manager.states
        space = self.manager.space
        return space.pool, space.host_pool if config.host_blocks else None, space.tree

    def _serve(self, keys: npt.NDArray[np.int32], stop: int, num_blocks: int) -> Served:
        if not len(keys):
            return Served()
        manager, num_keys, num_host = self.manager, len(keys), self.tree.num_host_cached
        num_kv = min(self.tree.look(keys)[1], stop)
        num_cached = manager.allocate(0, keys, num_left_over=num_keys - stop).num_cached_tokens
        manager.append([0], num_blocks - num_keys)
        self.states.reserve(0, num_cached, num_keys)
        blocks, states = self._move()
        manager.commit(0, keys[num_cached:])
        manager.keep(0)
        manager.release(0)
        num_written = self._move()[0]["swap_out"]
        stored = blocks["swap_out"] + num_written
        num_lost = num_host + stored - self.tree.num_host_cached
        num_loaded, num_states = blocks["swap_in"], (states["swap_in"], states["swap_out"])
        return Served(num_cached - num_loaded, num_loaded, stored, *num_states, num_kv, num_lost)

    def _move(self) -> tuple[dict[str, int], dict[str, int]]:
        """Make all moves, of which there are only the numbers: of blocks and of states, by kind."""
        counts = [dict.fromkeys(("copy", "swap_out", "swap_in"), 0) for _ in range(2)]

        def count(of: dict[str, int], move: BlockMove) -> None:
            of[move.kind] += len(move.pairs)

        self.manager.do_moves(lambda move: count(counts[0], move))
        self.states.do_moves(lambda move: count(counts[1], move))
        return counts[0], counts[1]


def replay_of(config: ReplayConfig) -> Replay:
    """Return the replay for a machine: with state slots, or for attention alone.

    Args:
        config: The simulated machine.
    """
    return HybridReplay(config) if config.state_slots else Replay(config)
