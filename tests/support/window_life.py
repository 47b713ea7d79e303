"""WindowLife: random operations on a BlockManager, whose cells in all groups hold the prefixes they stand for.

What no sequence may read is poisoned before each look: free blocks, and those whose contents have left the tree.
"""

from dataclasses import dataclass

import numpy as np
from support.life import Operation, ScarceLife

from kvpage.blocks.groups.held_blocks import HeldBlocks
from kvpage.blocks.groups.window_blocks import Window
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.space import HostPolicy

POISON = "poison"
B = 4
Tokens = list[int]


@dataclass(frozen=True, slots=True)
class WindowWorld:
    windows: tuple[int, ...]  # tokens of each
    num_blocks: int
    num_window_blocks: int  # of each window
    is_caching: bool = True
    num_host_blocks: int = 0
    num_host_window_blocks: int = 0  # of each window
    after_hits: int | None = None
    pin_quota: int = 0

    def life(self, seed: int) -> "WindowLife":
        groups = [Window(window, self.num_window_blocks, self.num_host_window_blocks) for window in self.windows]
        options = {"host_policy": HostPolicy(self.after_hits), "pin_quota": self.pin_quota}
        manager = BlockManager(
            self.num_blocks, B, self.is_caching, groups=groups, num_host_blocks=self.num_host_blocks, **options
        )
        return WindowLife(manager, seed)


WORLDS = [
    WindowWorld(windows, num_blocks, num_window_blocks, is_caching)
    for windows, num_blocks, num_window_blocks in [((5,), 64, 64), ((1, 9), 40, 12), ((6, 4), 20, 20)]
    for is_caching in (True, False)
] + [
    WindowWorld((5,), 24, 24, num_host_blocks=64, num_host_window_blocks=64),
    WindowWorld((1, 9), 24, 12, num_host_blocks=16, num_host_window_blocks=8, after_hits=1, pin_quota=8),
    WindowWorld((6, 4), 20, 12, num_host_blocks=40, num_host_window_blocks=2, after_hits=0, pin_quota=4),
    WindowWorld((7,), 40, 9, num_host_blocks=4, num_host_window_blocks=40, pin_quota=8),
    WindowWorld((5,), 20, 10, False, num_host_blocks=20, num_host_window_blocks=10),
]


