"""Growth of sequences: first blocks, blocks of a fork, and more blocks, with copies of shared ones (copy-on-write)."""

from collections.abc import Callable, Sequence

import numpy as np

from kvpage._C import PartMatch
from kvpage.blocks.sequences import Sequences
from kvpage.blocks.space import BlockSpace
from kvpage.blocks.states import SeqId, SequenceState
from kvpage.blocks.table import Ids
from kvpage.checks.errors import OutOfBlocks
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
) -> int:
    """Give blocks to a new sequence; the arguments are those of BlockManager.allocate.

    Returns:
        The number of leading tokens whose K and V are in the blocks once the moves are done.

    Raises:
        OutOfBlocks: The tokens do not fit. Nothing is changed.
    """
    match = space.match(tokens, namespace, priority, num_left_over)
    part = space.tree.match_part(match, tokens, num_left_over) if share_parts else None
    num_blocks = sequences.blocks_for(len(tokens))
    try:
        taken = _with_or_without(space, part, lambda: space.give(match, num_blocks))
    except BaseException:
        space.tree.release(match)
        raise
    num_part = space.copy_part(part, taken) if part and not part.match.is_released else 0
    num_cached = match.num_tokens + num_part
    row = sequences.tables.add_row(match.block_ids)
    sequences.tables.extend(row, taken)
    pending = tokens[match.num_tokens : num_cached].copy()
    sequences.on_device[seq_id] = SequenceState(
        row, match, len(tokens), num_cached, pending, False, namespace, priority
    )
    space.count_query(len(tokens), num_part)
    return num_cached


def _with_or_without(space: BlockSpace, part: PartMatch | None, give: Callable[[], Ids]) -> Ids:
    """Return the result of `give`. Without room, the part's block is released: it is not worth a request."""
    if part is None:
        return give()
    try:
        return give()
    except OutOfBlocks:
        space.tree.release(part.match)
        return give()
    except BaseException:
        space.tree.release(part.match)
        raise


def fork(space: BlockSpace, sequences: Sequences, seq: SequenceState, new_seq_id: SeqId, num_tokens: int) -> None:
    """Make a second sequence with the first `num_tokens` tokens of `seq`, in the same blocks."""
    ids = sequences.ids(seq)[: sequences.blocks_for(num_tokens)].copy()
    space.pool.share(ids[seq.match.num_blocks + seq.num_left :])
    seq.is_forked = True
    sequences.on_device[new_seq_id] = SequenceState(
        sequences.tables.add_row(ids),
        space.tree.pin(seq.match),
        num_tokens,
        num_tokens,
        seq.pending[: num_tokens - seq.match.num_tokens],
        True,
        seq.namespace,
        seq.priority,
        seq.num_left,
        seq.is_private,
    )


def tokens_left_over(num_tokens: int, max_cached_tokens: int | None, num_left_over: int, is_caching: bool) -> int:
    """Return how many tokens at a sequence's end not to look up: all of them without prefix caching.

    Raises:
        ValueError: A number is negative.
        TypeError: A number is no integer.
    """
    num_left_over = as_integer("num_left_over", num_left_over)
    most = num_tokens if max_cached_tokens is None else as_integer("max_cached_tokens", max_cached_tokens)
    for name, number in (("max_cached_tokens", most), ("num_left_over", num_left_over)):
        if number < 0:
            raise ValueError(f"{name} must not be negative, got {number}")
    return max(num_left_over, num_tokens - most) if is_caching else num_tokens


def grow(space: BlockSpace, sequences: Sequences, seq_ids: Sequence[SeqId], counts: list[int]) -> None:
    """Make room for counts[i] more tokens in each sequence. Raise OutOfBlocks, and change nothing, without blocks."""
    _check_counts(sequences, seq_ids, counts)
    growing = [sequences[seq_id] for seq_id in seq_ids]
    copied = _to_copy(space, sequences, [seq for seq, count in zip(growing, counts, strict=True) if count])
    added = [
        sequences.blocks_for(seq.num_tokens + count) - sequences.tables.num_blocks(seq.row)
        for seq, count in zip(growing, counts, strict=True)
    ]
    fresh = space.take(len(copied) + sum(added))
    _copy_on_write(space, sequences, copied, fresh[: len(copied)])
    begin = len(copied)
    for seq, count, num_added in zip(growing, counts, added, strict=True):
        if num_added:
            sequences.tables.extend(seq.row, fresh[begin : begin + num_added])
            begin += num_added
        seq.num_tokens += count


def _check_counts(sequences: Sequences, seq_ids: Sequence[SeqId], counts: list[int]) -> None:
    if len(set(seq_ids)) != len(seq_ids):
        raise ValueError(f"seq_ids must be distinct, got {list(seq_ids)}")
    if len(counts) != len(seq_ids):
        raise ValueError(f"num_new_tokens must be one per sequence, got {len(counts)} for {len(seq_ids)}")
    for seq_id, count in zip(seq_ids, counts, strict=True):
        if seq_id not in sequences.on_device:
            raise KeyError(seq_id)
        if count < 0:
            raise ValueError(f"num_new_tokens must not be negative, got {count} for {seq_id!r}")


def _to_copy(space: BlockSpace, sequences: Sequences, growing: list[SequenceState]) -> list[SequenceState]:
    """Return the sequences whose partly filled last block another one reads too, without each block's last holder."""
    holders: dict[int, int] = {}
    copied = []
    for seq in growing:
        if not seq.is_forked or seq.num_tokens % space.block_size == 0:
            continue
        block_id = int(sequences.ids(seq)[-1])
        left = holders.setdefault(block_id, space.pool.ref_count(block_id))
        if left > 1:
            copied.append(seq)
            holders[block_id] = left - 1
    return copied


def _copy_on_write(space: BlockSpace, sequences: Sequences, copied: list[SequenceState], fresh: Ids) -> None:
    tables = sequences.tables
    old = [int(sequences.ids(seq)[-1]) for seq in copied]
    for seq, block_id in zip(copied, fresh, strict=True):
        tables.replace(seq.row, tables.num_blocks(seq.row) - 1, np.array([block_id], np.int32))
        seq.is_forked = False
    space.add_move("copy", zip(old, fresh.tolist(), strict=True))
    space.pool.release(old)
