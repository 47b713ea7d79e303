"""WindowGroup: the layers that attend over one window. Each sequence holds the blocks of its last window.

    allocate ─► open ─► do_moves ─► the step writes K and V ─► commit
                room for the                                   blocks before the window
                step's tokens                                  are given back

However long a sequence is, it holds the blocks of its last window and of the step. Blocks before the window stay cached
until others want them. A prompt can go on where its last window is cached, see WindowBlocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvpage.blocks.explain import Ending, GroupReach
from kvpage.blocks.groups.group import Claim, GroupManager, Prompt
from kvpage.blocks.groups.window_blocks import Window, WindowBlocks
from kvpage.blocks.groups.window_table import SwappedWindow, WindowTable, needs_back
from kvpage.blocks.sequence_state import DEVICE, Ids, PathIds, SeqId, Slots
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.blocks.space import BlockSpace
from kvpage.checks.errors import OutOfBlocks
from kvpage.checks.interrupts import uninterrupted
from kvpage.checks.values import as_list, as_positions


@dataclass(frozen=True, slots=True, eq=False)
class HeldWindow:
    """The blocks of one window.

    Attributes:
        block_ids: By place, int32 [num_blocks], with 0 where there is none.
        has: Whether one is held, bool [num_blocks].
    """

    block_ids: Ids
    has: npt.NDArray[np.bool_]


class WindowGroup(GroupManager[Claim]):
    """The blocks of one window: of sequences, and cached.

    Attributes:
        blocks: Free and cached ones.
    """

    def __init__(self, window: Window, space: BlockSpace, sequences: Sequences, takes_tails: bool) -> None:
        self._takes_tails = takes_tails
        self.blocks = WindowBlocks(window, space)
        self._sequences = sequences
        self._size = space.block_size
        self._tables: dict[SeqId, WindowTable] = {}
        self._swapped: dict[SeqId, SwappedWindow] = {}
        self._held: list[HeldWindow] = []

    # --- beginning ---

    def claim(self, ids: PathIds, prompt: Prompt, most: int) -> Claim:
        """Return the largest position whose last window is cached: the last one of a block, or its first without tails.

        A smaller position of a block attends to all blocks that a larger one does, so the others need no look.
        """
        num_blocks = min(most // self._size, ids.shape[1])
        last = self._size - 1 if self._takes_tails else 0
        longest = min(num_blocks * self._size + last, most)
        if self.blocks.has(ids[:, self.blocks.first_block(longest) : num_blocks]).all():  # as of most prompts
            return Claim(longest)
        positions = np.minimum(np.arange(num_blocks + 1) * self._size + last, most)
        is_usable = self.blocks.usable_at(ids[:, :num_blocks], positions)
        return Claim(int(positions[is_usable][-1]))

    def check_begin(self, ids: PathIds, claim: Claim) -> None:
        """Raise OutOfBlocks unless there is room for the window's blocks that come from the host, and for a copy."""
        first = min(self.blocks.first_block(claim.num_tokens), ids.shape[1])
        num_left = self.blocks.num_left_by(ids[:, first:]) - (claim.num_tokens % self._size > 0)
        if num_left < 0:
            raise OutOfBlocks(-num_left, 0)

    def begin(self, seq_id: SeqId, prompt: Prompt, ids: PathIds, claim: Claim, own_ids: Ids) -> None:
        """Use the cached blocks of the window."""
        self._tables[seq_id] = WindowTable.after(self.blocks, ids, claim.num_tokens)
        self._free_swapped(seq_id)

    # --- room for a step ---

    def check_open(self, seq_ids: Sequence[SeqId], ends: Sequence[int]) -> None:
        """Raise OutOfBlocks without room for the tokens up to the ends. Blocks before windows are given back."""
        num_needed = 0
        for seq_id in seq_ids:
            self.move_on(seq_id)
        for seq_id, end in zip(seq_ids, ends, strict=True):
            num_needed += self._tables[seq_id].num_to_extend(self._written(seq_id), self._sequences.blocks_for(end))
        if num_needed > self.blocks.num_free:
            raise OutOfBlocks(num_needed, self.blocks.num_free)

    def open(self, seq_ids: Sequence[SeqId], ends: Sequence[int]) -> None:
        """Make room for the tokens up to the ends, after `check_open`."""
        for seq_id, end in zip(seq_ids, ends, strict=True):
            self._tables[seq_id].extend(self._written(seq_id), self._sequences.blocks_for(end))

    def most_tokens(self, seq_id: SeqId) -> int:
        """Return how many tokens a sequence can have written with all blocks that are free."""
        self.move_on(seq_id)
        return self._tables[seq_id].most_tokens(self._written(seq_id))

    def check_skip(self, seq_id: SeqId, num_tokens: int) -> None:
        """Raise OutOfBlocks unless there is room for the last window before `num_tokens` tokens."""
        self.move_on(seq_id)
        num_needed = self._tables[seq_id].num_to_skip(num_tokens)
        if num_needed > self.blocks.num_free:
            raise OutOfBlocks(num_needed, self.blocks.num_free)

    def skip_to(self, seq_id: SeqId, num_tokens: int) -> int:
        """Hold the last window before `num_tokens` tokens alone; return the first token to write from elsewhere."""
        table = self._tables[seq_id]
        table.skip_to(num_tokens)
        return max(table.first * self._size, self._written(seq_id))

    def move_on(self, seq_id: SeqId) -> None:
        """Follow the committed tokens: cache the blocks that the tree has, give back those before the window."""
        num_written, table = self._written(seq_id), self._tables[seq_id]
        if table.num_cached < num_written // self._size:
            num_in_tree = self._sequences.state(seq_id).num_cached_blocks
            if table.num_cached < num_in_tree:
                table.cache(self._sequences.path(seq_id, table.num_cached))
        table.leave(num_written)

    # --- while it runs ---

    def check_commit(self, seq_id: SeqId, num_tokens: int) -> None:
        """Raise ValueError unless there are blocks for that many more tokens, and at least those that are loaded."""
        num_written, table = self._written(seq_id), self._tables[seq_id]
        if num_tokens and num_written + num_tokens < table.num_arriving:
            least = table.num_arriving
            raise ValueError(
                f"tokens of {seq_id!r} must be committed up to {least}, as skip_to was told, got {num_tokens}"
            )
        if table.end < self._sequences.blocks_for(num_written + num_tokens):
            most = table.end * self._size
            raise ValueError(f"windows of {seq_id!r} must be opened for its tokens, got {num_tokens} beyond {most}")

    def committed(self, seq_id: SeqId, note: object) -> None:
        """Give back the blocks before the window."""
        self.move_on(seq_id)

    def first_forkable(self, seq_id: SeqId, num_tokens: int) -> int:
        """Return the fewest tokens whose window is held: blocks before it are gone."""
        return min(self._tables[seq_id].first_forkable, num_tokens)

    def fork(self, seq_id: SeqId, new_seq_id: SeqId, num_tokens: int) -> None:
        """Share the blocks of the window before `num_tokens` tokens with another sequence. Both move on later."""
        self._tables[new_seq_id] = self._tables[seq_id].fork(num_tokens)

    def check_settled(self, seq_id: SeqId) -> None:
        """Raise ValueError for a sequence without the blocks from its committed tokens to the tokens of `skip_to`."""
        num_written, least = self._written(seq_id), self._tables[seq_id].num_arriving
        if num_written < least:
            raise ValueError(f"{seq_id!r} must have committed the {least} tokens of skip_to first, has {num_written}")

    def shorten(self, seq_id: SeqId) -> None:
        """Free the blocks beyond the committed tokens."""
        self._tables[seq_id].shorten(self._sequences.blocks_for(self._written(seq_id)))

    def release(self, seq_id: SeqId) -> None:
        """Free the sequence's blocks, in the tier where they are. Cached ones stay."""
        if seq_id in self._tables:
            self.move_on(seq_id)
            self._tables.pop(seq_id).release()
        self._free_swapped(seq_id)

    # --- off the device and back ---

    def check_swap_out(self, seq_id: SeqId) -> None:
        """Raise OutOfBlocks unless the host has room for the blocks that are not cached once it has moved on."""
        state = self._sequences.state(seq_id)
        num_own = self._tables[seq_id].num_own(state.num_written, state.num_cached_blocks)
        if num_own > self.blocks.num_free_host:
            raise OutOfBlocks(num_own, self.blocks.num_free_host)

    def swap_out(self, seq_id: SeqId) -> None:
        """Move blocks that are not cached to the host."""
        num_written = self._sequences.swapped[seq_id].num_written
        self._swapped[seq_id] = self._tables.pop(seq_id).swap_out(num_written)

    def can_return(self, seq_id: SeqId, ids: PathIds) -> bool:
        """Return whether the cached blocks that the window needs are still there."""
        return self._needs_back(seq_id, ids) is not None

    def check_return(self, seq_id: SeqId, ids: PathIds) -> None:
        """Raise OutOfBlocks unless the device has room for the window's blocks."""
        needed = self._needs_back(seq_id, ids)
        assert needed is not None, "can_return has said so"
        num_left = self.blocks.num_left_by(needed) - len(self._swapped[seq_id].host_ids)
        if num_left < 0:
            raise OutOfBlocks(-num_left, 0)

    def return_to_device(self, seq_id: SeqId, ids: PathIds) -> None:
        """Bring back the window's blocks."""
        num_written = self._sequences.swapped[seq_id].num_written
        self._tables[seq_id] = WindowTable.back(self.blocks, ids, num_written, self._swapped.pop(seq_id))

    # --- the tree's blocks ---

    def blocks_gone(self, companions: Sequence[int]) -> None:
        """Forget the cached blocks beside them."""
        self.blocks.blocks_gone(companions)

    def blocks_cleared(self) -> None:
        """Forget all cached blocks."""
        self.blocks.clear()

    @uninterrupted
    def hold(self, ids: PathIds) -> HeldWindow:
        """Hold blocks beside the blocks of a prefix while a thread reads them, see WindowBlocks.to_hold."""
        for seq_id in self._tables:
            self.move_on(seq_id)
        has = self.blocks.to_hold(ids)
        table = np.zeros(len(has), np.int32)
        table[has] = self.blocks.use(np.ascontiguousarray(ids[:, has]))
        window = HeldWindow(table, has)
        self._held.append(window)
        return window

    @uninterrupted
    def let_go(self, held: HeldWindow) -> None:
        """End a `hold`."""
        self._held.remove(held)
        self.blocks.release(held.block_ids[held.has].tolist())

    # --- the arguments of a step ---

    def tables(self, seq_ids: Sequence[SeqId]) -> Ids:
        """Return the window's tables of several sequences, int32 [num_seqs, max_blocks].

        They are as wide as BlockManager.block_tables. Entries before the window, and after the room for the step, are
        0: the layers of the group do not read them.

        Args:
            seq_ids: Sequences on the device.

        Raises:
            RuntimeError: There are moves to make in this group.
        """
        self._check_moved()
        tables = [self._tables[seq_id] for seq_id in as_list("seq_ids", seq_ids)]
        most = max(
            (self._sequences.blocks_for(self._sequences.state(seq_id).num_tokens) for seq_id in seq_ids), default=0
        )
        return np.array([table.row(most) for table in tables], np.int32).reshape(len(tables), most)

    def slots(self, seq_id: SeqId, start: int, end: int) -> Slots:
        """Return the window's slots of the positions [start, end) of a sequence, int64. Raise as `slot_mappings`."""
        return self.slot_mappings([seq_id], [start], [end])

    def slot_mappings(self, seq_ids: Sequence[SeqId], starts: Sequence[int], ends: Sequence[int]) -> Slots:
        """Return the window's slots of the positions [starts[i], ends[i]) of each sequence, int64.

        Args:
            seq_ids: Sequences on the device.
            starts: The first position of each.
            ends: The position after the last of each.

        Raises:
            RuntimeError: There are moves to make in this group.
            ValueError: A position has no block: it is before the window, or the window is not opened for it.
        """
        self._check_moved()
        seq_ids = as_list("seq_ids", seq_ids)
        firsts = as_positions("starts", starts, len(seq_ids)).tolist()
        lasts = as_positions("ends", ends, len(seq_ids)).tolist()
        for seq_id, start, end in zip(seq_ids, firsts, lasts, strict=True):
            self._tables[seq_id].check_has(seq_id, start, end)
        slots = [self._tables[seq_id].slots(*span) for seq_id, *span in zip(seq_ids, firsts, lasts, strict=True)]
        return np.concatenate([np.empty(0, np.int64), *slots])

    def block_at(self, seq_id: SeqId, place: int) -> int:
        """Return the block of a sequence at a place; -1 where it is before the window."""
        return self._tables[seq_id].block_at(place)

    # --- questions ---

    def num_held_by(self, seq_id: SeqId) -> int:
        """Return how many blocks a sequence on the device holds."""
        return len(self._tables[seq_id].ids)

    def explain(self, ids: PathIds, prompt: Prompt, attention: GroupReach) -> GroupReach:
        """Return how far the window's blocks reach.

        What lacks was evicted if there was a block beside the tree's. A load brings the last window alone, without
        the blocks before it.
        """
        name = f"window of {self.blocks.window.num_tokens}"
        most = attention.num_tokens if self._takes_tails else ids.shape[1] * self._size
        num_tokens = self.claim(ids, prompt, most).num_tokens
        if num_tokens == most:
            return replace(attention, group=name, num_tokens=num_tokens)
        lacking = np.ascontiguousarray(ids[:, ~self.blocks.has(ids)])
        was_there = self._to_follow().isdisjoint(lacking[DEVICE].tolist()) and bool(self.blocks.had(lacking).any())
        return GroupReach(name, num_tokens, Ending.KV_EVICTED if was_there else Ending.NOT_CACHED)

    def check(self, on_device: Sequence[SeqId], swapped: Sequence[SeqId]) -> None:
        """Raise RuntimeError where an invariant is broken."""
        if set(self._tables) != set(on_device):
            raise RuntimeError(f"windows know sequences {list(self._tables)}, not {list(on_device)}")
        if set(self._swapped) != set(swapped):
            raise RuntimeError(f"windows know {list(self._swapped)} swapped, not {list(swapped)}")
        ids = [block_id for table in self._tables.values() for block_id in table.ids]
        ids += [block_id for window in self._held for block_id in window.block_ids[window.has].tolist()]
        self.blocks.check(ids, [host_id for swap in self._swapped.values() for host_id in swap.host_ids])
        for seq_id, table in self._tables.items():
            table.check(self._written(seq_id))

    # --- inside ---

    def _written(self, seq_id: SeqId) -> int:
        return self._sequences.num_written(seq_id)

    def _needs_back(self, seq_id: SeqId, ids: PathIds) -> PathIds | None:
        num_written = self._sequences.swapped[seq_id].num_written
        return needs_back(self.blocks, ids, num_written, self._swapped[seq_id])

    def _free_swapped(self, seq_id: SeqId) -> None:
        """Free the host blocks of a sequence that is not swapped out any more."""
        if seq_id in self._swapped:
            self.blocks.host_pool.release(self._swapped.pop(seq_id).host_ids)

    def _to_follow(self) -> set[int]:
        """Return the tree's blocks beside which a sequence has yet to cache its own, as after commits by rows."""
        return {
            full_id
            for seq_id, table in self._tables.items()
            for full_id in self._sequences.ids(seq_id)[table.num_cached :].tolist()
        }

    def _check_moved(self) -> None:
        if self.blocks.moves:
            raise RuntimeError("do_moves of the window's group must be called before a step")
