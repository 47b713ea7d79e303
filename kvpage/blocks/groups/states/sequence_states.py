"""SequenceStates: the working slot of every sequence, and the slots that its marks have reserved.

reserve(start, end) ─► the step writes these slots ─► keep: they become checkpoints
                                                  └─► give_up: they are free
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpage.blocks.groups.states.checkpoint import Checkpoint, MarkKind, Prefix
from kvpage.blocks.groups.states.marks import Mark
from kvpage.blocks.groups.states.slot_tier import SlotTier
from kvpage.blocks.groups.states.state_space import StateSpace
from kvpage.blocks.sequence_state import NO_BLOCK, Ids, SeqId
from kvpage.blocks.sequences.sequences import Sequences


@dataclass(eq=False, slots=True)
class RunningState:
    """The state of one sequence.

    Attributes:
        slot: Its working slot: of the device, or of the host while it is swapped out. None once a checkpoint has it.
        priority: 0 to 7, for its checkpoints.
        last: The last checkpoint that it has gone through.
        marks: Those that it has not passed yet, by position.
        reserved: Device slots for the marks of the portion that is computed now, by position.
        is_on_host: Whether it is swapped out.
        is_spoiled: Whether a failed step may have written the slot.
        prompt: The tokens that it began with, as they were announced.
    """

    slot: int | None
    priority: int = 0
    last: Checkpoint | None = None
    marks: dict[int, Mark] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    is_on_host: bool = False
    is_spoiled: bool = False
    prompt: Ids = field(default_factory=lambda: np.empty(0, np.int32))


class SequenceStates:
    """States of sequences by id, those that are swapped out included. Not thread-safe."""

    def __init__(
        self,
        states: StateSpace,
        sequences: Sequences,
        is_caching: bool,
        blocks_at: Callable[[SeqId, int], Sequence[int]],
    ) -> None:
        self.running: dict[SeqId, RunningState] = {}
        self._states = states
        self._sequences = sequences
        self._is_caching = is_caching
        self._blocks_at = blocks_at

    def add(
        self, seq_id: SeqId, slot: int, priority: int, last: Checkpoint | None, marks: dict[int, Mark], prompt: Ids
    ) -> None:
        """Note the slot that a new sequence has."""
        self.running[seq_id] = RunningState(slot, priority, last, marks, prompt=prompt)

    def slot(self, verb: str, seq_id: SeqId) -> int:
        """Return the device slot with the sequence's state.

        Raises:
            ValueError: The state is gone, or may be spoiled. The error names the verb.
        """
        self._sequences.on_device[seq_id]  # KeyError
        running = self.running[seq_id]
        if running.slot is None or running.is_spoiled:
            why = "a failed step may have spoiled it" if running.is_spoiled else "a checkpoint has its slot"
            raise ValueError(f"{verb} needs the state of {seq_id!r}, but {why}")
        return running.slot

    def reserve(self, seq_id: SeqId, start: int, end: int) -> list[tuple[int, int]]:
        """Reserve slots for the marks in (start, end], those that matter most first; return (position, slot) each.

        Prompts that begin alike and come together have the same marks. One slot is enough for a step.
        """
        running = self.running[seq_id]
        marks = [mark for mark in running.marks.values() if start < mark.num_tokens <= end]
        marks = [mark for mark in marks if not self._is_kept_by_another(seq_id, mark.num_tokens)]
        for mark in sorted(marks, key=lambda mark: (mark.kind, -mark.num_tokens)):
            # A regular mark takes only a slot that is free, or of no more help.
            is_reserved = mark.num_tokens in running.reserved
            slot = None if is_reserved else self._states.take_for_mark(only_passed=mark.kind is MarkKind.REGULAR)
            if slot is not None:
                running.reserved[mark.num_tokens] = slot
                running.marks[mark.num_tokens] = mark._replace(tail=None)
        return sorted(item for item in running.reserved.items() if start < item[0] <= end)

    def mark(self, seq_id: SeqId, position: int) -> None:
        """Mark one more position, where a prompt parts from this one."""
        marks = self.running[seq_id].marks
        mark = marks.get(position, Mark(position, MarkKind.SPLIT))
        marks[position] = mark._replace(kind=min(mark.kind, MarkKind.SPLIT))

    def tails(self, seq_id: SeqId, tokens: Ids) -> dict[int, bytes]:
        """Return the tails, by position, of the reserved marks that a commit of these tokens passes."""
        reserved = self.running[seq_id].reserved
        if not reserved:  # as in most commits
            return {}
        seq, size = self._sequences.state(seq_id), self._sequences.block_size
        begin = seq.num_written - len(seq.pending)
        known = np.concatenate([seq.pending, tokens])
        end = begin + len(known)
        passed = [position for position in reserved if seq.num_written < position <= end]
        return {position: known[position - position % size - begin : position - begin].tobytes() for position in passed}

    def set_tails(self, seq_id: SeqId, tails: dict[int, bytes]) -> None:
        """Note the tails of marks whose tokens are committed now, and copy their K and V while all blocks are there.

        A mark whose tail a window has not got, as after a load of the last window alone, stays without one.
        """
        running = self.running[seq_id]
        for position, tail in tails.items():
            blocks = self._blocks_at(seq_id, position // self._sequences.block_size) if tail else ()
            if NO_BLOCK in blocks:
                continue
            running.marks[position] = running.marks[position]._replace(tail=tail)
            if tail:
                self._states.copy_tail(blocks, running.reserved[position])

    def keep(self, seq_id: SeqId) -> None:
        """Make the reserved slots checkpoints, as far as their positions are committed. The others are free."""
        self._sequences.on_device[seq_id]  # KeyError
        running = self.running[seq_id]
        num_written = self._sequences.num_written(seq_id) if running.reserved else 0
        for position, slot in sorted(running.reserved.items()):
            del running.reserved[position]
            is_known = running.marks[position].tail is not None  # committed by rows alone, it is not
            if is_known and position <= num_written and self._can_keep(seq_id, position):
                self._keep(seq_id, slot, running.marks.pop(position), is_mark=True)
            else:
                self._states.give_up_mark(slot)

    def keep_end(self, seq_id: SeqId, goes_on: bool = False) -> bool:
        """Make the working slot a checkpoint at the committed tokens; return whether that could be done.

        goes_on: Whether a sequence is about to go on from there.
        """
        seq, running = self._sequences.state(seq_id), self.running[seq_id]
        self.free_reserved(running)
        if running.slot is None or running.is_spoiled or not self._can_keep(seq_id, seq.num_written):
            return False
        slot, running.slot = running.slot, None
        mark = Mark(seq.num_written, MarkKind.ANSWER, seq.pending.tobytes())
        return not self._keep(seq_id, slot, mark, goes_on=goes_on).is_dropped

    def give_up(self, seq_id: SeqId) -> None:
        """Free the reserved slots, and note that the state may be spoiled."""
        self._sequences.on_device[seq_id]  # KeyError
        self.free_reserved(self.running[seq_id])
        self.running[seq_id].is_spoiled = True

    def remove(self, seq_id: SeqId) -> None:
        """Free all slots of a sequence, and forget it."""
        running = self.running.pop(seq_id)
        self.free_reserved(running)
        self.free(running)

    def move(self, seq_id: SeqId, slot: int, on_host: bool) -> None:
        """Move the state to a slot of the other tier."""
        running = self.running[seq_id]
        if running.slot is not None:
            self._states.add_move("swap_out" if on_host else "swap_in", running.slot, slot)
        self.replace(seq_id, slot, on_host)

    def replace(self, seq_id: SeqId, slot: int, on_host: bool) -> None:
        """Give a sequence another slot for its own."""
        running = self.running[seq_id]
        self.free_reserved(running)
        self.free(running)
        running.slot, running.is_on_host = slot, on_host

    def free(self, running: RunningState) -> None:
        """Free a sequence's own slot."""
        if running.slot is not None:
            (self._states.host if running.is_on_host else self._states.device).release(running.slot)
        running.slot = None

    def free_reserved(self, running: RunningState) -> None:
        """Free the slots of a sequence's marks."""
        for slot in running.reserved.values():
            self._states.give_up_mark(slot)
        running.reserved.clear()

    def check(self) -> None:
        """Raise RuntimeError, with the numbers, unless every slot has one owner, and every checkpoint its place."""
        running, states, sequences = self.running, self._states, self._sequences
        ids = {*sequences.on_device, *sequences.swapped}
        if set(running) != ids:
            raise RuntimeError(f"states are of {sorted(map(repr, running))}, sequences are {sorted(map(repr, ids))}")
        for seq_id, run in running.items():
            if run.slot is not None and run.is_on_host != (seq_id in sequences.swapped):
                raise RuntimeError(f"the state of {seq_id!r} is in another tier than its sequence")
        device_slots = [slot for run in running.values() for slot in run.reserved.values()]
        num_marks, host_slots = len(device_slots), list[int]()
        for run in running.values():
            if run.slot is not None:
                (host_slots if run.is_on_host else device_slots).append(run.slot)
        _check_tier("device", states.device, [*device_slots, *states.read_slots])
        _check_tier("host", states.host, host_slots)
        num_kept = states.device.num_checkpoints + len(states.held_slots) + num_marks
        if num_kept != states.num_kept or num_kept > states.most_kept:
            raise RuntimeError(
                f"{num_kept} slots are kept, of {states.num_kept} that count and {states.most_kept} at most"
            )
        _check_checkpoints(states)

    # --- inside ---

    def _is_kept_by_another(self, seq_id: SeqId, position: int) -> bool:
        """Return whether a sequence with the same prefix, of at least this priority, has a slot for the position."""
        running = self.running[seq_id]
        prefix = running.prompt[:position]
        return len(prefix) == position and any(
            np.array_equal(other.prompt[:position], prefix) and self._shares(seq_id, other_id)
            for other_id, other in self.running.items()
            if position in other.reserved and other_id != seq_id and other.priority >= running.priority
        )

    def _shares(self, seq_id: SeqId, other_id: SeqId) -> bool:
        seq, other = self._sequences.state(seq_id), self._sequences.state(other_id)
        return seq.namespace == other.namespace and not other.is_private

    def _can_keep(self, seq_id: SeqId, position: int) -> bool:
        """Return whether others may find a state of the sequence: the blocks before it are in the tree."""
        seq = self._sequences.state(seq_id)
        is_shared = self._is_caching and not seq.is_private
        return is_shared and position > 0 and position // self._sequences.block_size <= seq.num_cached_blocks

    def _keep(self, seq_id: SeqId, slot: int, mark: Mark, is_mark: bool = False, goes_on: bool = False) -> Checkpoint:
        running = self.running[seq_id]
        checkpoint = self._states.keep(slot, self._prefix(seq_id, mark), running.last, is_mark, goes_on)
        if not checkpoint.is_dropped:
            running.last = checkpoint
        return checkpoint

    def _prefix(self, seq_id: SeqId, mark: Mark) -> Prefix:
        assert mark.tail is not None, "its tokens are committed"
        num_blocks = mark.num_tokens // self._sequences.block_size
        return Prefix(
            namespace=self._sequences.state(seq_id).namespace,
            num_tokens=mark.num_tokens,
            num_blocks=num_blocks,
            tail=mark.tail,
            tail_blocks=self._blocks_at(seq_id, num_blocks) if mark.tail else (),
            companion=self._sequences.companion(seq_id, num_blocks - 1) if num_blocks else NO_BLOCK,
            kind=mark.kind,
            priority=self.running[seq_id].priority,
        )


