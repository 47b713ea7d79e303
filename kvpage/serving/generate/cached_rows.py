"""CachedRows: the sequences of one batch, all of one length, whose blocks may be shared with others.

             ▼ length: the model takes the tokens before it as computed
    row 0   [ found | found found found | to compute ]
    row 1   [ found | to compute to compute to compute ]

The model computes all rows together, from the end of the shortest beginning that was found. Tokens that a row has found
beyond that are computed again and not written: the tree owns their blocks, and others may read them.

    open ─► skip_found ─► begin ─► the model writes K and V ─► finish ─► begin ─► ... ─► release

The next `begin`, `select` or `release` commits the tokens of a `finish`. Until then, `crop` takes them back for free.

A row may begin with padding, which has no blocks and is not computed. Its sequence in the manager begins after that:

    row 2   [ pad pad | to compute to compute ]
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.cache.cache_engine import CacheEngine
from kvpage.serving.generate.row_slots import RowSlots
from kvpage.serving.generate.states.row_states import PackedPass, RowPass, RowStates
from kvpage.serving.generate.working_rows import WorkingRows

TokenRow = npt.NDArray[np.int32]
"""[num_tokens]."""

TokenRows = npt.NDArray[np.int32]
"""[num_rows, num_tokens]."""

PAD_SLOT = -1
_NO_TOKEN = np.int32(-1)  # in no vocabulary


@dataclass(slots=True)
class _Row:
    """room: tokens that have blocks. num_written: tokens that were found or committed. is_private: no other row has
    its namespace, whose blocks are forgotten with the row. num_pads: of the row's tokens, the first ones, that do not
    count in the others.
    """

    seq_id: int
    room: int
    num_written: int
    namespace: bytes
    is_private: bool
    num_pads: int = 0

    def count(self, length: int) -> int:
        """Return how many of the row's first `length` tokens are no padding."""
        return max(length - self.num_pads, 0)

    def known(self, tokens: TokenRow, length: int) -> TokenRow:
        """Return the first `length` tokens of the row, without padding. tokens: of the row, with it."""
        return tokens[self.num_pads : max(length, self.num_pads)]


