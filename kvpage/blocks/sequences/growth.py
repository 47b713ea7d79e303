"""Growth of sequences: first blocks, and more blocks, with copies of shared ones (copy-on-write).

begin     one native call where the blocks are on the device and there is room, else step by step through BlockSpace
append    one native call where nothing is copied and there is room, else count the blocks ─► make room ─► another
"""

from collections.abc import Callable

from kvpage._C import PartMatch
from kvpage.blocks.sequences.sequences import Rows, Sequences
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.states import Allocation, Ids, SeqId
from kvpage.blocks.stats import Query
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.values import as_integer


def begin(
    space: BlockSpace,
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
    prompt = seq_id, tokens, namespace, priority, num_left_over, share_parts, num_spare, is_counted
    try:
        outcome = None
        if not space.tree.has_host_tier:
            outcome = sequences.rows.begin(sequences.on_device, *prompt)
        if outcome is None:
            return _begin_by_moves(space, sequences, *prompt)
        num_cached, num_evicted, part_from, part_to, block_ids = outcome
        if part_from >= 0:
            space.add_move("copy", [(part_from, part_to)])
        num_part = num_cached % space.block_size
        space.count_begun(Query(len(tokens), num_part) if is_counted else None, num_cached - num_part, num_evicted)
        return Allocation(num_cached, block_ids)
    except BaseException:  # Ctrl-C, after the blocks were given
        sequences.discard(seq_id)
        raise


@uninterrupted
def _begin_by_moves(
    space: BlockSpace,
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
    """Do the same where blocks may have to come from the host, or pins to end."""
    match, num_refused = space.match(tokens, namespace, priority, num_left_over)
    num_blocks = sequences.blocks_for(len(tokens))

    def give(num_part: int) -> Ids:
        query = Query(len(tokens), num_part, num_refused) if is_counted else None
        return space.give(match, num_blocks, query=query)

    try:
        space.check_room(num_blocks - match.num_device_blocks, num_spare)
        part = space.tree.match_part(match, tokens, num_left_over) if share_parts else None
        own_ids = _with_or_without(space, part, give)
    except BaseException:
        space.tree.release(match)
        raise
    num_part = space.copy_part(part, own_ids) if part and not part.match.is_released else 0
    num_matched = match.num_tokens
    num_cached = num_matched + num_part
    pending = tokens[num_matched:num_cached]
    row = sequences.add(seq_id, match, own_ids, pending, len(tokens), num_cached, namespace)
    return Allocation(num_cached, sequences.rows.ids(row))


def _with_or_without(space: BlockSpace, part: PartMatch | None, give: Callable[[int], Ids]) -> Ids:
    """Return the result of `give`, which is told the tokens of the part.

    Without room, the part's block is released: it is not worth a request.
    """
    if part is None:
        return give(0)
    try:
        return give(part.num_tokens)
    except OutOfBlocks:
        space.tree.release(part.match)
        return give(0)
    except BaseException:
        space.tree.release(part.match)
        raise


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


def append(space: BlockSpace, sequences: Sequences, rows: Rows, counts: int | list[int] | Rows) -> None:
    """Make room for more tokens in each row. Raise OutOfBlocks, and change nothing, without blocks."""
    if not sequences.rows.append_if_free(rows, counts):
        _append_by_moves(space, sequences, rows, counts)


@uninterrupted
def _append_by_moves(space: BlockSpace, sequences: Sequences, rows: Rows, counts: int | list[int] | Rows) -> None:
    """Do the same where blocks have to be evicted, or shared ones copied."""
    space.make_room(sequences.rows.num_blocks_to_append(rows, counts))
    space.add_copies(lambda: sequences.rows.append(rows, counts))
