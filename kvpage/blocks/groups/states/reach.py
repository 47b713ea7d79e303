"""How far the states of a hybrid model reach into a prompt, and why."""

import sys
from dataclasses import replace

from kvpage.blocks.explain import Ending, GroupReach
from kvpage.blocks.groups.states.checkpoint import TOKEN_BYTES, num_common
from kvpage.blocks.groups.states.state_space import StateSpace
from kvpage.blocks.sequence_state import Ids
from kvpage.blocks.space import BlockSpace


def with_tails(
    attention: GroupReach, begins_at: int, space: BlockSpace, states: StateSpace, tokens: Ids, namespace: bytes
) -> GroupReach:
    """Return the reach of blocks, or of a checkpoint's tail that has more: its K and V lie with the checkpoint."""
    if attention.ending is Ending.NOT_WORTH_LOADING:
        return replace(attention, num_tokens=max(attention.num_tokens, begins_at))
    ids = space.tree.look(tokens, namespace)[0]
    start = ids.shape[1] * space.block_size
    anchor, rest = states.anchors.last(ids, namespace), tokens[start : start + space.block_size].tobytes()
    tail = anchor.nearest(rest) if anchor is not None else b""
    num_tokens, num_tail = start + num_common(tail, rest), start + len(tail) // TOKEN_BYTES
    if num_tokens < attention.num_tokens + (attention.ending is not Ending.NOT_CACHED):
        return attention
    if num_tokens >= len(tokens) - 1:
        return GroupReach("attention", num_tokens, Ending.PROMPT)
    if num_tokens < num_tail:
        cached = int.from_bytes(tail[(num_tokens - start) * TOKEN_BYTES :][:TOKEN_BYTES], sys.byteorder, signed=True)
        return GroupReach("attention", num_tokens, Ending.DIFFERENT, num_tokens, int(tokens[num_tokens]), cached)
    ending = Ending.KV_EVICTED if attention.ending is Ending.KV_EVICTED else Ending.NOT_CACHED
    return GroupReach("attention", num_tokens, ending)


def reach_of_state(space: BlockSpace, states: StateSpace, tokens: Ids, namespace: bytes) -> GroupReach:
    """Return how far checkpoints reach into a prompt, and why not further."""
    most, size = max(len(tokens) - 1, 0), space.block_size
    ids = space.tree.look(tokens, namespace)[0]
    positions = [checkpoint.num_tokens for checkpoint in states.each_of(ids, tokens, namespace)]
    below = _begins_at([position for position in positions if position <= most], _num_on_device(ids), space)
    above = min((position for position in positions if position > below), default=None)
    reach = GroupReach("state", below, Ending.NO_CHECKPOINT, below=below or None, above=above)
    if below >= most:
        return replace(reach, ending=Ending.PROMPT)
    if above is not None and above <= most:
        return replace(reach, ending=Ending.NOT_WORTH_LOADING)
    evicted = states.evicted.positions(ids, tokens, namespace, size)
    usable = [position for position in evicted if below < position <= most]
    if usable:
        return replace(reach, ending=Ending.EVICTED, above=min(usable))
    return reach


def _num_on_device(ids: Ids) -> int:
    return int((ids[0] >= 0).sum())


def _begins_at(positions: list[int], num_on_device: int, space: BlockSpace) -> int:
    """Return the position at which a request would begin; 0 without one. It loads host blocks if that is worth it."""
    longest = max(positions, default=0)
    num_host = longest // space.block_size - num_on_device
    nearest = max((position for position in positions if position // space.block_size <= num_on_device), default=0)
    return longest if space.should_load(num_host, longest - nearest) else nearest
