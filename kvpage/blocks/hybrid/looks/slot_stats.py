"""The numbers of state slots and checkpoints, for whoever asks, in any thread."""

from kvpage.blocks.hybrid.state_space import StateSpace
from kvpage.blocks.stats import SlotStats


def slot_stats(states: StateSpace) -> SlotStats:
    """Return the counters, and the slots of both tiers now. Nothing is changed: any thread may ask.

    Args:
        states: The slots.
    """
    device, host = states.device, states.host
    stale = [one for anchor in states.anchors.stale() for one in list(anchor.tails.values())]
    num_host = sum(one.is_on_host for one in stale)
    num_device = len(stale) - num_host
    return SlotStats(
        num_slots=device.num_slots,
        num_free_slots=device.num_free + num_device,
        num_checkpoints=device.num_checkpoints - num_device,
        num_host_slots=host.num_slots,
        num_free_host_slots=host.num_free + num_host,
        num_host_checkpoints=host.num_checkpoints - num_host,
        **{**states.counts, "lost": states.counts["lost"] + len(stale)},
    )