class CachedRows:
    """One batch over the blocks of `manager` and the tensors of `engine`. `seq_ids` gives each row an id of its own.

    working: K and V of the rows in one piece. Unless it is empty, it holds the tokens that are not committed, and a
        commit writes them into blocks. While it is empty, the model's K and V go into the slots of `begin`.
    states: of a model whose layers keep states. `manager` has their group.

    Each method does all or nothing. A method that raises (OutOfBlocks, ValueError) may have committed rows and marked
    cached blocks as used, and has changed nothing else. The caller holds Ctrl-C back.
    """

    def __init__(
        self,
        manager: BlockManager,
        engine: CacheEngine,
        seq_ids: Iterator[int],
        working: WorkingRows | None = None,
        states: RowStates | None = None,
    ) -> None:
        self.length = 0
        self.working = working
        self._states = states
        self._has_marks = False  # states of the last forward, which a commit makes findable
        self._manager, self._engine, self._seq_ids = manager, engine, seq_ids
        self._rows: list[_Row] = []
        self._tokens = np.empty((0, 0), np.int32)  # computed ones, then those of the prompt that are yet to come
        self._num_prompt = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_found(self) -> int:
        """How many tokens every row has in its blocks that were not computed here."""
        return min((row.num_pads + row.num_written for row in self._rows), default=0)

    @property
    def nums_pads(self) -> list[int]:
        """The number of pads of each row."""
        return [row.num_pads for row in self._rows]

    def is_findable(self, row: int) -> bool:
        """Whether others find the row: its K and V follow from its tokens alone."""
        return not self._rows[row].is_private

    def open(
        self,
        tokens: TokenRows,
        is_findable: Sequence[bool],
        namespace: bytes,
        cache_at: Sequence[int] = (),
        nums_pads: Sequence[int] | None = None,
    ) -> None:
        """Allocate blocks for rows of these tokens, and find the cached beginning of each. There must be no rows yet.

        A row that is not findable neither finds nor is found: its K and V do not follow from its tokens alone. Where
        there are states, all rows begin at one position: a state cannot be shortened. cache_at: see KVPageCache.
        nums_pads: the padding at the beginning of each row, less than its tokens; None for rows without any.
        """
        nums_pads = [0] * len(tokens) if nums_pads is None else nums_pads
        parts = [row[num_pads:] for row, num_pads in zip(tokens, nums_pads, strict=True)]
        max_cached: list[int] | None = None
        while True:
            rows = self._allocate_each(parts, is_findable, namespace, max_cached, cache_at)
            for row, num_pads in zip(rows, nums_pads, strict=True):
                row.num_pads = num_pads
            self._rows, self._tokens, self._num_prompt = rows, tokens, tokens.shape[1]
            max_cached = [row.count(self.num_found) for row in rows]
            if self._states is None or max_cached == [row.num_written for row in rows]:
                return
            self._release_all()

    def hide(self, places: Sequence[int]) -> None:
        """Make these rows, of which nothing is computed, unfindable and without found tokens."""
        hidden = self._allocate_each(list(self._tokens[list(places)]), [False] * len(places), b"")
        for index, row in zip(places, hidden, strict=True):
            self._give_back(self._rows[index], self._tokens[index, :0])
            self._rows[index] = row

    def skip_found(self) -> None:
        """Take the tokens that every row has found as computed. At least the last token of the prompt is left."""
        self.length = self.num_found

    def check(self, tokens: TokenRows, start: int, repeats: int = 1) -> None:
        """Raise ValueError unless `tokens`, with each row `repeats` times, are the known tokens from `start` on."""
        known = self._tokens[:, start : start + tokens.shape[1]].repeat(repeats, axis=0)
        if not np.array_equal(known, tokens[:, : known.shape[1]]):
            raise ValueError("input_ids must be those that the cache was made with, and follow what it holds")

    def begin(self, tokens: TokenRows, start: int) -> RowSlots:
        """Reserve blocks for every row's tokens from `start` on, [num_rows, at least 1]. `start` <= the length."""
        self.commit()
        self._reserve(end := start + tokens.shape[1])
        return self._slots(start, end)

    def begin_working(self, tokens: TokenRows, start: int) -> bool:
        """Reserve blocks and working rows, as `begin`. Return False, with nothing changed, without working memory."""
        end = start + tokens.shape[1]
        if self.working is None or not self.working.reserve(len(self), end):
            return False
        if self.working.is_empty or self._fills_block() or self._has_marks:
            self.commit()
        self._reserve(end)
        return True

    def tables(self) -> torch.Tensor:
        """Return RowSlots.block_tables, after all moves of blocks: the blocks may be read."""
        self._manager.do_moves(self._engine.do_move)
        return torch.from_numpy(self._manager.block_tables([row.seq_id for row in self._rows])).to(self._engine.device)

    def begin_states(self, start: int, end: int) -> RowPass | PackedPass | None:
        """Return the states of a forward that `begin` has reserved blocks for; None for a model without any."""
        if self._states is None:
            return None
        seq_ids = [row.seq_id for row in self._rows]
        if not self._states.forwards:
            starts, ends = ([row.count(position) for row in self._rows] for position in (start, end))
            return self._states.begin_packed(seq_ids, starts, ends)
        findable = [not row.is_private for row in self._rows]
        return self._states.begin(seq_ids, findable, start, end, self._num_prompt)

    def finish(self, tokens: TokenRows, start: int, states: RowPass | PackedPass | None = None) -> None:
        """Count the tokens that `begin` was given: their K and V are written in all layers, their states computed."""
        if states is not None:
            states.finish()
            self._has_marks = states.has_marks
        end = start + tokens.shape[1]
        known = np.concatenate([self._tokens[:, :start], tokens, self._tokens[:, end:]], axis=1)
        self.length, self._tokens = end, known

    def commit(self) -> None:
        """Make whole blocks of computed tokens findable."""
        start = min((row.num_written for row in self._rows), default=self.length)
        if self.working is not None and start < self.length and not self.working.is_empty:
            self.working.write(self._slots(start, self.length))
        for row, tokens in zip(self._rows, self._tokens, strict=True):
            if row.num_written < row.count(self.length):
                self._commit_row(row, row.known(tokens, self.length))
        if self._states is not None and self._has_marks:
            self._states.keep([row.seq_id for row in self._rows])
            self._has_marks = False

    def crop(self, length: int) -> None:
        """Forget every row's tokens from the `length`th on. Committed ones stay in the tree, for others to find.

        Raises OutOfBlocks where rows have to move to blocks of their own and none are free, ValueError where there are
        states, which cannot go back.
        """
        if self._states is not None and length != self.length:
            raise ValueError(f"rows with states must keep their {self.length} tokens, got a length of {length}")
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}], got {length}")
        if length == self.length:
            return
        stays = [row.num_written <= row.count(length) for row in self._rows]
        self._rearrange(range(len(self)), stays, self._tokens[:, :length], length)
        self.length = length

    def select(self, indices: Sequence[int]) -> None:
        """Put row indices[i] in place of row i. A row named twice shares its blocks, one not named is released.

        Raises OutOfBlocks where copies need blocks, ValueError for a row that does not exist or for no indices.
        """
        if not indices or min(indices) < 0 or max(indices) >= len(self):
            raise ValueError(f"indices must be rows in [0, {len(self)}), got {list(indices)}")
        self.commit()
        is_first = [index not in indices[:position] for position, index in enumerate(indices)]
        self._rearrange(indices, is_first, self._tokens, self.length)

    def release(self) -> None:
        """Commit the computed tokens and release all rows. Committed blocks can be found until they are evicted."""
        try:
            self.commit()
            if self._states is not None and self.length:
                self._states.keep_ends([row.seq_id for row in self._rows if not row.is_private])
        finally:
            self._release_all()

    def _release_all(self) -> None:
        if self.working is not None:
            self.working.drop()
        rows, tokens = self._rows, self._tokens[:, : self.length]
        self._rows, self._tokens, self.length = [], np.empty((0, 0), np.int32), 0
        for row, row_tokens in zip(rows, tokens, strict=True):
            self._give_back(row, row_tokens[row.num_pads :])

    # --- inside ---

    def _fills_block(self) -> bool:
        """Whether the tokens that are not committed fill a block, which others could find."""
        block_size, start = self._manager.block_size, min(row.num_written for row in self._rows)
        return start // block_size < self.length // block_size

    def _reserve(self, end: int) -> None:
        lacking = [max(row.count(end) - row.room, 0) for row in self._rows]
        if any(lacking):
            self._manager.append([row.seq_id for row in self._rows], lacking)
            for row, count in zip(self._rows, lacking, strict=True):
                row.room += count

    def _allocate_each(
        self,
        tokens: Sequence[TokenRow],
        is_findable: Sequence[bool],
        namespace: bytes,
        max_cached: Sequence[int] | None = None,
        cache_at: Sequence[int] = (),
    ) -> list[_Row]:
        rows: list[_Row] = []
        limits = [None] * len(tokens) if max_cached is None else max_cached
        try:
            for row_tokens, findable, limit in zip(tokens, is_findable, limits, strict=True):
                row_namespace = namespace if findable else b"private:" + uuid.uuid4().bytes
                marks = [position for position in cache_at if position <= len(row_tokens)]  # a row may be shorter
                rows.append(self._allocate(row_tokens, row_namespace, not findable, limit, marks))
        except BaseException:
            for row in rows:
                self._manager.release(row.seq_id)
            raise
        return rows

    def _allocate(
        self,
        tokens: TokenRow,
        namespace: bytes,
        is_private: bool,
        max_cached: int | None = None,
        cache_at: Sequence[int] = (),
    ) -> _Row:
        seq_id = next(self._seq_ids)
        named: dict[str, Any] = {} if self._states is None else {"cache_at": cache_at}
        allocation = self._manager.allocate(seq_id, tokens, namespace, max_cached_tokens=max_cached, **named)
        return _Row(seq_id, len(tokens), allocation.num_cached_tokens, namespace, is_private)

    def _commit_row(self, row: _Row, tokens: TokenRow) -> None:
        """Commit the tokens that are not yet: those after the prompt are findable if they leave what a prompt would."""
        is_hiding = self._states is not None and not self._states.shares_answers
        num_prompt = row.count(self._num_prompt)
        if is_hiding and row.num_written <= num_prompt < len(tokens):
            self._manager.commit(row.seq_id, tokens[row.num_written : num_prompt])
            self._manager.make_private(row.seq_id)
            row.num_written = num_prompt
        self._manager.commit(row.seq_id, tokens[row.num_written :])
        row.num_written = len(tokens)

    def _give_back(self, row: _Row, tokens: TokenRow) -> None:
        self._manager.release(row.seq_id)
        if row.is_private:
            self._manager.space.drop(tokens, row.namespace)

    def _rearrange(self, sources: Sequence[int], is_kept: Sequence[bool], tokens: TokenRows, length: int) -> None:
        """Make new rows of old ones: the row itself where it is kept, otherwise a copy of its first `length` tokens."""
        rows: list[_Row] = []
        try:
            for source, stays in zip(sources, is_kept, strict=True):
                row = self._rows[source]
                rows.append(row if stays else self._copy(row, tokens[source, row.num_pads :], row.count(length)))
        except BaseException:
            for row, stays, source in zip(rows, is_kept, sources, strict=False):
                if not stays:
                    self._give_back(row, row.known(tokens[source], length))
            raise
        if self.working is not None and list(sources) != list(range(len(self._rows))):
            self.working.drop()
        kept_ids = {row.seq_id for row in rows}
        old, old_tokens, old_length = self._rows, self._tokens, self.length
        self._rows, self._tokens, self.length = rows, tokens[list(sources)], length
        for row, row_tokens in zip(old, old_tokens, strict=True):
            if row.seq_id not in kept_ids:
                self._give_back(row, row.known(row_tokens, old_length))

    def _copy(self, row: _Row, tokens: TokenRow, length: int) -> _Row:
        """Make a second row with the first `length` tokens of `row`, and room for all of `tokens`, without padding."""
        if row.room == row.num_written == length:
            copied = replace(row, seq_id=next(self._seq_ids))
            self._manager.fork(row.seq_id, copied.seq_id)
            return copied
        # One token more than the row has: a lookup leaves the last one to compute.
        most = None if self._states is None else length
        if self._states is not None and not self._states.shares_answers:
            most = min(length, row.count(self._num_prompt))
        copied = self._allocate(np.append(tokens, _NO_TOKEN), row.namespace, row.is_private, most)
        copied.num_pads = row.num_pads
        if copied.num_written < length:
            self._copy_blocks(row, copied, length)
            self._commit_row(copied, tokens[:length])
        if self._states is not None and length:
            self._states.copy(row.seq_id, copied.seq_id)
        return copied

    def _copy_blocks(self, row: _Row, copied: _Row, length: int) -> None:
        """Copy the blocks of the tokens that `copied` has not found, up to the `length`th."""
        block_size = self._manager.block_size
        places = slice(copied.num_written // block_size, -(-length // block_size))
        tables = [self._manager.block_ids(seq_id)[places] for seq_id in (row.seq_id, copied.seq_id)]
        self._manager.do_moves(self._engine.do_move)
        self._engine.copy(torch.from_numpy(np.stack(tables, axis=1).astype(np.int64)))

    def _slots(self, start: int, end: int) -> RowSlots:
        self._manager.do_moves(self._engine.do_move)
        starts, ends = ([row.count(position) for row in self._rows] for position in (start, end))
        slots = self._manager.slot_mappings([row.seq_id for row in self._rows], starts, ends)
        at = 0
        for row, first, last in zip(self._rows, starts, ends, strict=True):
            slots[at : at + max(min(row.num_written, last) - first, 0)] = PAD_SLOT
            at += last - first
        return RowSlots(torch.from_numpy(slots).to(self._engine.device), self.tables(), start, end)
