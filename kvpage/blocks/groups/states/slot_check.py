"""check_slots: that every state slot has one owner, and every checkpoint its place. For tests."""

from collections.abc import Mapping

from kvpage.blocks.groups.states.sequence_states import RunningState
from kvpage.blocks.groups.states.slot_tier import SlotTier
from kvpage.blocks.groups.states.state_space import StateSpace
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.blocks.states import SeqId


def check_slots(states: StateSpace, running: Mapping[SeqId, RunningState], sequences: Sequences) -> None:
    """Raise RuntimeError, with the numbers, if an invariant is broken."""
    ids = {*sequences.on_device, *sequences.swapped}
    if set(running) != ids:
        raise RuntimeError(f"states are of {sorted(map(repr, running))}, sequences are {sorted(map(repr, ids))}")
    for seq_id, one in running.items():
        if one.slot is not None and one.is_on_host != (seq_id in sequences.swapped):
            raise RuntimeError(f"the state of {seq_id!r} is in another tier than its sequence")
    held = [slot for one in running.values() for slot in one.reserved.values()]
    num_marks, held_on_host = len(held), list[int]()
    for one in running.values():
        if one.slot is not None:
            (held_on_host if one.is_on_host else held).append(one.slot)
    _check_tier("device", states.device, [*held, *states.read_slots])
    _check_tier("host", states.host, held_on_host)
    num_kept = states.device.num_checkpoints + len(states.held_slots) + num_marks
    if num_kept != states.num_kept or num_kept > states.most_kept:
        raise RuntimeError(f"{num_kept} slots are kept, of {states.num_kept} that count and {states.most_kept} at most")
    _check_checkpoints(states)


def _check_tier(name: str, tier: SlotTier, held: list[int]) -> None:
    kept = [slot for slot, checkpoint in enumerate(tier.checkpoints) if checkpoint is not None]
    try:
        tier.pool.check([*held, *kept])
    except RuntimeError as error:
        raise RuntimeError(f"{name} slots: {error}") from error
    if tier.num_checkpoints != len(kept):
        raise RuntimeError(f"{tier.num_checkpoints} {name} slots have a rank, {len(kept)} are checkpoints")


def _check_checkpoints(states: StateSpace) -> None:
    states.anchors.table.check()
    found = {id(one) for anchor in states.anchors for one in anchor.tails.values()}
    for tier in (states.device, states.host):
        for slot, checkpoint in enumerate(tier.checkpoints):
            if checkpoint is None:
                continue
            if checkpoint.slot != slot or checkpoint.is_on_host != (tier is states.host) or checkpoint.is_dropped:
                raise RuntimeError(f"the checkpoint in slot {slot} is of slot {checkpoint.slot}")
            if id(checkpoint) not in found:
                raise RuntimeError(f"the checkpoint in slot {slot} cannot be found")
            if checkpoint.parent is not None and checkpoint not in checkpoint.parent.children:
                raise RuntimeError(f"the checkpoint in slot {slot} is no child of its parent")
    if len(found) != states.device.num_checkpoints + states.host.num_checkpoints:
        raise RuntimeError(f"{len(found)} checkpoints can be found, not all of them in slots")
