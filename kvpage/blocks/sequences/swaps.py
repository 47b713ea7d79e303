"""Swaps of whole sequences: off the device and back.

swap_out   own blocks with committed tokens ─► host blocks of the sequence's own; cached blocks are left to the tree
swap_in    the tree's blocks, as far as it still has them, then the own ones, from the host where nothing is missing
"""

from kvpage._C import Match
from kvpage.blocks.sequence_state import Ids, SeqId, SwappedState
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.blocks.space import BlockSpace
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

    Returns:
        The number of leading tokens whose K and V are in the blocks once the moves are done.

    Raises:
        OutOfBlocks: The device lacks room. Nothing is changed.
    """
    swapped = sequences.swapped[seq_id]
    match, _ = space.match(tokens, swapped.namespace, swapped.priority, num_left_over)
    try:
        num_written = resume(space, sequences, seq_id, tokens, match, is_caching, num_spare)
    except BaseException:
        if not match.is_released:
            space.tree.release(match)
        raise
    sequences.forget_swapped(space, seq_id)
    return num_written


def resume(
    space: BlockSpace, sequences: Sequences, seq_id: SeqId, tokens: Ids, match: Match, is_caching: bool, num_spare: int
) -> int:
    """Make a sequence that is swapped out run after the blocks of a match, which passes to it.

    Its own blocks come back from the host, unless cached blocks before them are gone.

    Returns:
        The number of leading tokens whose K and V are in the blocks once the moves are done.
    """
    swapped, num_cached = sequences.swapped[seq_id], match.num_tokens
    is_whole = match.num_blocks >= swapped.first_block
    num_written = max(num_cached, swapped.num_written) if is_whole else num_cached
    sequences.resume(
        space,
        seq_id,
        match,
        num_tokens=len(tokens),
        num_written=num_written,
        pending=tokens[num_cached:num_written] if is_caching and not swapped.is_private else tokens[:0],
        namespace=swapped.namespace,
        host_ids=swapped.host_ids[match.num_blocks - swapped.first_block :] if is_whole else (),
        num_left=swapped.num_left if is_whole else 0,
        num_spare=num_spare,
        is_private=swapped.is_private,
    )
    return num_written
