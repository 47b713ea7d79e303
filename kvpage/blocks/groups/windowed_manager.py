"""WindowedManager: BlockManager for models with layers that attend over a window. Each window has blocks of its own.

    allocate ─► open_windows ─► do_moves ─► the step writes K and V in all groups ─► commit
                room for the                                                         what lies behind the
                step's tokens                                                        windows is given back

A sequence holds in each window's group the blocks of its last window and of the step, however long it is. Blocks behind
the window stay cached until others want them. A prompt goes on after the longest run of whole blocks that the prefix
tree has, and whose last window each group has.
"""

from collections.abc import Sequence

import numpy as np

from kvpage._C import Match
from kvpage.blocks.explain import Explanation
from kvpage.blocks.groups.held_blocks import HeldBlocks, hold
from kvpage.blocks.groups.window_blocks import PathIds
from kvpage.blocks.groups.window_reach import reach_of_window
from kvpage.blocks.groups.window_table import WindowTable, needs_back
from kvpage.blocks.groups.windowed_tables import WindowedTables
from kvpage.blocks.lives.growth import tokens_left_over
from kvpage.blocks.states import Allocation, SeqId
from kvpage.blocks.stats import Query
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.tokens import Tokens, as_tokens, some_tokens
from kvpage.checks.values import as_integer, as_list, as_positions, check_namespace


