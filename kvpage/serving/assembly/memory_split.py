"""The split of a cache's memory: blocks of all tokens, and beside them blocks of windows, or checkpoints of states.

memory    '-- windows, or checkpoints ----------'-- blocks of all tokens -------------------'
              those of 4 * max_num_seqs             the rest
              sequences, half at most

The lengths of sequences are not known yet. Short sequences need more windows, long sequences more blocks. A split for
one length may hold few sequences of another. Half and half holds at least half as many as the best split, whatever the
length.
"""

from typing import NamedTuple

SEQUENCES = 4
"""Sequences to keep, for each that runs at once: itself, and three prefixes of others."""
CHECKPOINTS = 4
"""Checkpoints of a sequence: the end of its prompt and that of its answer, and the borders of a chat."""


class WindowSplit(NamedTuple):
    """num_blocks: of layers that keep all tokens. num_window_blocks: of each window."""

    num_blocks: int
    num_window_blocks: int


def num_beside(num_bytes: int, block_bytes: int, unit_bytes: int, most: int) -> int:
    """Return how many units come beside the blocks of all tokens: `most`, or as many as half of the memory holds.

    Where these blocks have no bytes, units may take all of it. unit_bytes: of a window's block, or a checkpoint.
    """
    share = num_bytes // 2 if block_bytes else num_bytes
    return min(most, share // unit_bytes)


def split_windows(
    num_bytes: int, block_bytes: int, window_bytes: int, num_sequence_blocks: int, num_seqs: int, num_step_blocks: int
) -> WindowSplit | None:
    """Return the split of num_bytes over blocks of full layers and of windows; None where one table holds no less.

    block_bytes: of a block of the full layers. A model of windows alone has none: its blocks only count tokens, and
    `num_blocks` is 0. window_bytes: of a block of all windows together. num_sequence_blocks: of the widest window,
    for a sequence. num_seqs: that run at once. num_step_blocks: of all portions of a step.
    """
    most = SEQUENCES * num_seqs * num_sequence_blocks + num_step_blocks
    num_windows = max(num_beside(num_bytes, block_bytes, window_bytes, most), num_sequence_blocks)
    num_bytes_left = num_bytes - num_windows * window_bytes
    if num_bytes_left < 0:
        return None
    if not block_bytes:
        return WindowSplit(0, num_windows)
    num_blocks = num_bytes_left // block_bytes
    return WindowSplit(num_blocks, num_windows) if num_blocks > num_bytes // (block_bytes + window_bytes) else None


def checkpoint_share(num_bytes: int, block_bytes: int, checkpoint_bytes: int, num_seqs: int) -> int:
    """Return the bytes of num_bytes that checkpoints get, beside the slots of running sequences.

    block_bytes: of the layers with attention; 0 without any. checkpoint_bytes: of a state and its tail.
    num_seqs: that run at once.
    """
    return checkpoint_bytes * num_beside(num_bytes, block_bytes, checkpoint_bytes, SEQUENCES * CHECKPOINTS * num_seqs)
