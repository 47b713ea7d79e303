"""GroupLife: random operations on a BlockManager of any groups. Blocks and slots hold the prefixes they stand for.

A prompt begins at the largest position that all groups serve, by an oracle that tries each position.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from support.group_memory import GroupMemory, Prefixes
from support.life import Operation, ScarceLife
from support.whim import Whim

from kvpage import OutOfBlocks
from kvpage.blocks.groups.held_blocks import HeldBlocks
from kvpage.blocks.groups.states.held_checkpoints import HeldCheckpoints
from kvpage.blocks.manager import BlockManager

T = TypeVar("T")
NAMESPACES = [b"", b"", b"tenant"]
MOST_SEQUENCES = 4  # on the device; more of them would leave no slot for checkpoints


@dataclass
class Sequence:
    """path: of what is written: the numbers of the namespace and of each prefix."""

    namespace: bytes
    tokens: list[int]
    path: list[int]
    private_from: int | None = None
    num_left: int = 0  # whose blocks are given back


class GroupLife(ScarceLife):
    """manager: of any groups. memory: its cells. on_device, swapped: its sequences.

    most_held: the most blocks that a sequence has held in each window.
    """

    def __init__(self, manager: BlockManager, seed: int = 0) -> None:
        super().__init__(seed)
        self.manager, self.size = manager, manager.block_size
        self.memory, self.prefixes = GroupMemory(manager), Prefixes()
        self.on_device: dict[int, Sequence] = {}
        self.swapped: dict[int, Sequence] = {}
        self.pins: list[int] = []
        self.held: list[HeldBlocks | HeldCheckpoints] = []
        self.next_id = 0
        self.most_held = [0] * len(manager.windows)

    def operations(self) -> dict[Operation, float]:
        return {
            self.allocate: 8, self.compute: 12, self.decode: 6, self.append: 1, self.release_any: 6, self.fork: 1,
            self.swap_out: 2, self.swap_in: 3, self.make_private: 0.3, self.leave: 2, self.pin: 0.5,
            self.unpin: 0.5, self.prefetch: 0.5, self.drop: 0.5, self.give_back: 0.5, self.load: 1, self.hold: 1,
            self.let_go: 1, self.reset: 0.02,
        }  # fmt: skip

    def compare(self) -> None:
        self.manager.check()
        if self.rng.random() < 0.1:
            self.check()

    def end(self) -> None:
        self.check()
        self.reset()
        stats = self.manager.stats()
        self.figures["swapped"] += self.memory.num_moved.total()
        self.figures["host_hits"] += stats.space.host_hit_tokens
        self.figures["written_out"] += stats.space.written_blocks

    # --- the parts of a life ---

    def check(self) -> None:
        """All that can be read holds what it stands for."""
        self.memory.do_moves()
        self.manager.check()
        for seq_id, seq in self.on_device.items():
            self.memory.check_sequence(seq_id, seq.path, seq.num_left)
        self.memory.check_checkpoints(self.prefixes)
        for group, window in enumerate(self.manager.windows):
            self.most_held[group] = max([self.most_held[group], *map(window.num_held_by, self.on_device)])

    def begin(
        self,
        tokens: list[int],
        namespace: bytes = b"",
        priority: int = 0,
        max_cached_tokens: int | None = None,
        num_left_over: int = 1,
        cache_at: list[int] | None = None,
    ) -> int:
        """Begin a sequence; return what was cached of it."""
        most = len(tokens) if max_cached_tokens is None else max_cached_tokens
        ideal = self.ideal(tokens, namespace, min(len(tokens) - num_left_over, most))
        has_whims = isinstance(self.manager.space.rule, Whim)
        is_told = num_left_over == 1 and max_cached_tokens is None and not has_whims
        told = self.manager.explain(tokens, namespace) if is_told else None
        has_pins = bool(self.pins)
        about = tokens, namespace, priority, max_cached_tokens, num_left_over, cache_at or []
        allocation = self.attempt(lambda: self.manager.allocate(self.next_id + 1, *about))
        self.next_id += 1
        num_cached = allocation.num_cached_tokens
        if told is not None and told.num_cached_tokens != num_cached:
            assert self.manager.share_parts, "what explain says"
            assert num_cached < told.num_cached_tokens or (told.lacks_room and has_pins), "what explain says"
        assert num_cached <= min(len(tokens) - num_left_over, most)
        # Where blocks lack, a part that explain tells of is given up.
        has_part = self.manager.share_parts and ideal is not None and ideal < num_cached < ideal + self.size
        assert has_part or ideal in (None, num_cached), "the largest position that all groups serve"
        self.figures["parts"] += has_part
        assert len(allocation.block_ids) == -(-len(tokens) // self.size)
        path = self.prefixes.path(namespace, tokens[:num_cached])
        self.on_device[self.next_id] = Sequence(namespace, list(tokens), path)
        return num_cached

    def ideal(self, tokens: list[int], namespace: bytes, most: int) -> int | None:
        """The largest position that all groups serve and that is worth loading; None where something is on its way."""
        manager, rule = self.manager, self.manager.space.rule
        if not manager.enable_prefix_caching:
            return 0
        if isinstance(rule, Whim) or (manager.states and self.memory.has_moves):
            return None
        if manager.states:
            manager.states.space.drop_stale()  # those whose blocks were evicted, and are cached again since
        ids = manager.tree.look(np.array(tokens, np.int32), namespace)[0]
        num_on_device = int((ids[0] >= 0).sum())
        longest = self.ideal_within(tokens, namespace, most, ids)
        nearest = self.ideal_within(tokens, namespace, most, ids[:, :num_on_device])
        num_loaded = longest // self.size - num_on_device
        if num_loaded <= 0 or rule is None or rule.should_load(num_loaded, longest - nearest):
            return longest
        self.figures["not worth loading"] += 1
        return nearest

    def ideal_within(self, tokens: list[int], namespace: bytes, most: int, ids: np.ndarray) -> int:
        """The largest position that all groups serve with the blocks of a path."""
        manager = self.manager
        path, numbers = self.prefixes.path(namespace, tokens), self.memory.checkpoint_numbers()
        for position in range(most, 0, -1):
            num_blocks = position // self.size
            is_one = path[position] in numbers if manager.states else position % self.size == 0
            if is_one and num_blocks <= ids.shape[1] and self.has_windows(ids, position):
                return position
        return 0

    def has_windows(self, ids: np.ndarray, position: int) -> bool:
        """Whether each window has all whole blocks that the token after a position attends to."""
        for window in self.manager.windows:
            first = max(position - window.blocks.window.num_tokens + 1, 0) // self.size
            places = range(first, position // self.size)
            if not all(window.blocks.has(ids[:, place : place + 1])[0] for place in places):
                return False
        return True

    def write(self, seq_id: int, end: int) -> None:
        """Compute a portion of one sequence."""
        self.step({seq_id: end})

    def step(self, ends: dict[int, int], is_failing: bool = False) -> None:
        """Compute portions of some sequences together."""
        manager, begins = self.manager, {seq_id: len(self.on_device[seq_id].path) - 1 for seq_id in ends}
        manager.windows.open(list(ends), list(ends.values()))
        states = manager.states
        marks = {i: states.reserve(i, begins[i], end) if states else [] for i, end in ends.items()}
        self.memory.do_moves()
        for seq_id in ends:
            self.memory.check_sequence(seq_id, self.on_device[seq_id].path, self.on_device[seq_id].num_left)
        for seq_id, end in ends.items():
            self.fill(seq_id, end, marks[seq_id], is_failing)
        for seq_id, end in ends.items():
            self.fail(seq_id) if is_failing else self.complete(seq_id, end)

    def fill(self, seq_id: int, end: int, marks: list[tuple[int, int]], is_failing: bool = False) -> None:
        """Write what a portion computes."""
        path, begin = self.extended(self.on_device[seq_id], end), len(self.on_device[seq_id].path) - 1
        self.memory.write(seq_id, begin, end, path)
        if self.manager.states:
            slots = self.memory.slots["device"]
            for position, slot in marks:
                assert begin < position <= end
                slots[slot] = -2 if is_failing else path[position]
            slots[self.manager.states.slot_of(seq_id)] = -2 if is_failing else path[-1]

    def complete(self, seq_id: int, end: int) -> None:
        seq = self.on_device[seq_id]
        path = self.extended(seq, end)
        self.manager.commit(seq_id, seq.tokens[len(seq.path) - 1 : end])
        self.manager.keep(seq_id)
        seq.path = path

    def fail(self, seq_id: int) -> None:
        self.manager.give_up_marks(seq_id)
        assert not self.manager.keep_end(seq_id)
        self.release(seq_id)

    def release(self, seq_id: int) -> None:
        self.manager.release(seq_id)
        self.on_device.pop(seq_id, None)
        self.swapped.pop(seq_id, None)

    def extended(self, seq: Sequence, end: int) -> list[int]:
        """Return the path to `end`."""
        path = list(seq.path)
        for position in range(len(path) - 1, end):
            token: object = seq.tokens[position]
            if seq.private_from is not None and position >= seq.private_from:
                token = (id(seq), token)
            path.append(self.prefixes.number(path[-1], token))
        return path

    def attempt(self, call: Callable[[], T]) -> T:
        """Return the result of a call. A refused one changes nothing."""
        before = self.snapshot() if self.rng.random() < 0.2 else None
        try:
            return call()
        except OutOfBlocks:
            assert before in (None, self.snapshot())
            raise

    def snapshot(self) -> object:
        manager, stats = self.manager, self.manager.stats()
        lists = [manager.space._moves, *(window.blocks.moves for window in manager.windows)]
        lists += [manager.states.space.moves] if manager.states else []
        free = [tier.free_slots for tier in self.memory.slot_tiers.values()]
        windows = [replace(window.blocks.stats(), lost_blocks=0) for window in manager.windows]
        return replace(stats, space=replace(stats.space, refused_tokens=0)), list(map(len, lists)), free, windows

    def some_tokens(self, count: int) -> list[int]:
        bits = self.rng.getrandbits(max(count, 1) * 3)
        return [int(bits >> 3 * i & 7 == 7) for i in range(count)]

    def some_prompt(self) -> list[int]:
        edges = (1, self.size - 1, self.size, self.size + 1)
        count = self.rng.choice(edges) if self.rng.random() < 0.2 else self.rng.randrange(1, 5 * self.size)
        return self.some_tokens(max(count, 1))

    def any(self, is_whole: bool = True) -> int | None:
        """A sequence on the device. is_whole: one whose tokens are all written."""
        ids = [i for i, seq in self.on_device.items() if self.is_whole(seq) or not is_whole]
        return self.rng.choice(ids) if ids else None

    def num_written(self, seq_id: int) -> int:
        return len(self.on_device[seq_id].path) - 1

    def is_whole(self, seq: Sequence) -> bool:
        return len(seq.path) == len(seq.tokens) + 1

    # --- random operations ---

    def allocate(self) -> None:
        if len(self.on_device) >= MOST_SEQUENCES:
            self.release_any()
        tokens = self.some_prompt()
        most = self.rng.choice([None, None, None, self.rng.randrange(5 * self.size)])
        cache_at = self.rng.sample(range(1, len(tokens) + 1), min(self.rng.choice([0, 0, 1, 2]), len(tokens)))
        if self.rng.random() < 0.5:
            self.memory.do_moves()
        about = self.rng.choice(NAMESPACES), self.rng.choice([0, 0, 0, 3]), most, self.rng.choice([1, 1, 1, 0])
        num_cached = self.begin(tokens, *about, cache_at)
        self.figures["restored"] += num_cached > 0
        self.figures["tails"] += num_cached % self.size > 0
        self.figures["whole"] += num_cached == len(tokens)
        if self.rng.random() < 0.5:
            self.memory.do_moves()
            self.memory.check_sequence(self.next_id, self.on_device[self.next_id].path)

    def compute(self) -> None:
        """A step of some portions at once, which may fail."""
        ids = [i for i, seq in self.on_device.items() if not self.is_whole(seq)]
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randrange(1, 4)))
        ends = {i: self.rng.randint(len(self.on_device[i].path), len(self.on_device[i].tokens)) for i in chosen}
        if self.rng.random() < 0.5:
            ends = {i: len(self.on_device[i].tokens) for i in chosen}
        if self.manager.windows and self.rng.random() < 0.5:
            ends = {i: self.manager.windows.open_as_far(i, end) for i, end in ends.items()}
        self.step(ends, is_failing=self.rng.random() < 0.05)

    def decode(self) -> None:
        """One token more for some sequences at once, committed by rows or by id."""
        ids = [i for i, seq in self.on_device.items() if self.is_whole(seq)]
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randrange(1, 5)))
        rows = self.manager.rows.of(chosen)
        by_rows = self.rng.random() < 0.5
        self.attempt(lambda: self.manager.rows.append(rows) if by_rows else self.manager.append(chosen))
        for seq_id in chosen:
            self.on_device[seq_id].tokens = self.on_device[seq_id].tokens + self.some_tokens(1)
        ends = [len(self.on_device[i].tokens) for i in chosen]
        self.manager.windows.open(chosen, ends)
        self.memory.do_moves()
        self.check_inputs(chosen, ends)
        for seq_id, end in zip(chosen, ends, strict=True):
            self.fill(seq_id, end, [])
        if self.rng.random() < 0.3:
            for seq_id, end in zip(chosen, ends, strict=True):
                self.complete(seq_id, end)
            return
        last = [self.on_device[i].tokens[-1] for i in chosen]
        self.manager.rows.commit(rows, last)
        for seq_id, end in zip(chosen, ends, strict=True):
            self.on_device[seq_id].path = self.extended(self.on_device[seq_id], end)
        self.figures["decoded"] += len(chosen)

    def check_inputs(self, seq_ids: list[int], ends: list[int]) -> None:
        """The arguments of a step by rows are those by id."""
        slots, tables, lengths = self.manager.rows.inputs(self.manager.rows.of(seq_ids))
        assert lengths.tolist() == ends
        for seq_id, slot, table, end in zip(seq_ids, slots.tolist(), tables, ends, strict=True):
            block_ids = self.manager.block_ids(seq_id).tolist()
            assert slot == self.manager.slot_mapping(seq_id, end - 1, end)
            assert table.tolist() == [*block_ids, *[0] * (len(table) - len(block_ids))]

    def append(self) -> None:
        """Room for some tokens, which are computed later."""
        ids = [i for i, seq in self.on_device.items() if self.is_whole(seq)]
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randrange(4)))
        counts = [self.rng.randrange(self.size + 2) for _ in chosen]
        self.attempt(lambda: self.manager.append(chosen, counts))
        for seq_id, count in zip(chosen, counts, strict=True):
            self.on_device[seq_id].tokens = self.on_device[seq_id].tokens + self.some_tokens(count)

    def release_any(self) -> None:
        if self.swapped and self.rng.random() < 0.2:
            self.release(self.rng.choice(list(self.swapped)))
        elif (seq_id := self.any(is_whole=self.rng.random() < 0.7)) is not None:
            if self.rng.random() < 0.7:
                self.figures["kept_ends"] += self.manager.keep_end(seq_id)
            self.release(seq_id)

    def fork(self) -> None:
        if (seq_id := self.any()) is not None:
            self.next_id += 1
            seq = self.on_device[seq_id]
            first = self.manager.first_forkable(seq_id)
            num_tokens = self.rng.choice([len(seq.tokens), first, self.rng.randint(first, len(seq.tokens))])
            self.attempt(lambda: self.manager.fork(seq_id, self.next_id, num_tokens))
            private_from = None if seq.private_from is None else num_tokens
            tokens, path = seq.tokens[:num_tokens], seq.path[: num_tokens + 1]
            self.on_device[self.next_id] = Sequence(seq.namespace, list(tokens), list(path), private_from, seq.num_left)
            self.figures["forked amid"] += num_tokens < len(seq.tokens)

    def swap_out(self) -> None:
        if self.manager.tree.has_host_tier and (seq_id := self.any(is_whole=False)) is not None:
            space = self.manager.space
            try:
                self.attempt(lambda: self.manager.swap_out(seq_id))
            except OutOfBlocks as error:
                is_of_blocks = not self.manager.windows and not self.manager.states
                num_free = space.host_pool.num_free + space.tree.num_host_evictable
                assert not is_of_blocks or error.free == num_free < error.needed
                raise
            self.swapped[seq_id] = self.on_device.pop(seq_id)

    def swap_in(self) -> None:
        """All that was committed is there again, or as far as all groups have what is cached."""
        if not self.swapped:
            return
        seq_id = self.rng.choice(list(self.swapped))
        seq = self.swapped[seq_id]
        num_cached = self.attempt(lambda: self.manager.swap_in(seq_id, seq.tokens)).num_cached_tokens
        self.on_device[seq_id] = self.swapped.pop(seq_id)
        before = len(seq.path) - 1
        self.figures["resumed"] += num_cached == before
        self.figures["lost"] += num_cached < before
        if num_cached > before:  # of others with the same tokens
            assert seq.private_from is None and not self.manager.windows and not self.manager.states
            seq.path = self.extended(seq, num_cached)
        seq.path = seq.path[: num_cached + 1]
        if seq.private_from is not None:
            seq.private_from = min(seq.private_from, num_cached)

    def make_private(self) -> None:
        if (seq_id := self.any(is_whole=False)) is not None and self.on_device[seq_id].private_from is None:
            self.manager.make_private(seq_id)
            self.on_device[seq_id].private_from = len(self.on_device[seq_id].path) - 1

    def leave(self) -> None:
        """Blocks before a token are given back, but none that others may find."""
        if self.manager.windows or self.manager.states or (seq_id := self.any(is_whole=False)) is None:
            return
        seq = self.on_device[seq_id]
        num_tokens = self.rng.randint(0, len(seq.path) - 1)
        num_blocks = self.manager.release_before(seq_id, num_tokens)
        assert num_blocks == 0 or not self.manager.enable_prefix_caching or seq.private_from is not None
        if num_blocks:
            seq.num_left = num_tokens // self.size * self.size
        self.figures["left_blocks"] += num_blocks

    def pin(self) -> None:
        try:
            self.pins.append(self.manager.space.pin(self.some_prompt()))
        except ValueError as error:
            assert "pins must hold at most" in str(error)

    def unpin(self) -> None:
        if self.pins:
            self.manager.space.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))

    def prefetch(self) -> None:
        self.manager.space.prefetch(self.some_prompt(), self.rng.choice(NAMESPACES))

    def drop(self) -> None:
        self.manager.space.drop(self.some_prompt(), self.rng.choice(NAMESPACES))

    def give_back(self) -> None:
        if (seq_id := self.any(is_whole=False)) is not None and len(self.on_device[seq_id].path) > 1:
            self.manager.give_back_room(seq_id)
            seq = self.on_device[seq_id]
            seq.tokens = seq.tokens[: len(seq.path) - 1]

    def load(self) -> None:
        """K and V of a new sequence come from elsewhere: full layers' after what is cached, windows' as asked for."""
        if self.manager.states:
            return
        tokens, namespace = self.some_prompt(), self.rng.choice(NAMESPACES)
        before = self.begin(tokens, namespace, num_left_over=1)
        seq_id, end = self.next_id, self.rng.randint(before // self.size, len(tokens) // self.size) * self.size
        if before % self.size or end < before:
            return
        starts = [before, *self.manager.windows.skip_to(seq_id, end)]
        self.memory.do_moves()
        path = self.extended(self.on_device[seq_id], end)
        slots = [self.manager.slot_mapping(seq_id, before, end)]
        slots += [w.slots(seq_id, start, end) for w, start in zip(self.manager.windows, starts[1:], strict=True)]
        for owner, cells, start, places in zip(
            self.memory.owners, self.memory.blocks["device"], starts, slots, strict=True
        ):
            assert all(owner.pool.ref_count(place // self.size) == 1 for place in places.tolist())  # nobody reads it
            cells.reshape(-1)[places] = path[start + 1 :]
        self.figures["loaded"] += end - before
        self.manager.commit(seq_id, tokens[before:end])
        self.on_device[seq_id].path = path

    def hold(self) -> None:
        """All that is held stands for the prefix, until it is let go."""
        tokens, namespace = self.some_prompt(), self.rng.choice(NAMESPACES)
        self.memory.do_moves()
        path, device = self.prefixes.path(namespace, tokens), self.memory.blocks["device"]
        if self.manager.states and self.rng.random() < 0.5:
            kept = self.manager.states.hold(tokens, namespace)
            for checkpoint in kept.each:
                assert self.memory.slots["device"][checkpoint.slot] == path[checkpoint.num_tokens]
                cells = device[0][checkpoint.block_ids].ravel()[: checkpoint.num_tokens]
                assert cells.tolist() == path[1 : checkpoint.num_tokens + 1]
            self.held.append(kept)
            return
        held = self.manager.hold_cached(tokens, namespace)
        self.memory.do_moves()
        assert device[0][held.block_ids].ravel().tolist() == path[1 : held.num_tokens + 1]
        for window, cells in zip(held.windows, device[1:], strict=True):
            for place in np.flatnonzero(window.has).tolist():
                expected = path[place * self.size + 1 : (place + 1) * self.size + 1]
                assert cells[window.block_ids[place]].tolist() == expected
                self.figures["held"] += 1
        self.held.append(held)

    def let_go(self) -> None:
        if self.held:
            self.held.pop(self.rng.randrange(len(self.held))).release()

    def reset(self) -> None:
        """Forget all, after a release of all sequences: nothing is lost."""
        for seq_id in [*self.on_device, *self.swapped]:
            self.release(seq_id)
        while self.held:
            self.let_go()
        self.manager.reset_prefix_cache()
        self.pins.clear()  # they end with what is cached
        for owner in self.memory.owners:
            assert [owner.pool.num_free, owner.host_pool.num_free] == [
                owner.pool.num_blocks,
                owner.host_pool.num_blocks,
            ]
        for tier in self.memory.slot_tiers.values():
            assert tier.num_free == tier.num_slots
