"""How far the states of a hybrid model reach into a prompt, and why."""

from dataclasses import replace

from kvpage.blocks.explain import Ending, Explanation, GroupReach, longest_elsewhere, reach_of_attention
from kvpage.blocks.hybrid.anchors import Anchors
from kvpage.blocks.hybrid.state_space import StateSpace
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.states import Ids


def explain_hybrid(space: BlockSpace, states: StateSpace, tokens: Ids, namespace: bytes) -> Explanation:
    """Return how much of a prompt is cached in blocks and states, and why not more.

    Args:
        space: The blocks.
        states: The checkpoints.
        tokens: The prompt.
        namespace: Where to look.
    """
    attention = reach_of_attention(space.tree, tokens, namespace, True, space.rule)
    state = _reach_of_state(space, states, tokens, namespace, attention)
    if state.num_tokens > attention.num_tokens:  # the checkpoint has the K and V of its tail
        ending = Ending.PROMPT if state.num_tokens >= len(tokens) - 1 else attention.ending
        attention = replace(attention, num_tokens=state.num_tokens, ending=ending)
    return Explanation(
        num_tokens=len(tokens),
        num_cached_tokens=state.num_tokens,
        groups=(attention, state),
        elsewhere=longest_elsewhere(space.tree, tokens, namespace, attention.num_tokens),
    )


def _reach_of_state(
    space: BlockSpace, states: StateSpace, tokens: Ids, namespace: bytes, attention: GroupReach
) -> GroupReach:
    most, size = max(len(tokens) - 1, 0), space.block_size
    ids = space.tree.look(tokens, namespace)[0]
    num_blocks = ids.shape[1]
    if attention.ending is Ending.NOT_WORTH_LOADING:
        num_blocks = attention.num_tokens // size
    positions = _positions(states.anchors, ids, tokens, namespace, size)
    below = max((one for one in positions if one <= most and one // size <= num_blocks), default=0)
    above = min((one for one in positions if one > below), default=None)
    reach = GroupReach("state", below, Ending.NO_CHECKPOINT, below=below or None, above=above)
    if below >= most:
        return replace(reach, ending=Ending.PROMPT)
    if above is not None and above <= most:
        return replace(reach, ending=Ending.NOT_WORTH_LOADING)
    evicted = [one for one in states.evicted.positions(ids, tokens, namespace, size) if below < one <= most]
    if evicted:
        return replace(reach, ending=Ending.EVICTED, above=min(evicted))
    return reach


def _positions(anchors: Anchors, ids: Ids, tokens: Ids, namespace: bytes, block_size: int) -> list[int]:
    """Return the positions of all checkpoints of a prompt."""
    found = [anchors.find(*ids[:, place].tolist()) for place in anchors.places(ids)]
    found.append(anchors.root(namespace))
    return [
        one.num_tokens
        for anchor in found
        if anchor is not None
        for one in anchor.tails.values()
        if tokens[anchor.num_blocks * block_size : one.num_tokens].tobytes() == one.tail
    ]