def _check_tier(name: str, tier: SlotTier, held_slots: list[int]) -> None:
    checkpoint_slots = [slot for slot, checkpoint in enumerate(tier.checkpoints) if checkpoint is not None]
    try:
        tier.pool.check([*held_slots, *checkpoint_slots])
    except RuntimeError as error:
        raise RuntimeError(f"{name} slots: {error}") from error
    if tier.num_checkpoints != len(checkpoint_slots):
        raise RuntimeError(f"{tier.num_checkpoints} {name} slots have a rank, {len(checkpoint_slots)} are checkpoints")


def _check_checkpoints(states: StateSpace) -> None:
    by_anchor = {id(checkpoint) for anchor in states.anchors for checkpoint in anchor.tails.values()}
    for tier in (states.device, states.host):
        for slot, checkpoint in enumerate(tier.checkpoints):
            if checkpoint is None:
                continue
            if checkpoint.slot != slot or checkpoint.is_on_host != (tier is states.host) or checkpoint.is_dropped:
                raise RuntimeError(f"the checkpoint in slot {slot} is of slot {checkpoint.slot}")
            if id(checkpoint) not in by_anchor:
                raise RuntimeError(f"the checkpoint in slot {slot} cannot be found")
            if checkpoint.parent is not None and checkpoint not in checkpoint.parent.children:
                raise RuntimeError(f"the checkpoint in slot {slot} is no child of its parent")
    if len(by_anchor) != states.device.num_checkpoints + states.host.num_checkpoints:
        raise RuntimeError(f"{len(by_anchor)} checkpoints can be found, not all of them in slots")
