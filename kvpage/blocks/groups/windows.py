"""Windows: the groups of windows of one manager together: room for the tokens of a step, in all of them or in none.

    open           decodes: all tokens fit, or OutOfBlocks, as check_open tells before
    open_as_far    a portion of a prompt: as many tokens as fit
    skip_to        a prompt whose K and V come from elsewhere: the last window alone

Without windows each of these does nothing.
"""

from collections.abc import Sequence
from typing import overload

from kvpage.blocks.groups.group import Groups
from kvpage.blocks.groups.window_group import WindowGroup
from kvpage.blocks.sequence_state import PathIds, SeqId
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.values import as_list, as_positions


class Windows(Sequence[WindowGroup]):
    """The groups of windows, by their places.

    Args:
        windows: The groups.
        sequences: The manager's sequences.
        groups: All groups of the manager.
    """

    def __init__(self, windows: Sequence[WindowGroup], sequences: Sequences, groups: Groups) -> None:
        self._windows = tuple(windows)
        self._sequences = sequences
        self._groups = groups

    def __len__(self) -> int:
        return len(self._windows)

    @overload
    def __getitem__(self, group: int) -> WindowGroup: ...
    @overload
    def __getitem__(self, group: slice) -> tuple[WindowGroup, ...]: ...
    def __getitem__(self, group: int | slice) -> WindowGroup | tuple[WindowGroup, ...]:
        return self._windows[group]

    @uninterrupted
    def open(self, seq_ids: Sequence[SeqId], ends: Sequence[int]) -> None:
        """Make room in all windows for the tokens of the next step. Blocks before the windows are given back first.

        Without windows nothing happens.

        Args:
            seq_ids: Distinct sequences.
            ends: How many tokens each will have written: at least the committed ones, at most those with room.

        Raises:
            OutOfBlocks: The tokens do not fit into a window's group. No room is made.
            ValueError: Ids repeat, or an end is out of range.
        """
        if not self._windows:
            return
        seq_ids = as_list("seq_ids", seq_ids)
        counts = self._checked_ends(seq_ids, ends)
        for window in self._windows:
            window.check_open(seq_ids, counts)
        for window in self._windows:
            window.open(seq_ids, counts)

    @uninterrupted
    def check_open(self, seq_ids: Sequence[SeqId], ends: Sequence[int]) -> None:
        """Raise OutOfBlocks where `open` would. Blocks before the windows are given back.

        Args:
            seq_ids: Distinct sequences.
            ends: How many tokens each will have written. They need no room in the full layers yet.
        """
        for window in self._windows:
            window.check_open(seq_ids, ends)

    @uninterrupted
    def open_as_far(self, seq_id: SeqId, end: int) -> int:
        """Make room in all windows for as many of a sequence's next tokens as fit.

        Args:
            seq_id: The sequence.
            end: How many tokens it would have written.

        Returns:
            How many it can have written. That is `end` if all fit, and the committed ones if none fits.

        Raises:
            ValueError: `end` is out of range, as of `open`.
        """
        if not self._windows:
            return end
        self._checked_ends([seq_id], [end])
        num_written = self._sequences.num_written(seq_id)
        end = max(min([end, *(window.most_tokens(seq_id) for window in self._windows)]), num_written)
        for window in self._windows if end > num_written else ():
            window.open([seq_id], [end])
        return end

    @uninterrupted
    def skip_to(self, seq_id: SeqId, num_tokens: int) -> list[int]:
        """Make room in all windows for the last window before `num_tokens` tokens, whose K and V come from elsewhere.

        Then write them, and commit all of these tokens. Until then the sequence gets no other room.

        Args:
            seq_id: The sequence.
            num_tokens: Whole blocks, at least those of the committed tokens.

        Returns:
            For each window the first token to write. Those before it are there, or before the window.

        Raises:
            OutOfBlocks: The tokens do not fit into a window's group. No room is made.
            ValueError: `num_tokens` or the number of committed tokens is out of range, or amid a block.
        """
        self._checked_ends([seq_id], [num_tokens])
        num_written = self._sequences.num_written(seq_id)
        if num_tokens % self._sequences.block_size or num_written % self._sequences.block_size:
            both = f"got {num_tokens} after {num_written} committed ones"
            raise ValueError(f"num_tokens must be whole blocks of {self._sequences.block_size}, {both}")
        for window in self._windows:
            window.check_skip(seq_id, num_tokens)
        return [window.skip_to(seq_id, num_tokens) for window in self._windows]

    def can_begin(self, path: PathIds, num_tokens: int) -> bool:
        """Return whether each window has a block for a sequence's next token, beside those that it uses.

        Args:
            path: The tree's ids of the sequence's cached blocks, int32 [2, num_blocks].
            num_tokens: Tokens of these.
        """
        pools = [window.blocks for window in self._windows]
        return all(blocks.num_left_by(path[:, blocks.first_block(num_tokens) :]) > 0 for blocks in pools)

    # --- inside ---

    def _checked_ends(self, seq_ids: Sequence[SeqId], ends: Sequence[int]) -> list[int]:
        """Return the ends as integers, if each is a number of tokens that a distinct sequence may have written."""
        states = [self._sequences.state(seq_id) for seq_id in seq_ids]
        if len(set(seq_ids)) != len(seq_ids):
            raise ValueError(f"seq_ids must be distinct, got {seq_ids}")
        counts: list[int] = as_positions("ends", ends, len(seq_ids)).tolist()
        for seq_id, state, end in zip(seq_ids, states, counts, strict=True):
            for group in self._groups:
                group.check_settled(seq_id)
            if not state.num_written <= end <= state.num_tokens:
                raise ValueError(f"ends must be in [{state.num_written}, {state.num_tokens}], got {end} for {seq_id!r}")
        return counts
