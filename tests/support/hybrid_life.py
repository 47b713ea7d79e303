"""HybridLife: random operations on a BlockManager, whose states and blocks hold the prefixes they stand for."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from support.hybrid_memory import HybridMemory, Prefixes
from support.life import Operation, ScarceLife
from support.whim import Whim

from kvpage import OutOfBlocks
from kvpage.blocks.manager import BlockManager

T = TypeVar("T")
NAMESPACES = [b"", b"", b"tenant"]
MOST_SEQUENCES = 4  # on the device; more of them would leave no slot for checkpoints


@dataclass
class Sequence:
    namespace: bytes
    tokens: list[int]
    path: list[int]  # of what is written: the numbers of the namespace and of each prefix
    has_state: bool = True
    private_from: int | None = None
    branches: list[int] = field(default_factory=list)


class HybridLife(ScarceLife):
    def __init__(self, seed: int, manager: BlockManager) -> None:
        super().__init__(seed)
        self.manager = manager
        self.size = manager.block_size
        self.memory, self.prefixes = HybridMemory(manager), Prefixes()
        self.on_device: dict[int, Sequence] = {}
        self.swapped: dict[int, Sequence] = {}
        self.handles: list[int] = []
        self.next_id = 0

    def operations(self) -> dict[Operation, float]:
        return {
            self.allocate: 8, self.compute: 12, self.decode: 6, self.release: 7, self.fork: 1, self.swap_out: 2,
            self.swap_in: 3, self.make_private: 0.3, self.pin: 0.5, self.unpin: 0.5, self.prefetch: 0.5,
            self.drop: 0.5, self.reset: 0.02,
        }  # fmt: skip

    def compare(self) -> None:
        self.manager.check()
        if self.rng.random() < 0.1:
            self.check_all()

    def check_all(self) -> None:
        self.memory.do_moves()
        self.manager.check()
        for seq_id, seq in self.on_device.items():
            if seq.has_state:
                self.memory.check_sequence(seq_id, self.manager.states.slot_of(seq_id), seq.path)
        self.memory.check_checkpoints(self.prefixes)

    def attempt(self, call: Callable[[], T]) -> T:
        """Return the result of a call. One that is refused changes nothing."""
        before = self.snapshot() if self.rng.random() < 0.2 else None
        try:
            return call()
        except OutOfBlocks:
            assert before in (None, self.snapshot())
            raise

    def snapshot(self) -> object:
        manager, space = self.manager, self.manager.space
        stats = manager.stats()
        num_moves = [len(moves) for moves in (manager.states.space.moves, *([space._moves] if space.has_moves else []))]
        free = manager.states.space.device.free_slots, manager.states.space.host.free_slots
        return replace(stats, space=replace(stats.space, refused_tokens=0)), num_moves, free

    # --- what operations are made of ---

    def some_tokens(self, count: int) -> list[int]:
        bits = self.rng.getrandbits(max(count, 1) * 3)
        return [int(bits >> 3 * i & 7 == 7) for i in range(count)]

    def some_prompt(self) -> list[int]:
        edges = (1, self.size - 1, self.size, self.size + 1)
        count = self.rng.choice(edges) if self.rng.random() < 0.2 else self.rng.randrange(1, 5 * self.size)
        return self.some_tokens(max(count, 1))

    def any(self, wanted: bool = True) -> int | None:
        """A sequence with a state; `wanted`: whether all of its tokens are written."""
        ids = [i for i, seq in self.on_device.items() if seq.has_state and (self.is_whole(seq) or not wanted)]
        return self.rng.choice(ids) if ids else None

    def is_whole(self, seq: Sequence) -> bool:
        return len(seq.path) == len(seq.tokens) + 1

    def extend(self, seq: Sequence, end: int) -> list[int]:
        """Return the path to `end`."""
        path = list(seq.path)
        for position in range(len(path) - 1, end):
            token: object = seq.tokens[position]
            if seq.private_from is not None and position >= seq.private_from:
                token = (id(seq), token)
            path.append(self.prefixes.number(path[-1], token))
        return path

    def path_of(self, namespace: bytes, tokens: list[int], num_tokens: int) -> list[int]:
        return self.prefixes.path(namespace, tokens[:num_tokens])

    # --- operations ---

    def allocate(self) -> None:
        if len(self.on_device) >= MOST_SEQUENCES:
            self.release()
        tokens, namespace = self.some_prompt(), self.rng.choice(NAMESPACES)
        most = self.rng.choice([None, None, None, self.rng.randrange(5 * self.size)])
        left = self.rng.choice([1, 1, 1, 0])
        count = self.rng.choice([0, 0, 1, 2])
        cache_at = self.rng.sample(range(1, len(tokens) + 1), min(count, len(tokens)))
        if self.rng.random() < 0.5:
            self.memory.do_moves()
        ideal = self.ideal(tokens, namespace, min(len(tokens) - left, len(tokens) if most is None else most))
        self.next_id += 1
        priority = self.rng.choice([0, 0, 0, 3])
        has_whims = isinstance(self.manager.space.rule, Whim)
        is_told = left == 1 and most is None and not has_whims and self.rng.random() < 0.5
        told = self.manager.explain(tokens, namespace).num_cached_tokens if is_told else None
        given = self.attempt(
            lambda: self.manager.allocate(self.next_id, tokens, namespace, priority, most, left, cache_at)
        )
        num_cached = given.num_cached_tokens
        assert told in (None, num_cached), "what explain says"
        assert ideal is None or num_cached == ideal, "the longest checkpoint"
        assert len(given.block_ids) == -(-len(tokens) // self.size)
        path = self.path_of(namespace, tokens, num_cached)
        self.on_device[self.next_id] = Sequence(namespace, tokens, path)
        self.figures["restored"] += num_cached > 0
        self.figures["tails"] += num_cached % self.size > 0
        self.figures["whole"] += num_cached == len(tokens)
        if self.rng.random() < 0.5:
            self.memory.do_moves()
            self.memory.check_sequence(self.next_id, self.manager.states.slot_of(self.next_id), path)

    def ideal(self, tokens: list[int], namespace: bytes, most: int) -> int | None:
        """The longest prefix with a checkpoint and cached blocks; None where states are still on their way."""
        if self.memory.has_moves or self.manager.space.rule is not None:
            return None
        if not self.manager.enable_prefix_caching:
            return 0
        self.manager.states.space.drop_stale()  # those whose blocks were evicted, and are cached again since
        match = self.manager.tree.match(tokens, namespace, num_left_over=0)
        self.manager.tree.release(match)
        numbers, path = self.memory.checkpoint_numbers(), self.path_of(namespace, tokens, len(tokens))
        known = [t for t in range(1, most + 1) if numbers.get(path[t], match.num_blocks + 1) <= match.num_blocks]
        return max(known, default=0)

    def compute(self) -> None:
        """A step of some portions at once, which may fail."""
        ids = [i for i, seq in self.on_device.items() if seq.has_state and not self.is_whole(seq)]
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randrange(1, 4)))
        ends = {i: self.rng.randint(len(self.on_device[i].path), len(self.on_device[i].tokens)) for i in chosen}
        if self.rng.random() < 0.5:
            ends = {i: len(self.on_device[i].tokens) for i in chosen}
        marks = {i: self.manager.states.reserve(i, len(self.on_device[i].path) - 1, ends[i]) for i in chosen}
        self.memory.do_moves()
        for i in chosen:
            self.memory.check_sequence(i, self.manager.states.slot_of(i), self.on_device[i].path)
        is_failing = self.rng.random() < 0.05
        for i in chosen:
            self.write(i, ends[i], marks[i], is_failing)
        for i in chosen:
            (self.fail if is_failing else self.complete)(i, ends[i])

    def write(self, seq_id: int, end: int, marks: list[tuple[int, int]], is_failing: bool) -> None:
        seq, slots = self.on_device[seq_id], self.memory.slots["device"]
        begin = len(seq.path) - 1
        path = self.extend(seq, end)
        cells = self.manager.slot_mapping(seq_id, begin, end)
        self.memory.blocks["device"].reshape(-1)[cells] = path[begin + 1 :]
        for position, slot in marks:
            assert begin < position <= end
            slots[slot] = -2 if is_failing else path[position]
        slots[self.manager.states.slot_of(seq_id)] = -2 if is_failing else path[-1]

    def complete(self, seq_id: int, end: int) -> None:
        seq = self.on_device[seq_id]
        begin, path = len(seq.path) - 1, self.extend(seq, end)
        self.manager.commit(seq_id, seq.tokens[begin:end])
        self.manager.keep(seq_id)
        seq.path = path

    def fail(self, seq_id: int, end: int) -> None:
        self.manager.give_up_marks(seq_id)
        assert not self.manager.keep_end(seq_id)
        self.manager.release(seq_id)
        del self.on_device[seq_id]

    def decode(self) -> None:
        ids = [i for i, seq in self.on_device.items() if seq.has_state and self.is_whole(seq)]
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randrange(1, 5)))
        self.attempt(lambda: self.manager.append(chosen))
        for seq_id in chosen:
            self.on_device[seq_id].tokens = self.on_device[seq_id].tokens + self.some_tokens(1)
        self.memory.do_moves()
        for seq_id in chosen:
            end = len(self.on_device[seq_id].tokens)
            self.write(seq_id, end, [], False)
        rows = self.manager.rows.of(chosen)
        self.manager.rows.commit(rows, [self.on_device[i].tokens[-1] for i in chosen])
        for seq_id in chosen:
            self.on_device[seq_id].path = self.extend(self.on_device[seq_id], len(self.on_device[seq_id].tokens))

    def release(self) -> None:
        if self.swapped and self.rng.random() < 0.2:
            seq_id, _ = self.swapped.popitem()
        elif (seq_id := self.any(wanted=self.rng.random() < 0.7)) is None:
            return
        else:
            if self.rng.random() < 0.7:
                self.figures["kept_ends"] += self.manager.keep_end(seq_id)
            del self.on_device[seq_id]
        self.manager.release(seq_id)

    def fork(self) -> None:
        if (seq_id := self.any()) is not None:
            self.next_id += 1
            seq = self.on_device[seq_id]
            self.attempt(lambda: self.manager.fork(seq_id, self.next_id))
            self.on_device[self.next_id] = Sequence(seq.namespace, list(seq.tokens), list(seq.path))
            if seq.private_from is not None:
                self.on_device[self.next_id].private_from = len(seq.tokens)

    def swap_out(self) -> None:
        if (seq_id := self.any(wanted=False)) is not None:
            self.attempt(lambda: self.manager.swap_out(seq_id))
            self.swapped[seq_id] = self.on_device.pop(seq_id)

    def swap_in(self) -> None:
        if self.swapped:
            seq_id = self.rng.choice(list(self.swapped))
            seq = self.swapped[seq_id]
            given = self.attempt(lambda: self.manager.swap_in(seq_id, seq.tokens))
            self.on_device[seq_id] = self.swapped.pop(seq_id)
            self.figures["resumed"] += given.num_cached_tokens == len(seq.path) - 1
            self.figures["lost"] += given.num_cached_tokens < len(seq.path) - 1
            assert given.num_cached_tokens <= len(seq.path) - 1
            seq.path = seq.path[: given.num_cached_tokens + 1]

    def make_private(self) -> None:
        if (seq_id := self.any(wanted=False)) is not None and self.on_device[seq_id].private_from is None:
            self.manager.make_private(seq_id)
            self.on_device[seq_id].private_from = len(self.on_device[seq_id].path) - 1

    def pin(self) -> None:
        try:
            self.handles.append(self.manager.space.pin(self.some_prompt()))
        except ValueError as error:
            assert "pins must hold at most" in str(error)

    def unpin(self) -> None:
        if self.handles:
            self.manager.space.unpin(self.handles.pop(self.rng.randrange(len(self.handles))))

    def prefetch(self) -> None:
        self.manager.space.prefetch(self.some_prompt(), self.rng.choice(NAMESPACES))

    def drop(self) -> None:
        self.manager.space.drop(self.some_prompt(), self.rng.choice(NAMESPACES))

    def reset(self) -> None:
        """Forget all, after a release of all sequences: nothing is lost."""
        for seq_id in [*self.on_device, *self.swapped]:
            self.manager.release(seq_id)
        self.on_device.clear()
        self.swapped.clear()
        self.manager.reset_prefix_cache()
        self.handles.clear()
        stats = self.manager.stats()
        assert stats.slots is not None and stats.slots.num_free_slots == stats.slots.num_slots
        assert stats.slots.num_free_host_slots == stats.slots.num_host_slots
        assert stats.num_free_blocks == stats.num_blocks

    def end(self) -> None:
        self.check_all()
        self.reset()