class WindowLife(ScarceLife):
    def __init__(self, manager: BlockManager, seed: int = 0) -> None:
        super().__init__(seed)
        self.manager, self.size = manager, manager.block_size
        self.pools = [manager.pool, *(window.blocks.pool for window in manager.windows)]
        self.host_pools = [manager.space.host_pool, *(window.blocks.host_pool for window in manager.windows)]
        self.cells, self.host_cells = (
            [np.full((pool.num_blocks, self.size), POISON, object) for pool in pools]
            for pools in (self.pools, self.host_pools)
        )
        self.swapped: list[int] = []
        self.away: dict[int, Tokens] = {}  # tokens of those
        self.pins: list[int] = []
        self.tokens: dict[int, Tokens] = {}
        self.names: dict[int, bytes] = {}
        self.written: dict[int, int] = {}
        self.secret: dict[int, int] = {}
        self.held: list[HeldBlocks] = []
        self.next_id = 0
        self.most_held = [0] * len(manager.windows)

    # --- the parts of a life ---

    def key(self, seq_id: int, position: int) -> object:
        secret = self.secret.get(seq_id)
        mark = seq_id if secret is not None and position >= secret else None
        return self.names[seq_id], tuple(self.tokens[seq_id][: position + 1]), mark

    def begin(self, prompt: Tokens, namespace: bytes = b"", **options: int) -> int:
        expected = self.longest(prompt, namespace, **options)
        explained = self.manager.explain(prompt, namespace).num_cached_tokens
        assert options or explained == expected
        given = self.manager.allocate(self.next_id + 1, prompt, namespace, **options)
        self.next_id += 1
        assert given.num_cached_tokens == expected
        self.tokens[self.next_id], self.names[self.next_id] = list(prompt), namespace
        self.written[self.next_id] = given.num_cached_tokens
        self.figures["shared"] += given.num_cached_tokens
        self.check_sequence(self.next_id)
        return given.num_cached_tokens

    def longest(self, prompt: Tokens, namespace: bytes, max_cached_tokens: int | None = None) -> int:
        """The oracle: the longest run of whole blocks whose K and V are cached in each group, as far as it is read."""
        if not self.manager.enable_prefix_caching:
            return 0
        most = len(prompt) - 1 if max_cached_tokens is None else min(max_cached_tokens, len(prompt) - 1)
        path = self.manager.tree.look(np.array(prompt[: max(most, 0)], np.int32), namespace)[0]
        for count in range(path.shape[1], 0, -1):
            if all(self.has_window(g, path, count) for g in range(len(self.manager.windows))):
                return count * self.size
        return 0

    def has_window(self, group: int, path: np.ndarray, count: int) -> bool:
        blocks, end = self.manager.windows[group].blocks, count * self.size
        needed = {position // self.size for position in range(max(end - blocks.window.num_tokens + 1, 0), end)}
        return all(blocks.has(path[:, place : place + 1])[0] for place in needed)

    def write(self, seq_id: int, end: int) -> None:
        """Compute a portion."""
        start = self.written[seq_id]
        self.manager.windows.open([seq_id], [end])
        self.do_moves()
        self.check_sequence(seq_id)
        self.fill(seq_id, start, end)
        self.manager.commit(seq_id, self.tokens[seq_id][start:end])
        self.written[seq_id] = end

    def fill(self, seq_id: int, start: int, end: int) -> None:
        keys = [self.key(seq_id, position) for position in range(start, end)]
        slots = [self.manager.slot_mapping(seq_id, start, end)]
        slots += [self.manager.windows[g].slots(seq_id, start, end) for g in range(len(self.manager.windows))]
        for cells, places in zip(self.cells, slots, strict=True):
            assert len(set(places.tolist())) == end - start
            for place, key in zip(places.tolist(), keys, strict=True):
                cells[place // self.size, place % self.size] = key

    def do_moves(self) -> None:
        for group, moves in enumerate([self.manager.space, *(window.blocks for window in self.manager.windows)]):
            moves.do_moves(lambda move, group=group: self.copy(group, move.kind, move.pairs))
        every = [*zip(self.cells, self.pools, strict=True), *zip(self.host_cells, self.host_pools, strict=True)]
        for cells, pool in every:
            cells[pool.generations(np.arange(pool.num_blocks, dtype=np.int32)) % 2 == 0] = POISON

    def copy(self, group: int, kind: str, pairs: np.ndarray) -> None:
        device, host = self.cells[group], self.host_cells[group]
        source, target = {"copy": (device, device), "swap_out": (device, host), "swap_in": (host, device)}[kind]
        target[pairs[:, 1]] = source[pairs[:, 0]]
        self.figures[kind] += len(pairs)

    def check_sequence(self, seq_id: int) -> None:
        """All that the next token attends to is there, in the full layers and in each window."""
        self.do_moves()
        end = self.written[seq_id]
        slots = self.manager.slot_mapping(seq_id, 0, end).tolist()
        assert [self.cells[0][s // self.size, s % self.size] for s in slots] == [
            self.key(seq_id, i) for i in range(end)
        ]
        for g, window in enumerate(self.manager.windows):
            first = max(end - window.blocks.window.num_tokens + 1, 0)
            slots = self.manager.windows[g].slots(seq_id, first, end).tolist()
            table = self.manager.windows[g].tables([seq_id])[0]
            assert table.shape == self.manager.block_tables([seq_id])[0].shape
            assert [table[i // self.size] * self.size + i % self.size for i in range(first, end)] == slots
            found = [self.cells[g + 1][slot // self.size, slot % self.size] for slot in slots]
            assert found == [self.key(seq_id, i) for i in range(first, end)], (seq_id, g)

    def num_held(self, group: int, seq_id: int) -> int:
        return self.manager.windows[group].num_held_by(seq_id)

    def check(self) -> None:
        self.do_moves()
        self.manager.check()
        for seq_id in self.tokens:
            self.check_sequence(seq_id)
        for g in range(len(self.manager.windows)):
            self.most_held[g] = max([self.most_held[g], *(self.num_held(g, seq_id) for seq_id in self.tokens)])

    # --- random operations ---

    def some_tokens(self, count: int) -> Tokens:
        return [int(self.rng.random() < 0.08) for _ in range(count)]

    def whole(self) -> list[int]:
        return [seq_id for seq_id, tokens in self.tokens.items() if self.written[seq_id] == len(tokens)]

    def any(self, ids: list[int]) -> int | None:
        return self.rng.choice(ids) if ids else None

    def operations(self) -> dict[Operation, float]:
        return {
            self.begin_any: 5, self.write_any: 9, self.decode: 6, self.fork_any: 1, self.release_any: 4,
            self.give_back: 1, self.hide: 0.3, self.drop: 0.5, self.reset: 0.1, self.load: 2, self.keep: 2,
            self.let_go: 2, self.swap_out: 1.5, self.swap_in: 1.5, self.pin: 0.5, self.unpin: 0.5,
        }  # fmt: skip

    def compare(self) -> None:
        self.check()

    def end(self) -> None:
        self.reset()

    def begin_any(self) -> None:
        most = self.rng.choice([None, None, None, self.rng.randrange(8 * self.size)])
        options = {} if most is None else {"max_cached_tokens": most}
        prompt = self.some_tokens(self.rng.randrange(1, 8 * self.size))
        self.begin(prompt, self.rng.choice([b"", b"", b"tenant"]), **options)

    def write_any(self) -> None:
        if (seq_id := self.any(list(self.tokens))) is not None:
            self.write(seq_id, self.rng.randint(self.written[seq_id], len(self.tokens[seq_id])))

    def decode(self) -> None:
        """One token more for some sequences at once; committed by id or by row."""
        chosen = self.rng.sample(self.whole(), min(len(self.whole()), self.rng.randrange(1, 5)))
        self.manager.append(chosen)
        for seq_id in chosen:
            self.tokens[seq_id] = self.tokens[seq_id] + self.some_tokens(1)
        self.manager.windows.open(chosen, [len(self.tokens[seq_id]) for seq_id in chosen])
        self.do_moves()
        for seq_id in chosen:
            self.fill(seq_id, self.written[seq_id], len(self.tokens[seq_id]))
            self.written[seq_id] += 1
        if self.rng.random() < 0.5:
            self.manager.rows.commit(self.manager.rows.of(chosen), [self.tokens[seq_id][-1] for seq_id in chosen])
            return
        for seq_id in chosen:
            self.manager.commit(seq_id, self.tokens[seq_id][-1:])

    def fork_any(self) -> None:
        if (seq_id := self.any([i for i in self.whole() if i not in self.secret])) is not None:
            self.next_id += 1
            self.manager.fork(seq_id, self.next_id)
            self.tokens[self.next_id], self.names[self.next_id] = list(self.tokens[seq_id]), self.names[seq_id]
            self.written[self.next_id] = self.written[seq_id]

    def release_any(self) -> None:
        if (seq_id := self.any(list(self.tokens))) is not None:
            self.release(seq_id)

    def release(self, seq_id: int) -> None:
        self.manager.release(seq_id)
        for of in (self.tokens, self.names, self.written, self.secret):
            of.pop(seq_id, None)

    def swap_out(self) -> None:
        if self.manager.tree.has_host_tier and (seq_id := self.any(list(self.tokens))) is not None:
            self.manager.swap_out(seq_id)
            self.swapped.append(seq_id)
            self.away[seq_id] = self.tokens.pop(seq_id)

    def swap_in(self) -> None:
        """All that was committed is there again, or as far as all groups have what is cached."""
        if (seq_id := self.any(self.swapped)) is None:
            return
        tokens, before = self.away[seq_id], self.written[seq_id]
        given = self.manager.swap_in(seq_id, tokens)
        self.swapped.remove(seq_id)
        self.tokens[seq_id] = self.away.pop(seq_id)
        assert given.num_cached_tokens <= before
        assert given.num_cached_tokens == before or given.num_cached_tokens % self.size == 0
        self.figures["whole" if given.num_cached_tokens == before else "in part"] += 1
        self.written[seq_id] = given.num_cached_tokens
        if (secret := self.secret.get(seq_id)) is not None:
            self.secret[seq_id] = min(secret, given.num_cached_tokens)
        self.check_sequence(seq_id)

    def pin(self) -> None:
        try:
            self.pins.append(self.manager.space.pin(self.some_tokens(5 * self.size)))
        except ValueError as error:
            assert "pins must hold at most" in str(error)

    def unpin(self) -> None:
        if self.pins:
            self.manager.space.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))

    def give_back(self) -> None:
        if (seq_id := self.any(list(self.tokens))) is not None and self.written[seq_id]:
            self.manager.give_back_room(seq_id)
            self.tokens[seq_id] = self.tokens[seq_id][: self.written[seq_id]]

    def load(self) -> None:
        """K and V of a new sequence come from elsewhere: full layers' after what is cached, windows' as asked for."""
        prompt, name = self.some_tokens(self.rng.randrange(1, 8 * self.size)), self.rng.choice([b"", b"tenant"])
        before = self.begin(prompt, name)
        seq_id, end = self.next_id, self.rng.randint(before // self.size, len(prompt) // self.size) * self.size
        assert self.manager.num_cached(prompt, name) == before
        starts = [before, *self.manager.windows.skip_to(seq_id, end)]
        self.do_moves()
        self.manager.check()
        slots = [self.manager.slot_mapping(seq_id, before, end)]
        slots += [self.manager.windows[g].slots(seq_id, start, end) for g, start in enumerate(starts[1:])]
        for cells, pool, start, places in zip(self.cells, self.pools, starts, slots, strict=True):
            for position, place in zip(range(start, end), places.tolist(), strict=True):
                assert pool.ref_count(place // self.size) == 1  # nobody else reads it
                cells[place // self.size, place % self.size] = self.key(seq_id, position)
        self.figures["loaded"] += end - before
        self.manager.commit(seq_id, prompt[before:end])
        self.written[seq_id] = end

    def keep(self) -> None:
        """All that is held stands for the prefix, until it is let go."""
        tokens, name = self.some_tokens(5 * self.size), self.rng.choice([b"", b"tenant"])
        held = self.manager.hold_cached(tokens, name)
        for cells, ids in self.tables_of(held):
            for place, block_id in ids:
                expected = [(name, tuple(tokens[: place * self.size + i + 1]), None) for i in range(self.size)]
                assert list(cells[block_id]) == expected
        self.figures["kept"] += sum(len(ids) for _, ids in self.tables_of(held))
        self.held.append(held)

    def tables_of(self, held: HeldBlocks) -> list[tuple[np.ndarray, list[tuple[int, int]]]]:
        tables = [list(enumerate(held.block_ids.tolist()))]
        for one in held.windows:
            places = np.flatnonzero(one.has)
            tables.append(list(zip(places.tolist(), one.block_ids[places].tolist(), strict=True)))
        return list(zip(self.cells, tables, strict=True))

    def let_go(self) -> None:
        if self.held:
            self.held.pop(self.rng.randrange(len(self.held))).release()

    def hide(self) -> None:
        if (seq_id := self.any([i for i in self.tokens if i not in self.secret])) is not None:
            self.manager.make_private(seq_id)
            self.secret[seq_id] = self.written[seq_id]

    def drop(self) -> None:
        self.manager.space.drop(self.some_tokens(5 * self.size))

    def reset(self) -> None:
        for seq_id in self.swapped:
            self.manager.release(seq_id)
        self.swapped.clear()
        self.away.clear()
        self.pins.clear()  # they end with what is cached
        while self.tokens or self.held:
            self.release_any()
            self.let_go()
        self.manager.reset_prefix_cache()
        every = [*self.pools, *self.host_pools]
        assert [pool.num_free for pool in every] == [pool.num_blocks for pool in every]
