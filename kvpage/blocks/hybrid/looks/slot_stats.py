"""The numbers of state slots and checkpoints, for whoever asks, in any thread."""

from kvpage.blocks.hybrid.state_space import StateSpace
from kvpage.blocks.stats import SlotStats


def slot_stats(states: StateSpace) -> SlotStats:
    """Return the counters, and the slots of both tiers now. Nothing is changed: any thread may ask.

    Numbers are read one after another. Each is within its range, also where slots change meanwhile.

    Args:
        states: The slots.
    """
    device, host = states.device, states.host
    stale = [one for anchor in states.anchors.stale() for one in list(anchor.tails.values())]
    num_host = sum(one.is_on_host for one in stale)
    num_device = len(stale) - num_host
    return SlotStats(
        num_slots=device.num_slots,
        num_free_slots=min(device.num_free + num_device, device.num_slots),
        num_checkpoints=max(device.num_checkpoints - num_device, 0),
        num_host_slots=host.num_slots,
        num_free_host_slots=min(host.num_free + num_host, host.num_slots),
        num_host_checkpoints=max(host.num_checkpoints - num_host, 0),
        **{**states.counts, "lost": states.counts["lost"] + len(stale)},
    )