class WindowedManager(WindowedTables):
    """Block tables of sequences in the full layers' group, and in a group for each window.

    Its rules are those of BlockManager, whose methods are for the full layers. A model without full layers has this
    group, too: with a CacheEngine without layers, whose blocks have no bytes.

    With a host tier each window has blocks there, too: for cached ones that are evicted, and for those of sequences
    that are swapped out. Pins keep the last window of their prefix as long as others can be evicted.

    Args:
        num_blocks: Blocks of the full layers.
        block_size: Tokens of a block, in all groups.
        enable_prefix_caching: Whether sequences share blocks.
        windows: The groups, at least one.
        num_host_blocks: As for BlockManager: of the full layers. So are host_policy, rule and pin_quota.

    Raises:
        ValueError: A number is out of range, or there is no window.
        TypeError: An argument is of another type.
    """

    # --- a sequence's life -------------------------------------------------------------------------------------------

    @uninterrupted
    def allocate(
        self,
        seq_id: SeqId,
        tokens: Tokens,
        namespace: bytes = b"",
        priority: int = 0,
        max_cached_tokens: int | None = None,
        num_left_over: int = 1,
        *,
        num_spare: int = 0,
        is_counted: bool = True,
    ) -> Allocation:
        """Give blocks to a new sequence. It begins after the longest prefix of whole blocks that all groups have.

        Windows get no room yet: `open_windows` makes it for the tokens of a step.

        Args:
            seq_id: An id that is not in use.
            tokens: The prompt, at least one token.
            namespace: Prefixes are shared within one namespace only.
            priority: 0 to 7. Blocks of full layers cached by a sequence of higher priority are evicted later.
            max_cached_tokens: The longest prefix to share; None for no limit.
            num_left_over: At least so many tokens are left to compute. 0 where the last logits are not needed.
            num_spare: As for BlockManager: of the full layers' blocks.
            is_counted: As for BlockManager.

        Returns:
            The tokens that need no computation, and the full layers' blocks of the whole prompt.

        Raises:
            OutOfBlocks: The rest does not fit.
            ValueError: The id is in use, there are no tokens, or a number is out of range.
            TypeError: An argument is of another type.
        """
        check_namespace(namespace)
        self._sequences.check_new(seq_id)
        tokens = some_tokens(tokens)
        left = tokens_left_over(len(tokens), max_cached_tokens, num_left_over, self.enable_prefix_caching)
        query = Query(len(tokens)) if is_counted else None
        match, _ = self.space.match(tokens, namespace, priority, left)
        try:
            self.tree.shorten(match, self._num_usable(match.tier_block_ids()))
            self._check_room_after(match.tier_block_ids())
            taken = self.space.give(match, self._sequences.blocks_for(len(tokens)), num_spare, query)
        except BaseException:
            self.tree.release(match)
            raise
        self._tables[seq_id] = tuple(WindowTable.after(blocks, match.tier_block_ids()) for blocks in self.windows)
        self._sequences.add(seq_id, match, taken, tokens, namespace)
        return Allocation(self.state(seq_id).num_written, self.block_ids(seq_id))

    @uninterrupted
    def open_windows(self, seq_ids: Sequence[SeqId], ends: Sequence[int]) -> None:
        """Make room in all windows for the tokens of the next step. What lies behind the windows is given back first.

        Args:
            seq_ids: Distinct sequences.
            ends: How many tokens each will have written: at least the committed ones, at most those with room.

        Raises:
            OutOfBlocks: The tokens do not fit into a window's group. No room is made.
            ValueError: Ids repeat, or an end is out of range.
        """
        seq_ids = as_list("seq_ids", seq_ids)
        wanted = self._check_ends(seq_ids, ends)
        for seq_id in seq_ids:
            self._move_on(seq_id)
        room = [
            (self.state(seq_id).num_written, self._sequences.blocks_for(end))
            for seq_id, end in zip(seq_ids, wanted, strict=True)
        ]
        for group, blocks in enumerate(self.windows):
            tables = [self._tables[seq_id][group] for seq_id in seq_ids]
            num_needed = sum(table.num_to_extend(*one) for table, one in zip(tables, room, strict=True))
            if num_needed > blocks.num_free:
                raise OutOfBlocks(num_needed, blocks.num_free)
        for seq_id, one in zip(seq_ids, room, strict=True):
            for table in self._tables[seq_id]:
                table.extend(*one)

    @uninterrupted
    def open_as_far(self, seq_id: SeqId, end: int) -> int:
        """Make room in all windows for as many of a sequence's next tokens as fit.

        Args:
            seq_id: The sequence.
            end: How many tokens it would have written.

        Returns:
            How many it can have written. That is `end` if all fit, and the committed ones if none fits.

        Raises:
            ValueError: `end` is out of range, as of `open_windows`.
        """
        self._check_ends([seq_id], [end])
        self._move_on(seq_id)
        num_written = self.state(seq_id).num_written
        end = min(end, *(table.most_tokens(num_written) for table in self._tables[seq_id]))
        if end <= num_written:
            return num_written
        for table in self._tables[seq_id]:
            table.extend(num_written, self._sequences.blocks_for(end))
        return end

    @uninterrupted
    def skip_to(self, seq_id: SeqId, num_tokens: int) -> list[int]:
        """Make room in all windows for the last window before so many tokens alone, whose K and V come from elsewhere.

        Then write them, and commit all of these tokens. Until then the sequence gets no other room.

        Args:
            seq_id: The sequence.
            num_tokens: Whole blocks, at least those of the committed tokens.

        Returns:
            For each window the first token to write. Those before it are there, or behind the window.

        Raises:
            OutOfBlocks: The tokens do not fit into a window's group. No room is made.
            ValueError: `num_tokens` or what is committed is out of range, or amid a block.
        """
        self._check_ends([seq_id], [num_tokens])
        tables, num_written = self._tables[seq_id], self.state(seq_id).num_written
        if num_tokens % self.block_size or num_written % self.block_size:
            both = f"got {num_tokens} after {num_written} committed ones"
            raise ValueError(f"num_tokens must be whole blocks of {self.block_size}, {both}")
        self._move_on(seq_id)
        for table, blocks in zip(tables, self.windows, strict=True):
            if table.num_to_skip(num_tokens) > blocks.num_free:
                raise OutOfBlocks(table.num_to_skip(num_tokens), blocks.num_free)
        for table in tables:
            table.skip_to(num_tokens)
        return [max(table.first * self.block_size, num_written) for table in tables]

    @uninterrupted
    def commit(self, seq_id: SeqId, tokens: Tokens) -> None:
        """Record that K and V of `tokens` have been written in all groups, and give back what lies behind the windows.

        Commits by rows do the same for full layers alone. Windows follow with the next `open_windows` or `release`.

        Args:
            seq_id: The sequence.
            tokens: Token ids, as many as there is room for at most.

        Raises:
            ValueError: There is no room for so many tokens, or windows are not opened for them. Or they are fewer than
                `skip_to` has made room for.
        """
        tokens = as_tokens(tokens)
        self._check_opened(seq_id, len(tokens))
        super().commit(seq_id, tokens)
        self._move_on(seq_id)

    @uninterrupted
    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int | None = None) -> None:
        """Make a second sequence with the same tokens, in the same blocks.

        Args:
            seq_id: A sequence whose tokens are all committed.
            new_seq_id: An id that is not in use.
            num_tokens: All tokens, or None: what lies behind a window is gone.

        Raises:
            ValueError: A token with room is not committed, or num_tokens is another.
        """
        num_all = self.state(seq_id).num_tokens
        if num_tokens is not None and as_integer("num_tokens", num_tokens) != num_all:
            raise ValueError(f"num_tokens must be all {num_all} of a sequence with windows, got {num_tokens}")
        super().fork(seq_id, new_seq_id)
        self._move_on(seq_id)
        self._tables[new_seq_id] = tuple(table.fork() for table in self._tables[seq_id])

    def first_forkable(self, seq_id: SeqId) -> int:
        """Return the fewest tokens that `fork` takes: all of them.

        Args:
            seq_id: The sequence.
        """
        return self.state(seq_id).num_tokens

    @uninterrupted
    def give_back_room(self, seq_id: SeqId) -> None:
        """Free the blocks that the sequence has beyond its committed tokens, in all groups.

        Raises:
            ValueError: `skip_to` has made room, and what comes there is not committed.
        """
        self._check_nothing_arrives(seq_id)
        super().give_back_room(seq_id)
        for table in self._tables[seq_id]:
            table.shorten(self._sequences.blocks_for(self.state(seq_id).num_written))

    @uninterrupted
    def release(self, seq_id: SeqId) -> None:
        """End a sequence, also one that is swapped out.

        Its cached blocks can be found until they are evicted. Its other blocks are free.
        """
        if seq_id in self._tables:
            self._move_on(seq_id)
        super().release(seq_id)
        for table in self._tables.pop(seq_id, ()):
            table.release()
        self._free_swapped(seq_id)

    # --- off the device and back -------------------------------------------------------------------------------------

    @uninterrupted
    def swap_out(self, seq_id: SeqId) -> None:
        """Free the sequence's device blocks in all groups. What is committed and not cached goes to the host.

        Args:
            seq_id: The sequence.

        Raises:
            OutOfBlocks: The host lacks room in a group.
            ValueError: `skip_to` has made room, and what comes there is not committed.
        """
        self._check_nothing_arrives(seq_id)
        self._move_on(seq_id)
        tables, num_written = self._tables[seq_id], self.state(seq_id).num_written
        for table, blocks in zip(tables, self.windows, strict=True):
            if table.num_own(num_written) > blocks.num_free_host:
                raise OutOfBlocks(table.num_own(num_written), blocks.num_free_host)
        super().swap_out(seq_id)
        self._swapped[seq_id] = tuple(table.swap_out(num_written) for table in self._tables.pop(seq_id))

    @uninterrupted
    def swap_in(self, seq_id: SeqId, tokens: Tokens, *, num_spare: int = 0) -> Allocation:
        """Give device blocks to a sequence that is swapped out, with their contents in all groups.

        Args:
            seq_id: A sequence that is swapped out.
            tokens: All of its tokens, at least the committed ones.
            num_spare: As for `allocate`.

        Returns:
            As of BlockManager. Where a group lacks cached blocks, all groups begin at the longest position that they
            have.

        Raises:
            OutOfBlocks: A group lacks room.
            ValueError: There are fewer tokens than committed ones.
        """
        before = self._sequences.swapped[seq_id].num_written
        allocation = super().swap_in(seq_id, tokens, num_spare=num_spare)
        path = self._sequences.path(seq_id)
        if allocation.num_cached_tokens == before:
            swapped = zip(self.windows, self._swapped.pop(seq_id), strict=True)
            self._tables[seq_id] = tuple(WindowTable.back(blocks, path, before, one) for blocks, one in swapped)
        else:
            self._tables[seq_id] = tuple(WindowTable.after(blocks, path) for blocks in self.windows)
            self._free_swapped(seq_id)
        return allocation

    # --- questions ---------------------------------------------------------------------------------------------------

    def num_cached(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Return how many tokens of a prompt a sequence need not compute. Nothing counts as used.

        Args:
            tokens: The prompt, at least one token, of which one is left over.
            namespace: Where to look.

        Returns:
            Whole blocks of tokens that all groups have.
        """
        return self._num_usable(self.tree.look(some_tokens(tokens)[:-1], namespace)[0]) * self.block_size

    @uninterrupted
    def hold_cached(self, tokens: Tokens, namespace: bytes = b"") -> HeldBlocks:
        """Hold the blocks of a prefix that are cached on the device, in all groups, until `release` of the result.

        Those of the last window are, and those in use. Of the others that a window has cached, the last ones are: a
        quarter of its group stays free.

        Args:
            tokens: The prefix, as far as it is cached.
            namespace: Where to look.

        Returns:
            The blocks. Their `release` is to be called once.
        """
        tokens = as_tokens(tokens)
        check_namespace(namespace)
        for seq_id in self._tables:
            self._move_on(seq_id)
        match = self.tree.match(tokens, namespace, num_left_over=0, is_hit=False)
        self.tree.trim(match)
        held = hold(match, self.windows, lambda: self._let_go(held, match))
        self._held.append(held)
        return held

    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        """Return how far full layers and each window reach into a prompt, and why not further. Nothing is changed.

        Args:
            tokens: A prompt, at least one token.
            namespace: Where to look.
        """
        tokens, found = some_tokens(tokens), super().explain(tokens, namespace)
        if not self.enable_prefix_caching:
            return found
        path, full = self.tree.look(tokens, namespace)[0], found.groups[0]
        windows = [reach_of_window(one, path, full, self._to_follow(group)) for group, one in enumerate(self.windows)]
        most = found.num_cached_tokens // self.block_size
        num_cached = self._num_usable(path[:, :most]) * self.block_size
        return Explanation(len(tokens), num_cached, (*found.groups, *windows), found.elsewhere)

    def check(self) -> None:
        """Check the invariants of BlockManager, and those of the windows' groups. For tests.

        Raises:
            RuntimeError: One is broken.
        """
        super().check()
        if set(self._tables) != set(self._sequences.on_device):
            raise RuntimeError(f"windows know sequences {list(self._tables)}, not {list(self._sequences.on_device)}")
        if set(self._swapped) != set(self._sequences.swapped):
            raise RuntimeError(f"windows know {list(self._swapped)} swapped, not {list(self._sequences.swapped)}")
        for group, blocks in enumerate(self.windows):
            ids = [block_id for tables in self._tables.values() for block_id in tables[group].ids]
            kept = [one.windows[group] for one in self._held]
            ids += [block_id for one in kept for block_id in one.block_ids[one.has].tolist()]
            blocks.check(ids, [host_id for one in self._swapped.values() for host_id in one[group].host_ids])
        for seq_id, tables in self._tables.items():
            for table in tables:
                table.check(self.state(seq_id).num_written)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _let_go(self, held: HeldBlocks, match: Match) -> None:
        self._held.remove(held)
        self.tree.release(match)

    def _num_usable(self, path: PathIds) -> int:
        """Return the largest number of blocks of a prefix after which a sequence can go on in all windows."""
        is_usable = np.logical_and.reduce([blocks.usable(path) for blocks in self.windows])
        return int(np.flatnonzero(is_usable)[-1])

    def _check_room_after(self, path: PathIds) -> None:
        """Raise OutOfBlocks unless windows have room for the blocks of the host that a sequence after a path needs."""
        for blocks in self.windows:
            first = min(blocks.first_block(path.shape[1] * self.block_size), path.shape[1])
            if (num_left := blocks.num_left_by(path[:, first:])) < 0:
                raise OutOfBlocks(-num_left, 0)

    def _fit(self, seq_id: SeqId, match: Match) -> None:
        """Shorten the match of a sequence that comes back: to its cached blocks if all groups have what they need.

        Otherwise to the longest position that all groups have. Raise OutOfBlocks where a window lacks room.
        """
        swapped, path = self._sequences.swapped[seq_id], match.tier_block_ids()
        each = list(zip(self.windows, self._swapped[seq_id], strict=True))
        cached = path[:, : swapped.first_block]
        needed = [needs_back(blocks, cached, swapped.num_written, one) for blocks, one in each]
        if match.num_blocks < swapped.first_block or any(one is None for one in needed):
            self.tree.shorten(match, self._num_usable(cached))
            self._check_room_after(match.tier_block_ids())
            return
        self.tree.shorten(match, swapped.first_block)
        for (blocks, one), part in zip(each, needed, strict=True):
            assert part is not None
            if (num_left := blocks.num_left_by(part) - len(one.host_ids)) < 0:
                raise OutOfBlocks(-num_left, 0)

    def _free_swapped(self, seq_id: SeqId) -> None:
        """Free the host blocks of a sequence that is not swapped out any more."""
        for blocks, one in zip(self.windows, self._swapped.pop(seq_id, ()), strict=False):
            blocks.host_pool.release(one.host_ids)

    def _check_ends(self, seq_ids: Sequence[SeqId], ends: Sequence[int]) -> list[int]:
        """Return the ends as integers, if each is one that a distinct sequence may have written."""
        states = [self.state(seq_id) for seq_id in seq_ids]
        if len(set(seq_ids)) != len(seq_ids):
            raise ValueError(f"seq_ids must be distinct, got {seq_ids}")
        wanted: list[int] = as_positions("ends", ends, len(seq_ids)).tolist()
        for seq_id, state, end in zip(seq_ids, states, wanted, strict=True):
            self._check_nothing_arrives(seq_id)
            if not state.num_written <= end <= state.num_tokens:
                raise ValueError(f"ends must be in [{state.num_written}, {state.num_tokens}], got {end} for {seq_id!r}")
        return wanted

    def _to_follow(self, group: int) -> set[int]:
        """Return the tree's blocks beside which a sequence is yet to cache some, as after commits by rows."""
        tables = {seq_id: each[group] for seq_id, each in self._tables.items()}
        return {full_id for one in tables for full_id in self.block_ids(one)[tables[one].num_cached :].tolist()}

    def _move_on(self, seq_id: SeqId) -> None:
        """Let windows follow what is committed: cache the blocks that the tree has, give back what lies behind."""
        state, tables = self.state(seq_id), self._tables[seq_id]
        if any(table.num_cached < state.num_cached_blocks for table in tables):
            full_ids = self.block_ids(seq_id)[: state.num_cached_blocks]
            for table in tables:
                table.cache(full_ids)
        for table in tables:
            table.leave(state.num_written)
