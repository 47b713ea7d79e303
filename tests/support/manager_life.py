"""ManagerLife: BlockManager beside a model in which every slot remembers the very prefix that was written into it."""

from dataclasses import dataclass

from support.life import Operation, ScarceLife
from support.slot_memory import SlotMemory
from support.whim import Whim

from kvpage import OutOfBlocks
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.space import HostPolicy

B = 4


class Model:
    """What a cache would hold: for each slot the namespace and all tokens up to and including its own."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.memory = SlotMemory(B)
        self.tokens: dict[int, list[int]] = {}
        self.namespaces: dict[int, bytes] = {}
        self.written: dict[int, int] = {}
        self.left: dict[int, int] = {}  # tokens behind the window, whose blocks are given back
        self.private: dict[int, tuple[int, int]] = {}  # from which token on, and a number for it
        self.num_swapped = 0

    def expected(self, seq_id: int, position: int) -> tuple:
        """What somebody else may read, or, from where a sequence is private on, what nobody but its forks may."""
        secret = self.private.get(seq_id)
        mark = secret[1] if secret and position >= secret[0] else None
        return self.namespaces[seq_id], tuple(self.tokens[seq_id][: position + 1]), mark

    def write(self, seq_id: int, end: int) -> None:
        start = self.written[seq_id]
        self.do_moves()
        for position, slot in zip(range(start, end), self.manager.slot_mapping(seq_id, start, end), strict=True):
            self.memory.device[int(slot)] = self.expected(seq_id, position)
        self.manager.commit(seq_id, self.tokens[seq_id][start:end])
        self.written[seq_id] = end

    def do_moves(self) -> None:
        self.num_swapped += self.memory.do(self.manager.take_moves())

    def verify(self) -> None:
        self.do_moves()
        self.manager.check()
        for seq_id, end in self.written.items():
            start = min(self.left.get(seq_id, 0), end)
            for position, slot in enumerate(self.manager.slot_mapping(seq_id, start, end).tolist(), start):
                assert self.memory.device[slot] == self.expected(seq_id, position), (seq_id, position)


@dataclass(frozen=True, slots=True)
class ManagerWorld:
    """after_hits: how many of them make a block worth a copy on the host at once; None for never. has_whims: whether a
    rule that decides anyhow says what is loaded.
    """

    num_host_blocks: int
    after_hits: int | None = None
    is_caching: bool = True
    has_whims: bool = False

    def life(self, seed: int) -> "ManagerLife":
        return ManagerLife(
            seed,
            num_blocks=24,
            enable_prefix_caching=self.is_caching,
            num_host_blocks=self.num_host_blocks,
            host_policy=HostPolicy(self.after_hits),
            pin_quota=8,
            rule=Whim(seed, B) if self.has_whims else None,
        )


WORLDS = [
    ManagerWorld(num_host_blocks, after_hits, is_caching, has_whims)
    for num_host_blocks, after_hits in [(0, None), (6, None), (60, None), (12, 0), (6, 2)]
    for is_caching, has_whims in [(True, False), (True, True), (False, False)]
]


class ManagerLife(ScarceLife):
    """Random operations on a small alphabet, so that prefixes meet, part, and meet again."""

    def __init__(self, seed: int, num_blocks: int, enable_prefix_caching: bool = True, **options: object) -> None:
        super().__init__(seed)
        self.manager = BlockManager(num_blocks, B, enable_prefix_caching, **options)
        self.swapped: dict[int, int] = {}  # tokens written of each
        self.handles: list[int] = []
        self.prompts: list[list[int]] = []
        self.model = Model(self.manager)
        self.next_id = 0

    def state(self) -> tuple[int, int]:
        return self.manager.num_free_blocks, self.manager.stats().num_sequences

    def some_tokens(self, num_tokens: int) -> list[int]:
        return [int(self.rng.random() < 0.1) for _ in range(num_tokens)]

    def operations(self) -> dict[Operation, float]:
        return {
            self.allocate: 6, self.write: 8, self.append: 5, self.fork: 3, self.release: 6, self.swap_out: 2,
            self.swap_in: 3, self.leave: 2, self.make_private: 0.5, self.give_back_room: 0.5, self.decode: 3,
            self.pin: 1, self.unpin: 1, self.prefetch: 1, self.drop: 1,
        }  # fmt: skip

    def do(self, operation: Operation) -> None:
        """What is refused has changed nothing, unless pins ended for it."""
        before, num_pinned, num_refused = self.state(), len(self.manager.space.pins), self.figures["refused"]
        super().do(operation)
        is_refused = self.figures["refused"] > num_refused
        assert not is_refused or before == self.state() or num_pinned > len(self.manager.space.pins)

    def compare(self) -> None:
        self.model.verify()

    def end(self) -> None:
        for seq_id in list(self.model.tokens):
            self.manager.release(seq_id)
        for handle in self.handles:
            self.manager.space.unpin(handle)
        self.manager.check()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        stats = self.manager.stats()
        self.figures["swapped"] += self.model.num_swapped
        self.figures["hits"] += stats.hit_tokens
        self.figures["host_hits"] += stats.space.host_hit_tokens
        self.figures["written_out"] += stats.space.written_blocks

    def some_prompt(self) -> list[int]:
        """Often one of the last ones, with another end."""
        tokens = self.some_tokens(self.rng.randrange(1, 5 * B))
        if self.prompts and self.rng.random() < 0.3:
            tokens = (self.rng.choice(self.prompts) + tokens)[: self.rng.randrange(1, 5 * B)]
        self.prompts = [*self.prompts[-20:], tokens]
        return list(tokens)

    def allocate(self) -> None:
        model, tokens = self.model, self.some_prompt()
        self.next_id += 1
        namespace = self.rng.choice([b"", b"tenant"])
        most = self.rng.choice([None, None, None, self.rng.randrange(5 * B)])
        allocation = self.manager.allocate(self.next_id, tokens, namespace, self.rng.choice([0, 0, 3]), most)
        assert most is None or allocation.num_cached_tokens <= most
        assert allocation.num_cached_tokens < len(tokens)
        self.figures["parts"] += allocation.num_cached_tokens % B > 0
        assert len(allocation.block_ids) == -(-len(tokens) // B)
        model.tokens[self.next_id], model.namespaces[self.next_id] = tokens, namespace
        model.written[self.next_id] = allocation.num_cached_tokens

    def any(self) -> int | None:
        return self.rng.choice(list(self.model.written)) if self.model.written else None

    def write(self) -> None:
        if (seq_id := self.any()) is not None:
            self.model.write(seq_id, self.rng.randint(self.model.written[seq_id], len(self.model.tokens[seq_id])))

    def append(self) -> None:
        ids = [i for i, written in self.model.written.items() if written == len(self.model.tokens[i])]
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randrange(4)))
        counts = [self.rng.randrange(B + 2) for _ in chosen]
        self.manager.append(chosen, counts)
        for seq_id, count in zip(chosen, counts, strict=True):
            self.model.tokens[seq_id] = self.model.tokens[seq_id] + self.some_tokens(count)

    def decode(self) -> None:
        """One token more for some sequences, by rows."""
        model, steps = self.model, self.manager.rows
        ids = [i for i, written in model.written.items() if written == len(model.tokens[i])]
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randrange(6)))
        rows = steps.of(chosen)
        steps.append(rows)
        for seq_id in chosen:
            model.tokens[seq_id] = model.tokens[seq_id] + self.some_tokens(1)
        model.do_moves()
        slots, tables, lengths = steps.inputs(rows)
        for seq_id, slot, table, length in zip(chosen, slots.tolist(), tables, lengths.tolist(), strict=True):
            block_ids = self.manager.block_ids(seq_id)
            assert length == len(model.tokens[seq_id]) and slot == self.manager.slot_mapping(seq_id, length - 1, length)
            assert table.tolist() == [*block_ids.tolist(), *[0] * (len(table) - len(block_ids))]
            model.memory.device[slot] = model.expected(seq_id, length - 1)
        steps.commit(rows, [model.tokens[seq_id][-1] for seq_id in chosen])
        for seq_id in chosen:
            model.written[seq_id] = len(model.tokens[seq_id])
        self.figures["decoded"] += len(chosen)

    def fork(self) -> None:
        seq_id = self.any()
        if seq_id is None or self.model.written[seq_id] != len(self.model.tokens[seq_id]):
            return
        model, num_tokens = self.model, len(self.model.tokens[seq_id])
        fewest = num_tokens // B * B if self.manager.enable_prefix_caching else model.left.get(seq_id, 0)
        num_kept = self.rng.randint(max(fewest, 1), num_tokens)
        self.figures["part_forks"] += num_kept < num_tokens
        self.next_id += 1
        self.manager.fork(
            seq_id, self.next_id, self.rng.choice([num_kept, None]) if num_kept == num_tokens else num_kept
        )
        model.tokens[self.next_id], model.written[self.next_id] = model.tokens[seq_id][:num_kept], num_kept
        model.namespaces[self.next_id], model.left[self.next_id] = model.namespaces[seq_id], model.left.get(seq_id, 0)
        if seq_id in model.private:
            model.private[self.next_id] = model.private[seq_id]

    def give_back_room(self) -> None:
        seq_id = self.any()
        if seq_id is not None and self.model.written[seq_id]:
            self.manager.give_back_room(seq_id)
            self.model.tokens[seq_id] = self.model.tokens[seq_id][: self.model.written[seq_id]]
            assert len(self.manager.block_ids(seq_id)) == -(-self.model.written[seq_id] // B)

    def make_private(self) -> None:
        if (seq_id := self.any()) is not None:
            self.manager.make_private(seq_id)
            self.model.private.setdefault(seq_id, (self.model.written[seq_id], seq_id))

    def leave(self) -> None:
        if (seq_id := self.any()) is not None:
            num_tokens = self.rng.randint(0, self.model.written[seq_id])
            num_blocks = self.manager.release_before(seq_id, num_tokens)
            assert num_blocks == 0 or not self.manager.enable_prefix_caching or seq_id in self.model.private
            self.figures["left_blocks"] += num_blocks
            if num_blocks:
                self.model.left[seq_id] = num_tokens // B * B

    def release(self) -> None:
        if self.swapped and self.rng.random() < 0.2:
            seq_id, written = self.swapped.popitem()
            self.model.written[seq_id] = written
        else:
            seq_id = self.any()
        if seq_id is not None:
            self.manager.release(seq_id)
            for table in (self.model.tokens, self.model.namespaces, self.model.written):
                del table[seq_id]
            self.model.left.pop(seq_id, None)
            self.model.private.pop(seq_id, None)

    def swap_out(self) -> None:
        if (seq_id := self.any()) is not None:
            space = self.manager.space
            try:
                self.manager.swap_out(seq_id)
            except OutOfBlocks as error:
                assert error.free == space.host_pool.num_free + space.tree.num_host_evictable < error.needed
                raise
            self.swapped[seq_id] = self.model.written.pop(seq_id)

    def swap_in(self) -> None:
        if self.swapped:
            seq_id = self.rng.choice(list(self.swapped))
            allocation = self.manager.swap_in(seq_id, self.model.tokens[seq_id])
            written = self.swapped.pop(seq_id)
            self.figures["restored"] += allocation.num_cached_tokens >= written > 0
            self.model.written[seq_id] = allocation.num_cached_tokens

    def pin(self) -> None:
        try:
            self.handles.append(self.manager.space.pin(self.some_tokens(self.rng.randrange(5 * B))))
        except ValueError as error:
            assert "pins must hold at most" in str(error)

    def unpin(self) -> None:
        if self.handles:
            self.manager.space.unpin(self.handles.pop(self.rng.randrange(len(self.handles))))

    def prefetch(self) -> None:
        self.manager.space.prefetch(self.some_tokens(self.rng.randrange(5 * B)))

    def drop(self) -> None:
        self.manager.space.drop(self.some_tokens(self.rng.randrange(5 * B)))
