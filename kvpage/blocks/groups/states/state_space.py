"""StateSpace: the state slots of both tiers, their checkpoints, and the moves between them. It knows no sequences.

    take()      free slot ◄── evict ◄── checkpoint ──► host slot ◄── evicted there, too
    find(match) the longest checkpoint that a prompt goes on from
    keep(slot)  a slot becomes a checkpoint

A slot has a tail block of each group with blocks: block `num_blocks + slot` of the device tier, and block
`num_host_blocks + slot` of the host tier. It belongs to no pool. What happens to the slot happens to its tail
blocks, by ordinary moves of blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpage._C import BlockPool
from kvpage.blocks.groups.states.anchors import Anchors
from kvpage.blocks.groups.states.checkpoint import PER_USE, Anchor, Checkpoint, MarkKind, Prefix, UseRate
from kvpage.blocks.groups.states.evicted import EvictedCheckpoints
from kvpage.blocks.groups.states.slot_tier import SlotTier, rank_of
from kvpage.blocks.moves import BlockMoves, Kind
from kvpage.blocks.sequence_state import Ids, PathIds
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.stats import SlotStats
from kvpage.checks.errors import OutOfSlots
from kvpage.checks.values import check_at_least, check_flag

MOST_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class States:
    """The group of layers that keep a state: its slots, of sequences and of checkpoints.

    Slot i has a tail block for the K and V after its last whole block: block num_blocks + i. So each cache of blocks
    needs num_blocks + num_slots blocks on the device, and num_host_blocks + num_host_slots on the host.

    Args:
        num_slots: State slots of the device tier.
        num_host_slots: State slots of the host tier.
        num_checkpoints: How many slots of the device are checkpoints at most; None for all that sequences leave.
        checkpoint_every: A checkpoint is taken each time that many tokens of a prompt are computed, as far as slots are
            free; None for no such checkpoints.
        shares_answers: Whether generated tokens leave the K, V and states of the same prompt. Callers hide them if not.

    Raises:
        ValueError: A number is out of range.
        TypeError: An argument is of another type.
    """

    num_slots: int
    num_host_slots: int = 0
    num_checkpoints: int | None = None
    checkpoint_every: int | None = None
    shares_answers: bool = True

    def __post_init__(self) -> None:
        check_at_least("num_slots", self.num_slots, 1)
        check_at_least("num_host_slots", self.num_host_slots, 0)
        check_at_least("num_checkpoints", self.most_kept, 0)
        if self.checkpoint_every is not None:
            check_at_least("checkpoint_every", self.checkpoint_every, 1)
        check_flag("shares_answers", self.shares_answers)

    @property
    def most_kept(self) -> int:
        """How many slots of the device are checkpoints at most."""
        return self.num_slots if self.num_checkpoints is None else self.num_checkpoints


class TailOwner(Protocol):
    """Blocks of one group, beside which each slot has a tail block."""

    pool: BlockPool
    host_pool: BlockPool

    def add_move(self, kind: Kind, pairs: Iterable[tuple[int, int]]) -> None:
        """Add a move of independent pairs (from, to)."""


class StateSpace:
    """Slots and checkpoints of both tiers. Each method gives all or nothing. Not thread-safe."""

    def __init__(self, space: BlockSpace, options: States, tails: Sequence[TailOwner]) -> None:
        num_slots, num_host_slots = options.num_slots, options.num_host_slots
        for owner in tails:
            _check_most("num_blocks + num_slots", owner.pool.num_blocks + num_slots)
            _check_most("num_host_blocks + num_host_slots", owner.host_pool.num_blocks + num_host_slots)
        self.device, self.host = SlotTier(num_slots), SlotTier(num_host_slots)
        self._tails = tails
        self.moves = BlockMoves()
        self.counts = dict.fromkeys(("restored", "kept", "evicted", "demoted", "lost"), 0)
        self._space = space
        self.anchors = Anchors(space.most_companions)
        self._use_rates = {(kind, is_passed): UseRate() for kind in MarkKind for is_passed in (False, True)}
        self.evicted = EvictedCheckpoints()
        self._held: list[Checkpoint] = []  # by readers, once for each
        self._floor = 0  # what the last evicted checkpoint was worth
        self.most_kept = options.most_kept
        self.num_kept = 0  # device slots of checkpoints, also dropped ones that are read still, and of marks

    # --- slots ---

    def can_take(self, besides: Checkpoint | None = None) -> bool:
        """Return whether a device slot is free or can be had. besides: A checkpoint that is not to be evicted."""
        return self.device.num_free > 0 or self._victim(self.device, besides) is not None

    def take(self, besides: Checkpoint | None = None) -> int:
        """Take a device slot. Where none is free, a checkpoint other than `besides` is evicted.

        Raises:
            OutOfSlots: There is no such checkpoint.
        """
        if not self.device.num_free:
            self.drop_stale()
        if not self.device.num_free:
            self._evict_one(besides)
        return self.device.take()

    def take_for_mark(self, only_passed: bool) -> int | None:
        """Take a device slot that is to be a checkpoint; None where there is none within their budget.

        only_passed: Whether none is to be evicted for it that still helps.
        """
        if not self._has_room:
            self.drop_stale()
        if not self._has_room:
            victim = self._victim(self.device)
            if victim is None or (only_passed and not victim.is_passed_by):
                return None
            self._evict(victim)
        self.num_kept += 1
        return self.device.take()

    def give_up_mark(self, slot: int) -> None:
        """Free a slot of `take_for_mark` that was not filled."""
        self.num_kept -= 1
        self.device.release(slot)

    def can_take_host(self) -> bool:
        """Return whether a host slot is free or can be had."""
        return self.host.num_free > 0 or self._victim(self.host) is not None

    def take_host(self, besides: Checkpoint | None = None) -> int:
        """Do the same in the host tier. Raise as `take` does."""
        if not self.host.num_free:
            self.drop_stale()
        if not self.host.num_free:
            victim = self._victim(self.host, besides)
            if victim is None:
                raise OutOfSlots(1, 0)
            self._drop_for_room(victim)
        return self.host.take()

    def add_move(self, kind: Kind, from_slot: int, to_slot: int) -> None:
        """Add a move of a state."""
        self.moves.add(kind, [(from_slot, to_slot)])

    # --- checkpoints ---

    def all_of(self, ids: PathIds, tokens: Ids, namespace: bytes, most: int) -> Iterator[Checkpoint]:
        """Yield the longest checkpoint on each block of a prompt's cached prefix, the longest first."""
        size = self._space.block_size
        for anchor in self.anchors.on_path(ids[:, : most // size]):
            if (checkpoint := anchor.longest(tokens, size, most)) is not None:
                yield checkpoint
        root = self.anchors.root(namespace)
        if root is not None and (checkpoint := root.longest(tokens, size, most)) is not None:
            yield checkpoint

    def each_of(self, ids: PathIds, tokens: Ids, namespace: bytes) -> Iterator[Checkpoint]:
        """Yield every checkpoint on a prompt's cached prefix, in no order. ids: The tree's ids of the prefix."""
        size = self._space.block_size
        for anchor in (self.anchors.root(namespace), *self.anchors.on_path(ids)):
            for checkpoint in anchor.tails.values() if anchor is not None else ():
                if tokens[checkpoint.anchor.num_blocks * size : checkpoint.num_tokens].tobytes() == checkpoint.tail:
                    yield checkpoint

    def keep(
        self, slot: int, prefix: Prefix, parent: Checkpoint | None, is_mark: bool = False, goes_on: bool = False
    ) -> Checkpoint:
        """Make a device slot with the state after a prefix a checkpoint.

        Where there is one of this prefix already, the slot is freed, or takes the place of one on the host. Beyond the
        budget the checkpoint that is worth least is evicted, maybe the new one.

        Args:
            slot: The slot, which passes to the checkpoint.
            prefix: What it stands for. Its blocks are in the tree.
            parent: The checkpoint that the sequence had gone on from.
            is_mark: Whether the slot is of `take_for_mark`. Its tail is copied already.
            goes_on: Whether a sequence is about to go on from it: the others are evicted before it.
        """
        self.num_kept -= is_mark
        anchor = self.anchors.at(prefix.namespace, prefix.num_blocks, prefix.companion)
        checkpoint = anchor.tails.get(prefix.tail)
        if checkpoint is not None and not checkpoint.is_on_host:
            self.device.release(slot)
        else:
            if checkpoint is None:
                checkpoint = self._keep_new(slot, anchor, prefix, parent)
            else:
                checkpoint = self._bring_back(checkpoint, slot)
            if prefix.tail and not is_mark:
                self.copy_tail(prefix.tail_blocks, slot)
        self._refresh(checkpoint)
        if self.num_kept > self.most_kept:
            self.drop_stale()
        while self.num_kept > self.most_kept:
            self._evict_one(checkpoint if goes_on and self._victim(self.device, checkpoint) else None)
        return checkpoint

    def copy_tail(self, block_ids: Sequence[int], slot: int) -> None:
        """Copy the blocks of each group that hold a tail to a device slot's tail blocks."""
        for owner, block_id in zip(self._tails, block_ids, strict=True):
            owner.add_move("copy", [(block_id, owner.pool.num_blocks + slot)])

    def touch(self, checkpoint: Checkpoint) -> None:
        """Count a use of a checkpoint."""
        self._use_rates[checkpoint.kind, checkpoint.is_passed_by].count_use()
        checkpoint.num_uses += PER_USE
        self._refresh(checkpoint)

    def _refresh(self, checkpoint: Checkpoint) -> None:
        checkpoint.floor = self._floor
        self._tier(checkpoint).rank(checkpoint)

    def restore(self, checkpoint: Checkpoint, slot: int, block_ids: Sequence[int]) -> None:
        """Add the moves that copy a checkpoint to a sequence's slot, and its tail to a block of each group."""
        kind: Kind = "swap_in" if checkpoint.is_on_host else "copy"
        self.add_move(kind, checkpoint.slot, slot)
        self._restore_tail(checkpoint, block_ids)

    def take_over(self, checkpoint: Checkpoint, block_ids: Sequence[int]) -> int:
        """Evict a device checkpoint, and return its slot with the state in it."""
        self._restore_tail(checkpoint, block_ids)
        slot = checkpoint.slot
        self._evict(checkpoint)
        self.device.take_this(slot)
        return slot

    def tail_block(self, slot: int) -> int:
        """Return the id of a device slot's tail block, of the layers that attend to all tokens."""
        return self._space.pool.num_blocks + slot

    def hold(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint's slot and tail block as they are, until `let_go` as often."""
        self._tier(checkpoint).pool.share(checkpoint.slot)
        self._held.append(checkpoint)

    def let_go(self, checkpoint: Checkpoint) -> None:
        """End a `hold`. The slot of a checkpoint that was dropped meanwhile is free after the last."""
        self._held.remove(checkpoint)
        self._free(checkpoint)

    def is_held(self, checkpoint: Checkpoint) -> bool:
        """Return whether a reader holds the checkpoint's slot."""
        return self._tier(checkpoint).pool.ref_count(checkpoint.slot) > 1

    @property
    def read_slots(self) -> list[int]:
        """The device slots of checkpoints that are held, once for each reader."""
        return [checkpoint.slot for checkpoint in self._held]

    @property
    def held_slots(self) -> list[int]:
        """The device slots of checkpoints that are dropped, and held."""
        return sorted({checkpoint.slot for checkpoint in self._held if checkpoint.is_dropped})

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint. Its slot is free, unless it is held."""
        self._tier(checkpoint).forget(checkpoint)
        self._free(checkpoint)
        del checkpoint.anchor.tails[checkpoint.tail]
        if not checkpoint.anchor.tails:
            self.anchors.remove(checkpoint.anchor)
        checkpoint.is_dropped, changed = True, [*checkpoint.children]
        if checkpoint.parent is not None:
            changed.append(checkpoint.parent)
        checkpoint.leave()
        for neighbour in changed:
            self._tier(neighbour).rank(neighbour)

    def drop_stale(self) -> None:
        """Forget the checkpoints whose K and V are gone."""
        self._space.bury_companions()

    # --- the tree's blocks ---

    def blocks_gone(self, companions: Sequence[int]) -> None:
        """Forget the checkpoints on blocks that are gone, also those that were evicted."""
        for anchor in self.anchors.of(companions):
            for checkpoint in list(anchor.tails.values()):
                self.counts["lost"] += 1
                self.drop(checkpoint)
        self.evicted.blocks_gone(frozenset(companions))

    def blocks_dropped(self, tokens: Ids, namespace: bytes) -> None:
        """Forget the checkpoints of tokens whose blocks were dropped, where no other prompt shares them."""
        self.drop_stale()
        match = self._space.tree.match(tokens, namespace, num_left_over=0, is_hit=False)
        try:
            anchor, num_tokens = self.anchors.last(match.tier_block_ids(), namespace), match.num_tokens
        finally:
            self._space.tree.release(match)
        rest = tokens[num_tokens : num_tokens + self._space.block_size].tobytes()
        for tail, checkpoint in list(anchor.tails.items() if anchor else ()):
            if tail and rest.startswith(tail):
                self.drop(checkpoint)

    def blocks_cleared(self) -> None:
        """Forget all checkpoints, also those that were evicted. Those whose K and V are gone already are lost."""
        self.drop_stale()
        self.evicted.clear()
        for tier in (self.device, self.host):
            for checkpoint in list(tier.checkpoints):
                if checkpoint is not None:
                    self.drop(checkpoint)

    def stats(self) -> SlotStats:
        """Return the counters, and the slots of both tiers now. Nothing is changed: any thread may ask.

        Numbers are read one after another. Each is within its range, also where slots change meanwhile.
        """
        device, host = self.device, self.host
        anchors = self.anchors.of(self._space.tree.dead_companions())
        stale = [checkpoint for anchor in anchors for checkpoint in list(anchor.tails.values())]
        num_host = sum(checkpoint.is_on_host for checkpoint in stale)
        num_device = len(stale) - num_host
        return SlotStats(
            num_slots=device.num_slots,
            num_free_slots=min(device.num_free + num_device, device.num_slots),
            num_checkpoints=max(device.num_checkpoints - num_device, 0),
            num_host_slots=host.num_slots,
            num_free_host_slots=min(host.num_free + num_host, host.num_slots),
            num_host_checkpoints=max(host.num_checkpoints - num_host, 0),
            **{**self.counts, "lost": self.counts["lost"] + len(stale)},
        )

    # --- inside ---

    def _tier(self, checkpoint: Checkpoint) -> SlotTier:
        return self.host if checkpoint.is_on_host else self.device

    def _keep_new(self, slot: int, anchor: Anchor, prefix: Prefix, parent: Checkpoint | None) -> Checkpoint:
        made = Checkpoint(anchor, prefix.tail, prefix.num_tokens, slot, prefix.kind, prefix.priority)
        made.num_uses = self._use_rates[made.kind, False].count_one()
        anchor.tails[prefix.tail] = made
        self.device.keep(made)
        self.num_kept += 1
        self.counts["kept"] += 1
        if parent is not None and not parent.is_dropped:
            made.go_on_from(parent)
            if parent.is_passed_by:
                parent.num_uses = self._use_rates[parent.kind, True].count_one()
            self._tier(parent).rank(parent)
        return made

    def _bring_back(self, checkpoint: Checkpoint, slot: int) -> Checkpoint:
        """Let a host checkpoint have a device slot in place of its own."""
        self.host.forget(checkpoint)
        self.host.release(checkpoint.slot)
        checkpoint.slot, checkpoint.is_on_host = slot, False
        self.device.keep(checkpoint)
        self.num_kept += 1
        return checkpoint

    def _free(self, checkpoint: Checkpoint) -> None:
        """End a reference to a checkpoint's slot: its tier's, which has forgotten it, or a reader's."""
        pool = self._tier(checkpoint).pool
        pool.release(checkpoint.slot)
        if not checkpoint.is_on_host and not pool.ref_count(checkpoint.slot):
            self.num_kept -= 1

    @property
    def _has_room(self) -> bool:
        """Whether a slot is free, and one more may be kept."""
        return self.num_kept < self.most_kept and self.device.num_free > 0

    def _restore_tail(self, checkpoint: Checkpoint, block_ids: Sequence[int]) -> None:
        slot = checkpoint.slot
        for owner, block_id in zip(self._tails, block_ids, strict=True) if checkpoint.tail else ():
            if checkpoint.is_on_host:
                owner.add_move("swap_in", [(owner.host_pool.num_blocks + slot, block_id)])
            else:
                owner.add_move("copy", [(owner.pool.num_blocks + slot, block_id)])

    def _victim(self, tier: SlotTier, besides: Checkpoint | None = None) -> Checkpoint | None:
        """Return the checkpoint to evict first. Those on a prefix that a user has pinned come last."""
        slot = besides.slot if besides is not None and self._tier(besides) is tier else None
        return tier.victim(slot, self._kept_slots(tier) if len(self._space.pins) else ())

    def _kept_slots(self, tier: SlotTier) -> list[int]:
        matches = self._space.pins.matches
        anchors = {anchor for match in matches for anchor in self.anchors.on_path(match.tier_block_ids())}
        return [
            checkpoint.slot
            for anchor in anchors
            for checkpoint in anchor.tails.values()
            if self._tier(checkpoint) is tier
        ]

    def _evict_one(self, besides: Checkpoint | None = None) -> None:
        victim = self._victim(self.device, besides)
        if victim is None:
            raise OutOfSlots(1, 0)
        self._evict(victim, besides)

    def _evict(self, checkpoint: Checkpoint, besides: Checkpoint | None = None) -> None:
        """Free the slot of a device checkpoint. It goes to the host where that has a slot for it."""
        self._floor = max(self._floor, checkpoint.worth)
        self.counts["evicted"] += 1
        if not self._may_demote(checkpoint, besides):
            self._drop_for_room(checkpoint)
            return
        slot, host_slot = checkpoint.slot, self.take_host(besides)
        self.add_move("swap_out", slot, host_slot)
        for owner in self._tails if checkpoint.tail else ():
            owner.add_move("swap_out", [(owner.pool.num_blocks + slot, owner.host_pool.num_blocks + host_slot)])
        self.device.forget(checkpoint)
        self._free(checkpoint)
        checkpoint.slot, checkpoint.is_on_host = host_slot, True
        self.host.keep(checkpoint)
        self.counts["demoted"] += 1

    def _drop_for_room(self, checkpoint: Checkpoint) -> None:
        self.evicted.add(checkpoint)
        self.drop(checkpoint)

    def _may_demote(self, checkpoint: Checkpoint, besides: Checkpoint | None) -> bool:
        """Return whether the host has a slot for a checkpoint: a free one, or one that is worth less."""
        if self.host.num_free:
            return True
        victim = self._victim(self.host, besides)
        return victim is not None and rank_of(victim) < rank_of(checkpoint)


def _check_most(name: str, num_blocks: int) -> None:
    """Raise ValueError unless the ids of `num_blocks` blocks, the tail blocks included, fit into the tables."""
    if num_blocks > MOST_BLOCKS:
        raise ValueError(f"{name} must be at most {MOST_BLOCKS}, got {num_blocks}")
