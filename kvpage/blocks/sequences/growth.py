"""Growth of sequences: first blocks, and more blocks, with copies of shared ones (copy-on-write).

Each is a native call, which evicts cached blocks where too few are free, and adds the moves that are due to the list of
BlockSpace. Where there is no room the oldest pins end, if that helps, and it is called once more.
"""

from kvpage.blocks.sequence_state import Allocation, Ids, SeqId
from kvpage.blocks.sequences.sequences import Rows, Sequences
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.stats import Query
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.values import as_integer


def begin(
    sequences: Sequences,
    seq_id: SeqId,
    tokens: Ids,
    namespace: bytes,
    priority: int,
    num_left_over: int,
    share_parts: bool,
    num_spare: int,
    is_counted: bool,
) -> Allocation:
    """Give blocks to a new sequence; the arguments are those of BlockManager.allocate.

    Returns:
        The leading tokens whose K and V are in the blocks once the moves are done, and the blocks.

    Raises:
        OutOfBlocks: The tokens do not fit. Nothing is changed.
    """
    space = sequences.space
    prompt = seq_id, tokens, namespace, priority, num_left_over, share_parts, num_spare, is_counted
    try:
        try:
            outcome = sequences.rows.begin(sequences.on_device, *prompt, *space.native)
        except OutOfBlocks:
            if not len(space.pins):
                raise
            _end_pins(space, sequences.blocks_for(len(tokens)), tokens, namespace, priority, num_left_over, num_spare)
            outcome = sequences.rows.begin(sequences.on_device, *prompt, *space.native)
        num_cached, num_host, num_refused, part_from, part_to, is_on_device, block_ids = outcome
        if part_from >= 0:
            space.add_move("copy" if is_on_device else "swap_in", [(part_from, part_to)])
        if is_counted:
            size = space.block_size
            num_part = num_cached % size
            query = Query(len(tokens), num_part, num_refused)
            space.count(query, num_cached - num_part - num_host * size, num_host * size)
        return Allocation(num_cached, block_ids)
    except BaseException:  # Ctrl-C, after the blocks were given
        sequences.discard(seq_id)
        raise


@uninterrupted
def _end_pins(
    space: BlockSpace,
    num_blocks: int,
    tokens: Ids,
    namespace: bytes,
    priority: int,
    num_left_over: int,
    num_spare: int,
) -> None:
    """End as many pins as make room for a prompt. Raise OutOfBlocks, and end none, where that is not enough."""
    match = space.tree.match(tokens, namespace, priority, num_left_over, is_hit=False)
    try:
        space.check_room(num_blocks - match.num_device_blocks, num_spare)
    finally:
        space.tree.release(match)


def tokens_left_over(num_tokens: int, max_cached_tokens: int | None, num_left_over: int, is_caching: bool) -> int:
    """Return how many tokens at a sequence's end not to look up: all of them without prefix caching.

    Raises:
        ValueError: A number is negative.
        TypeError: A number is no integer.
    """
    num_left_over = as_integer("num_left_over", num_left_over)
    if num_left_over < 0:
        raise ValueError(f"num_left_over must not be negative, got {num_left_over}")
    if max_cached_tokens is not None:
        most = as_integer("max_cached_tokens", max_cached_tokens)
        if most < 0:
            raise ValueError(f"max_cached_tokens must not be negative, got {most}")
        num_left_over = max(num_left_over, num_tokens - most)
    return num_left_over if is_caching else num_tokens


def append(sequences: Sequences, rows: Rows, counts: int | list[int] | Rows) -> None:
    """Make room for more tokens in each row. Raise OutOfBlocks, and change nothing, without blocks."""
    if sequences.rows.append_if_free(rows, counts):  # most steps
        return
    space = sequences.space
    try:
        sequences.rows.append(rows, counts, *space.native)
    except OutOfBlocks as shortage:
        if not len(space.pins):
            raise
        space.check_room(shortage.needed, 0)
        sequences.rows.append(rows, counts, *space.native)
