"""RankCaches: the caches of one rank, one for each group: of the full layers, of each window, of states.

group    0             1, 2, ...         the last one, where there are states
         full layers   each window       states
holds    blocks        blocks            slots
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpage.blocks.moves import BlockMove
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.ops.args.bound_cache import AttentionOfOthers
from kvpage.ops.cuda.attention import takes_plans
from kvpage.serving.loop.ranks.step_plan import StepPlan
from kvpage.serving.model.states.state_pass import StatePass
from kvpage.serving.model.step import Step

PAD_STATE = -1
"""The slot of a sequence that belongs to nobody: its state is thrown away."""


@dataclass(frozen=True, slots=True)
class RankCaches:
    """The caches of one rank, which its steps compute over.

    full: of the layers that attend to all tokens. windows: of each window with blocks of its own.
    states: the slots of a model that keeps states; None for another.
    """

    full: CacheEngine
    windows: Sequence[CacheEngine] = ()
    states: StateCache | None = None

    @property
    def groups(self) -> list[CacheEngine | StateCache]:
        """The caches, by the number of their group."""
        return [self.full, *self.windows, *([] if self.states is None else [self.states])]

    @property
    def have_blocks(self) -> bool:
        """Whether a layer attends over blocks."""
        return any(cache.layer_ids for cache in (self.full, *self.windows))

    @property
    def library(self) -> AttentionOfOthers | None:
        """The library that attends over the full layers; None where kvpage's kernels do."""
        layer = next(iter(self.full.bound_layers.values()), None)
        return None if layer is None else layer.library

    @property
    def take_plans(self) -> bool:
        """Whether attention over all blocks takes plans of shared prefixes."""
        layers = [layer for cache in (self.full, *self.windows) for layer in cache.bound_layers.values()]
        return bool(self.full.layer_ids) and all(map(takes_plans, layers))

    @property
    def pad_state(self) -> int:
        """The slot that padding computes with: the last one, which the manager gives to nobody; 0 without states."""
        return 0 if self.states is None else self.states.num_slots - 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All device memory."""
        blocks = [cache.tensor for engine in (self.full, *self.windows) for cache in engine.bound_caches]
        return blocks if self.states is None else [*blocks, self.states.slots]

    def do_move(self, group: int, move: BlockMove) -> None:
        """Make a move of one group. ValueError for a group that is not there, or as the group's cache raises."""
        groups = self.groups
        if not 0 <= group < len(groups):
            raise ValueError(f"group must be in [0, {len(groups)}), got {group}")
        groups[group].do_move(move)

    def step(self, plan: StepPlan) -> Step:
        """Return a step over these caches. ValueError for a plan of other groups, or of slots out of range."""
        num_groups, packed = 1 + len(self.windows), plan.packed
        if len(plan.blocks) != num_groups or bool(plan.states) != (self.states is not None):
            groups = f"{len(plan.blocks)} with blocks and {len(plan.states)} states"
            raise ValueError(f"groups of a step must be those of the caches, {len(self.groups)}, got {groups}")
        step = Step.make(self.full, *plan.blocks[0], packed.starts, packed.ends, packed)
        for cache, blocks in zip(self.windows, plan.blocks[1:], strict=True):
            step.use_window(Step.make(cache, *blocks, packed.starts, packed.ends))
        step.use_states(self._pass_of(plan))
        return step

    def _pass_of(self, plan: StepPlan) -> StatePass | None:
        """Return the states of a step; those of padding are made for it. None for a model without states."""
        states, rows = self.states, plan.states
        if states is None:
            return None
        if all(row.slot == PAD_STATE for row in rows):
            states = StateCache(states.layout, len(rows), device=states.device)
            rows = [row._replace(slot=slot) for slot, row in enumerate(rows)]
        return StatePass(states, rows)
