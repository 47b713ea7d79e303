"""WindowedTables: BlockManager with a table for each window of each sequence, as a step's kernels take them.

table of all layers that see everything    7   2   9   4   1
table of a window                          .   .   5   3   8      behind the window there are no blocks
"""

from collections.abc import Sequence

import numpy as np

from kvpage.blocks.groups.held_blocks import HeldBlocks
from kvpage.blocks.groups.window_blocks import Window, WindowBlocks, checked_windows
from kvpage.blocks.groups.window_table import SwappedWindow, WindowTable
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import Pairs
from kvpage.blocks.space import HostPolicy
from kvpage.blocks.states import Ids, SeqId, Slots
from kvpage.checks.values import as_integer, as_list, as_positions


class WindowedTables(BlockManager):
    """The groups of windows, and what they give to a step. See WindowedManager, which is all of it.

    Args:
        num_blocks: As of WindowedManager. So are all others.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        windows: Sequence[Window],
        num_host_blocks: int = 0,
        host_policy: HostPolicy | None = None,
        rule: LoadOrCompute | None = None,
        pin_quota: int = 0,
    ) -> None:
        windows = checked_windows(windows)
        super().__init__(
            num_blocks,
            block_size,
            enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            share_parts=False,
            host_policy=host_policy,
            rule=rule,
            pin_quota=pin_quota,
        )
        self.windows = tuple(WindowBlocks(window, self.space) for window in windows)
        self._tables: dict[SeqId, tuple[WindowTable, ...]] = {}  # one for each window
        self._swapped: dict[SeqId, tuple[SwappedWindow, ...]] = {}  # of sequences that are swapped out
        self.space.watch(self)
        self._held: list[HeldBlocks] = []

    # --- what the tree's blocks do ---

    def blocks_moved(self, pairs: Pairs, to_host: bool) -> None:
        """Tell the windows that blocks of full layers have just got a copy in the other tier.

        Args:
            pairs: (from, to).
            to_host: The other tier.
        """
        for blocks in self.windows:
            blocks.moved(pairs, to_host)

    def blocks_dropped(self, tokens: Ids, namespace: bytes) -> None:
        """Do nothing: a window's block beside a block that is gone is never found, and is dropped for room.

        Args:
            tokens: Of the blocks.
            namespace: Of the tokens.
        """

    def blocks_cleared(self) -> None:
        """Forget all cached blocks of the windows."""
        for blocks in self.windows:
            blocks.clear()

    # --- what a step takes ---

    def window_tables(self, group: int, seq_ids: Sequence[SeqId]) -> Ids:
        """Return the tables of several sequences in one window's group, int32 [num_seqs, max_blocks].

        They are as wide as block_tables. Entries behind the window, and after the room for the step, are 0: the layers
        of the group do not read them.

        Args:
            group: The window's place in `windows`.
            seq_ids: Sequences.

        Raises:
            RuntimeError: There are moves to make in this group.
            ValueError: There is no such group.
        """
        group = self._moved_group(group)
        tables = [self._tables[seq_id][group] for seq_id in as_list("seq_ids", seq_ids)]
        most = max((self._sequences.blocks_for(self.state(seq_id).num_tokens) for seq_id in seq_ids), default=0)
        return np.array([table.row(most) for table in tables], np.int32).reshape(len(tables), most)

    def window_slots(self, group: int, seq_id: SeqId, start: int, end: int) -> Slots:
        """Return the slots of the sequence's positions [start, end) in one window's group, int64.

        Args:
            group: The window's place in `windows`.
            seq_id: The sequence.
            start: The first position.
            end: The position after the last one.

        Raises:
            RuntimeError: There are moves to make in this group.
            ValueError: A position has no block: it is behind the window, or windows are not opened for it. Or there is
                no such group.
        """
        return self.window_slot_mappings(group, [seq_id], [start], [end])

    def window_slot_mappings(
        self, group: int, seq_ids: Sequence[SeqId], starts: Sequence[int], ends: Sequence[int]
    ) -> Slots:
        """Return the slots of the positions [starts[i], ends[i]) of each sequence in one window's group, int64.

        Args:
            group: The window's place in `windows`.
            seq_ids: Sequences.
            starts: The first position of each.
            ends: The position after the last one of each.

        Raises:
            RuntimeError: There are moves to make in this group.
            ValueError: As `window_slots`.
        """
        group = self._moved_group(group)
        seq_ids = as_list("seq_ids", seq_ids)
        first, last = (
            as_positions(name, column, len(seq_ids)).tolist() for name, column in (("starts", starts), ("ends", ends))
        )
        tables = [self._tables[seq_id][group] for seq_id in seq_ids]
        for seq_id, table, start, end in zip(seq_ids, tables, first, last, strict=True):
            table.check_has(seq_id, start, end)
        return np.concatenate(
            [np.empty(0, np.int64), *(table.slots(*one) for table, *one in zip(tables, first, last, strict=True))]
        )

    def _moved_group(self, group: int) -> int:
        """Return the place of a group whose moves are made."""
        group = as_integer("group", group)
        if not 0 <= group < len(self.windows):
            raise ValueError(f"group must be in [0, {len(self.windows)}), got {group}")
        if self.windows[group].moves:
            raise RuntimeError("do_moves of the window's group must be called before a step")
        return group

    def _num_arriving(self, seq_id: SeqId) -> int:
        """Return how many tokens are to be committed at least, with what comes from elsewhere."""
        return max(table.num_arriving for table in self._tables[seq_id])

    def _check_nothing_arrives(self, seq_id: SeqId) -> None:
        """Raise ValueError for a sequence without the blocks between its committed tokens and those of `skip_to`."""
        num_written, least = self.state(seq_id).num_written, self._num_arriving(seq_id)
        if num_written < least:
            raise ValueError(f"{seq_id!r} must have committed the {least} tokens of skip_to first, has {num_written}")

    def _check_opened(self, seq_id: SeqId, num_tokens: int) -> None:
        """Raise ValueError unless there are blocks in all windows for so many more tokens."""
        num_written = self.state(seq_id).num_written
        if num_tokens and num_written + num_tokens < (least := self._num_arriving(seq_id)):
            raise ValueError(
                f"tokens of {seq_id!r} must be committed up to {least}, as skip_to was told, got {num_tokens}"
            )
        end = self._sequences.blocks_for(num_written + num_tokens)
        if any(table.end < end for table in self._tables[seq_id]):
            most = min(table.end for table in self._tables[seq_id]) * self.block_size
            raise ValueError(f"windows of {seq_id!r} must be opened for its tokens, got {num_tokens} beyond {most}")
