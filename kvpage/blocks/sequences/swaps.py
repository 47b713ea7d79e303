"""Swaps of whole sequences: off the device and back.

swap_out   own blocks with committed tokens ─► host blocks of the sequence's own; cached blocks are left to the tree
swap_in    the tree's blocks, as far as it still has them, then the own ones, from the host where nothing is missing
"""

from kvpage._C import Match
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.states import Ids, SeqId, SwappedState
from kvpage.checks.interrupts import uninterrupted


@uninterrupted
def swap_out(space: BlockSpace, sequences: Sequences, seq_id: SeqId) -> None:
    """Free the device blocks of a sequence. Raise OutOfBlocks, and change nothing, if the host lacks room."""
    seq = sequences.state(seq_id)
    written = sequences.ids(seq_id)[seq.first_own : sequences.blocks_for(seq.num_written)]
    host_ids = space.take_host(len(written))
    space.add_move("swap_out", zip(written.tolist(), host_ids.tolist(), strict=True))
    sequences.swapped[seq_id] = SwappedState(
        seq.num_cached_blocks,
        host_ids,
        seq.num_written,
        seq.namespace,
        seq.priority,
        seq.num_left,
        seq.is_private,
    )
    sequences.remove(seq_id)


@uninterrupted
def swap_in(
    space: BlockSpace,
    sequences: Sequences,
    seq_id: SeqId,
    tokens: Ids,
    num_left_over: int,
    is_caching: bool,
    num_spare: int,
) -> int:
    """Give device blocks to a sequence that is swapped out.

    Args:
        space: The blocks.
        sequences: The sequences.
        seq_id: A sequence that is swapped out.
        tokens: All tokens of the sequence.
        num_left_over: How many tokens at the end not to look up in the tree.
        is_caching: Whether sequences find each other's blocks.
        num_spare: How many more blocks are to be left over.

    Returns:
        The number of leading tokens whose K and V are in the blocks once the moves are done.

    Raises:
        OutOfBlocks: The device lacks room. Nothing is changed.
    """
    swapped = sequences.swapped[seq_id]
    match, _ = space.match(tokens, swapped.namespace, swapped.priority, num_left_over)
    try:
        num_blocks = max(sequences.blocks_for(len(tokens)) - _num_left(swapped, match), match.num_blocks)
        own_ids = space.give(match, num_blocks, num_spare)
    except BaseException:
        space.tree.release(match)
        raise
    return resume(space, sequences, seq_id, tokens, match, own_ids, is_caching)


def resume(
    space: BlockSpace, sequences: Sequences, seq_id: SeqId, tokens: Ids, match: Match, taken: Ids, is_caching: bool
) -> int:
    """Make a sequence that is swapped out run in the blocks of a match, and in those taken for the rest.

    Returns:
        The number of leading tokens whose K and V are in the blocks once the moves are done.
    """
    swapped = sequences.swapped[seq_id]
    num_written, pending = _bring_back(space, swapped, match, taken, tokens, is_caching)
    space.release_host(swapped.host_ids)
    sequences.add(
        seq_id,
        match,
        taken,
        pending,
        len(tokens),
        num_written,
        swapped.namespace,
        num_left=_num_left(swapped, match),
        is_private=swapped.is_private,
    )
    del sequences.swapped[seq_id]
    return num_written


def _num_left(swapped: SwappedState, match: Match) -> int:
    """Return how many own blocks stay given back: none where cached blocks before them are computed again."""
    return swapped.num_left if match.num_blocks >= swapped.first_block else 0


def _bring_back(
    space: BlockSpace, swapped: SwappedState, match: Match, own_ids: Ids, tokens: Ids, is_caching: bool
) -> tuple[int, Ids]:
    """Move host blocks into the first of `own_ids`, unless cached blocks before them are gone.

    Return the number of written tokens, and the written tokens that are not in the tree.
    """
    num_blocks = match.num_blocks
    num_written, pending = match.num_tokens, tokens[:0]
    if num_blocks >= swapped.first_block:
        host_ids = swapped.host_ids[num_blocks - swapped.first_block :]
        space.add_move("swap_in", zip(host_ids.tolist(), own_ids.tolist(), strict=False))
        if match.num_tokens < swapped.num_written:
            num_written = swapped.num_written
            is_shared = is_caching and not swapped.is_private
            pending = tokens[match.num_tokens : num_written] if is_shared else pending
    return num_written, pending
