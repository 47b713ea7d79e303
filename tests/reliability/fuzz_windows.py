"""BlockManager: sequences whose windows are opened, written, forked, left behind and ended."""

import functools
from typing import Any

import numpy as np
from fuzz_blocks import as_integers
from fuzz_case import Case
from fuzz_manager import BLOCK_SIZE, NUM_BLOCKS, ManagerWorld, make_manager
from support.insides import sequences_of

from kvpage import BlockManager, HeldBlocks, Window, WindowStats
from kvpage.blocks.groups.window_blocks import WindowBlocks
from kvpage.blocks.moves import BlockMove


class WindowedWorld(ManagerWorld):
    """Sequences of one manager with one to three windows, whose groups have few blocks."""

    covers = ("kvpage.BlockManager", "kvpage.HeldBlocks", "kvpage.HeldWindow")
    calls = ManagerWorld.calls + " open open open open far far write write write whole_fork whole_fork"
    calls += " window_tables window_slots all_window_slots window_moves window_moves window_stats reset"
    calls += " load load hold hold let_go num_cached"
    manager: BlockManager
    held: HeldBlocks | None = None

    def __exit__(self, kind: object, *error: object) -> None:
        if self.held is not None:
            self.held.release()
        super().__exit__(kind, *error)
        if kind is None:
            self.manager.reset_prefix_cache()
            self.manager.check()
            for blocks in self._windows():
                assert blocks.pool.num_free == blocks.num_free == blocks.pool.num_blocks
                assert blocks.host_pool.num_free == blocks.num_free_host == blocks.host_pool.num_blocks

    def snapshot(self) -> object:
        tables = [
            (seq_id, [(table.first, tuple(table.ids), table.num_cached) for table in tables])
            for seq_id, tables in self.manager._tables.items()
        ]
        about = [_about(blocks) for blocks in self._windows()]
        return super().snapshot(), tables, dict(self.manager._swapped), about

    def _new_manager(self) -> BlockManager:
        num_host, most = self.rng.choice((0, 4, 24)), (0, 2, 16)
        windows = [
            Window(self.rng.choice((1, 2, 4, 5, 9)), self.rng.choice((1, 3, 6, 24)), self.rng.choice(most))
            for _ in range(self.rng.randint(1, 3))
        ]
        is_caching, options = self.rng.random() < 0.8, {"num_host_blocks": num_host, "pin_quota": 8}
        return BlockManager(NUM_BLOCKS, BLOCK_SIZE, is_caching, groups=windows, **options)

    def _allocate(self) -> Case:
        case = super()._allocate()
        case.args["num_left_over"] = self.rng.choice((1, 1, 0))
        return case

    def _running(self) -> Any:
        known = list(sequences_of(self.manager).on_device)
        return self.rng.choice(known) if known else "nobody"

    def _bounds(self, seq_id: Any) -> tuple[int, int]:
        """What the sequence has written, and what it has room for."""
        if seq_id not in sequences_of(self.manager).on_device:
            return 0, 0
        state = self.manager.state(seq_id)
        return state.num_written, state.num_tokens

    def _open(self) -> Case:
        known = list(sequences_of(self.manager).on_device)
        seq_ids = self.rng.sample(known, min(self.rng.randint(1, 3), len(known)))
        ends = [self.rng.randint(*self._bounds(seq_id)) for seq_id in seq_ids]
        return self._call("open_windows", seq_ids=seq_ids, ends=as_integers(ends, self.rng))

    def _far(self) -> Case:
        seq_id = self._running()
        num_written, num_tokens = self._bounds(seq_id)
        case = self._call("open_as_far", seq_id=seq_id, end=num_tokens)

        def judge(end: int) -> None:
            assert num_written <= end <= num_tokens
            assert all(table.end * BLOCK_SIZE >= end for table in self.manager._tables[seq_id])

        case.judge = judge
        return case

    def _write(self) -> Case:
        """As a step does: room in the windows for a portion, moves, and the commit."""
        seq_id = self._running()
        num_written, num_tokens = self._bounds(seq_id)
        tokens = [self._token() for _ in range(self.rng.randint(0, num_tokens - num_written))]

        def write(seq_id: Any, tokens: Any) -> None:
            self.manager.windows.open([seq_id], [num_written + len(tokens)])
            self.manager.commit(seq_id, tokens)

        case = self._call("commit", seq_id=seq_id, tokens=tokens)
        case.name, case.function, case.fixed = "manager.open_windows, commit", write, ("seq_id", "tokens")
        return case

    def _load(self) -> Case:
        """As a load does: room for the last windows alone, and the commit."""
        seq_id = self._running()
        num_written, num_tokens = self._bounds(seq_id)
        end = self.rng.randint(num_written // BLOCK_SIZE, num_tokens // BLOCK_SIZE) * BLOCK_SIZE

        def load(seq_id: Any, num_tokens: Any) -> None:
            starts, before = self.manager.windows.skip_to(seq_id, num_tokens), self._bounds(seq_id)[0]
            assert all(before <= start <= num_tokens for start in starts)
            self.manager.commit(seq_id, [self._token() for _ in range(num_tokens - before)])

        case = self._call("skip_to", seq_id=seq_id, num_tokens=end)
        case.name, case.function = "manager.skip_to, commit", load
        return case

    def _hold(self) -> Case:
        """Blocks of a prefix; what was held before is let go."""

        def keep(held: HeldBlocks) -> None:
            self._end_held()
            self.held = held

        case = self._call("hold_cached", tokens=as_integers(self._tokens(), self.rng), namespace=b"")
        case.done = keep
        return case

    def _let_go(self) -> Case:
        return Case("held.release", self._end_held)

    def _end_held(self) -> None:
        if self.held is not None:
            self.held.release()
        self.held = None

    def _num_cached(self) -> Case:
        tokens = self._tokens()
        case = self._call("num_cached", tokens=as_integers(tokens, self.rng), namespace=b"")
        case.judge = lambda count: self._is_whole(count, len(tokens))
        return case

    def _is_whole(self, count: int, num_tokens: int) -> None:
        assert count % BLOCK_SIZE == 0 <= count < num_tokens

    def _whole_fork(self) -> Case:
        self.num_made += 1
        return self._call("fork", seq_id=self._running(), new_seq_id=self.num_made)

    def _window_tables(self) -> Case:
        seq_ids = [self._running() for _ in range(self.rng.randrange(3))]
        case = self._windowed("window_tables", seq_ids=seq_ids)

        def judge(tables: np.ndarray) -> None:
            assert tables.dtype == np.int32 and len(tables) == len(seq_ids)

        case.judge = judge
        return case

    def _window_slots(self) -> Case:
        seq_id = self._running()
        start = self.rng.randint(*self._bounds(seq_id))
        end = self.rng.randint(start, self._bounds(seq_id)[1])
        case = self._windowed("window_slots", seq_id=seq_id, start=start, end=end)
        case.judge = lambda slots: self._distinct(case, slots, end - start)
        return case

    def _all_window_slots(self) -> Case:
        seq_ids = [self._running() for _ in range(self.rng.randrange(3))]
        starts = [self._bounds(seq_id)[0] for seq_id in seq_ids]
        ends = [self.rng.randint(*self._bounds(seq_id)) for seq_id in seq_ids]
        starts, ends = as_integers(starts, self.rng), as_integers(ends, self.rng)
        return self._windowed("window_slot_mappings", seq_ids=seq_ids, starts=starts, ends=ends)

    def _windowed(self, name: str, **args: Any) -> Case:
        case = self._call(name, group=self.rng.randrange(len(self.manager.windows)), **args)
        case.errors, case.may_raise = (*case.errors, RuntimeError), (*case.may_raise, RuntimeError)
        return case

    def _distinct(self, case: Case, slots: np.ndarray, count: int) -> None:
        num_slots = self.manager.windows[case.args["group"]].blocks.pool.num_blocks * BLOCK_SIZE
        assert slots.dtype == np.int64 and len(slots) == len(set(slots.tolist())) == count
        assert all(0 <= slot < num_slots for slot in slots.tolist())

    def _window_moves(self) -> Case:
        blocks = self.rng.choice(self._windows())

        def do_move(move: BlockMove) -> None:
            device, host = blocks.pool.num_blocks, blocks.host_pool.num_blocks
            most = {"copy": (device, device), "swap_out": (device, host), "swap_in": (host, device)}[move.kind]
            assert ((move.pairs >= 0) & (move.pairs < most)).all()
            assert len(set(move.pairs[:, 1].tolist())) == len(move.pairs)

        return Case("manager.windows[i].blocks.do_moves", blocks.do_moves, {"do_move": do_move})

    def _window_stats(self) -> Case:
        blocks = self.rng.choice(self._windows())

        def judge(stats: WindowStats) -> None:
            assert 0 <= stats.num_free_blocks + stats.num_evictable_blocks <= stats.num_blocks

        return Case("manager.windows[i].blocks.stats", blocks.stats, judge=judge)

    def _reset(self) -> Case:
        reset, errors = self.manager.reset_prefix_cache, (RuntimeError,)
        return Case("manager.reset_prefix_cache", reset, errors=errors, may_raise=errors)

    def _make(self) -> Case:
        args = {
            "num_blocks": 10,
            "block_size": 4,
            "enable_prefix_caching": True,
            "windows": [Window(4, 3), Window(2, 1)],
        }
        return Case("BlockManager", functools.partial(make_manager, BlockManager), args)


def _about(blocks: WindowBlocks) -> object:
    """The blocks of a group: whose they are, what is cached, in which order it would go, and the moves to make."""
    counts = [blocks.pool.ref_count(block_id) for block_id in range(blocks.pool.num_blocks)]
    moves = [(one.kind, one.pairs.tolist()) for one in blocks.moves._added]
    host_counts = [blocks.host_pool.ref_count(block_id) for block_id in range(blocks.host_pool.num_blocks)]
    cached = dict(blocks._anchor_of), list(blocks._unused), list(blocks._on_host.items())
    return counts, host_counts, cached, moves
