"""BlockManager with groups: sequences whose windows are opened, written, marked, forked, kept, loaded and ended."""

import functools
from typing import Any

import numpy as np
from fuzz_blocks import as_integers
from fuzz_case import Case
from fuzz_manager import BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS, ManagerWorld, make_manager
from support.insides import sequences_of

from kvpage import BlockManager, HeldBlocks, States, Window, WindowStats
from kvpage.blocks.groups.states.checkpoint import Checkpoint
from kvpage.blocks.groups.window_blocks import WindowBlocks
from kvpage.blocks.moves import BlockMove


class GroupsWorld(ManagerWorld):
    """Sequences of one manager with up to two windows and maybe states, whose groups have few blocks and slots.

    A refused call may drop checkpoints whose blocks are gone. So those count as free slots.
    """

    covers = ("kvpage.BlockManager", "kvpage.HeldBlocks", "kvpage.HeldWindow", "kvpage.States", "kvpage.Window")
    calls = ManagerWorld.calls + " open open open open far far write write write whole_fork whole_fork"
    calls += " window_tables window_slots all_window_slots window_moves window_moves window_stats"
    calls += " load load hold hold let_go num_cached mark keep keep keep_end end fail"
    calls += " marks marks slot state_moves state_moves reset"
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
            for tier in self._slot_tiers():
                assert tier.num_free == tier.num_slots

    def snapshot(self) -> object:
        windows = [
            ({seq_id: _table(table) for seq_id, table in window._tables.items()}, dict(window._swapped))
            for window in self.manager.windows
        ]
        about = [_about(blocks) for blocks in self._windows()]
        return super().snapshot(), windows, about, self._states() if self.manager.states else None

    def _states(self) -> object:
        group, tiers = self.manager.states, self._slot_tiers()
        running = [
            (
                seq_id,
                state.slot,
                state.is_on_host,
                state.is_spoiled,
                sorted(state.marks),
                sorted(state.reserved.items()),
            )
            for seq_id, state in group._states.running.items()
        ]
        checkpoints = [[self._checkpoint(checkpoint) for checkpoint in tier.checkpoints] for tier in tiers]
        num_unused = [
            tier.num_slots - sum(map(bool, of_tier)) for tier, of_tier in zip(tiers, checkpoints, strict=True)
        ]
        return running, checkpoints, num_unused, [(kind, pairs.tolist()) for kind, pairs in group.space.moves]

    def _checkpoint(self, checkpoint: Checkpoint | None) -> object:
        if checkpoint is None or not self.manager.states.space.anchors.is_valid(checkpoint.anchor):
            return None
        about = checkpoint.num_tokens, checkpoint.tail, checkpoint.kind, checkpoint.priority, checkpoint.is_dropped
        return checkpoint.anchor.namespace, about

    def _windows(self) -> list[WindowBlocks]:
        return [window.blocks for window in self.manager.windows]

    def _slot_tiers(self) -> list[Any]:
        return [self.manager.states.space.device, self.manager.states.space.host] if self.manager.states else []

    def _new_manager(self) -> BlockManager:
        most = (0, 2, 16)
        groups: list[Window | States] = [
            Window(self.rng.choice((1, 2, 4, 5, 9)), self.rng.choice((1, 3, 6, 24)), self.rng.choice(most))
            for _ in range(self.rng.choice((0, 1, 1, 2)))
        ]
        if not groups or self.rng.random() < 0.5:
            num_checkpoints, every = self.rng.choice((None, None, 0, 2)), self.rng.choice((None, 1, 3))
            groups.append(States(self.rng.choice((1, 3, 8)), self.rng.choice((0, 2)), num_checkpoints, every))
        num_host, is_caching = self.rng.choice((0, NUM_HOST_BLOCKS, 24)), self.rng.random() < 0.8
        about = {"num_host_blocks": num_host, "pin_quota": 4, "groups": groups}
        return BlockManager(NUM_BLOCKS, BLOCK_SIZE, is_caching, **about)

    def _token(self) -> int:
        return 1 if self.rng.random() < 0.9 else 2

    def _allocate(self) -> Case:
        case = super()._allocate()
        num_tokens = len(case.args["tokens"])
        cache_at = self.rng.sample(range(1, num_tokens + 1), min(self.rng.randrange(3), num_tokens))
        case.args |= {"num_left_over": self.rng.choice((1, 1, 0)), "cache_at": as_integers(cache_at, self.rng)}
        return case

    def _running(self) -> Any:
        known = list(sequences_of(self.manager).on_device)
        return self.rng.choice(known) if known else "nobody"

    def _bounds(self, seq_id: Any) -> tuple[int, int]:
        """The tokens that the sequence has written, and those that it has room for."""
        if seq_id not in sequences_of(self.manager).on_device:
            return 0, 0
        state = self.manager.state(seq_id)
        return state.num_written, state.num_tokens

    # --- windows ---

    def _of(self, owner: object, name: str, **args: Any) -> Case:
        """A call of a part of the manager, which may be amid moves."""
        case = self._call("state", **args)
        case.name, case.function = f"{type(owner).__name__}.{name}", getattr(owner, name)
        case.errors, case.may_raise = (*case.errors, RuntimeError), (*case.may_raise, RuntimeError)
        return case

    def _open(self) -> Case:
        known = list(sequences_of(self.manager).on_device)
        seq_ids = self.rng.sample(known, min(self.rng.randint(1, 3), len(known)))
        ends = [self.rng.randint(*self._bounds(seq_id)) for seq_id in seq_ids]
        return self._of(self.manager.windows, "open", seq_ids=seq_ids, ends=as_integers(ends, self.rng))

    def _far(self) -> Case:
        seq_id = self._running()
        num_written, num_tokens = self._bounds(seq_id)
        case = self._of(self.manager.windows, "open_as_far", seq_id=seq_id, end=num_tokens)

        def judge(end: int) -> None:
            assert num_written <= end <= num_tokens
            assert all(window._tables[seq_id].end * BLOCK_SIZE >= end for window in self.manager.windows)

        case.judge = judge if seq_id != "nobody" else None
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
        case.name, case.function, case.fixed = "windows.open, commit", write, ("seq_id", "tokens")
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

        case = self._of(self.manager.windows, "skip_to", seq_id=seq_id, num_tokens=end)
        case.name, case.function = "windows.skip_to, commit", load
        return case

    def _whole_fork(self) -> Case:
        self.num_made += 1
        return self._call("fork", seq_id=self._running(), new_seq_id=self.num_made)

    def _window(self) -> Any:
        """A window's group; the manager's other calls where there is none."""
        return self.rng.choice(self.manager.windows) if self.manager.windows else None

    def _window_tables(self) -> Case:
        if (window := self._window()) is None:
            return self._questions()
        seq_ids = [self._running() for _ in range(self.rng.randrange(3))]
        case = self._of(window, "tables", seq_ids=seq_ids)

        def judge(tables: np.ndarray) -> None:
            assert tables.dtype == np.int32 and len(tables) == len(seq_ids)

        case.judge = judge
        return case

    def _window_slots(self) -> Case:
        if (window := self._window()) is None:
            return self._questions()
        seq_id = self._running()
        start = self.rng.randint(*self._bounds(seq_id))
        end = self.rng.randint(start, self._bounds(seq_id)[1])
        case = self._of(window, "slots", seq_id=seq_id, start=start, end=end)
        case.judge = lambda slots: self._distinct(window, slots, end - start)
        return case

    def _all_window_slots(self) -> Case:
        if (window := self._window()) is None:
            return self._questions()
        seq_ids = [self._running() for _ in range(self.rng.randrange(3))]
        starts = [self._bounds(seq_id)[0] for seq_id in seq_ids]
        ends = [self.rng.randint(*self._bounds(seq_id)) for seq_id in seq_ids]
        starts, ends = as_integers(starts, self.rng), as_integers(ends, self.rng)
        return self._of(window, "slot_mappings", seq_ids=seq_ids, starts=starts, ends=ends)

    def _distinct(self, window: Any, slots: np.ndarray, count: int) -> None:
        num_slots = window.blocks.pool.num_blocks * BLOCK_SIZE
        assert slots.dtype == np.int64 and len(slots) == len(set(slots.tolist())) == count
        assert all(0 <= slot < num_slots for slot in slots.tolist())

    def _window_moves(self) -> Case:
        if (window := self._window()) is None:
            return self._questions()
        num_slots = [tier.num_slots for tier in self._slot_tiers()] or [0, 0]
        sizes = window.blocks.pool.num_blocks + num_slots[0], window.blocks.host_pool.num_blocks + num_slots[1]
        return Case("window.do_moves", window.blocks.do_moves, {"do_move": functools.partial(_check_move, sizes)})

    def _window_stats(self) -> Case:
        if (window := self._window()) is None:
            return self._questions()

        def judge(stats: WindowStats) -> None:
            assert 0 <= stats.num_free_blocks + stats.num_evictable_blocks <= stats.num_blocks

        return Case("window.blocks.stats", window.blocks.stats, judge=judge)

    # --- states ---

    def _marks(self) -> Case:
        """Of the tokens that are computed next; or of any other portion."""
        if self.manager.states is None:
            return self._questions()
        seq_id = self._running()
        start, end = self._bounds(seq_id)
        if self.rng.random() < 0.2:
            start = self.rng.randint(0, end)
        case = self._of(self.manager.states, "reserve", seq_id=seq_id, start=start, end=end)

        def judge(marks: list[tuple[int, int]]) -> None:
            assert all(start < position <= end for position, _ in marks)
            slots = {slot for _, slot in marks}
            assert len(slots) == len(marks) and not slots & set(self.manager.states.space.device.free_slots)

        case.judge = judge
        return case

    def _mark(self) -> Case:
        return self._call("mark", seq_id=self._running(), num_tokens=self.rng.randint(0, 12))

    def _keep(self) -> Case:
        return self._call("keep", seq_id=self._running())

    def _keep_end(self) -> Case:
        return self._call("keep_end", seq_id=self._running())

    def _end(self) -> Case:
        """As a request ends."""

        def end(seq_id: Any) -> None:
            self.manager.keep_end(seq_id)
            self.manager.release(seq_id)

        case = self._call("keep_end", seq_id=self._running())
        case.name, case.function = "manager.keep_end, release", end
        return case

    def _fail(self) -> Case:
        return self._call("give_up_marks", seq_id=self._running())

    def _slot(self) -> Case:
        if self.manager.states is None:
            return self._questions()
        return self._of(self.manager.states, "slot_of", seq_id=self._some())

    def _state_moves(self) -> Case:
        if self.manager.states is None:
            return self._questions()
        sizes = tuple(tier.num_slots for tier in self._slot_tiers())
        do_moves = self.manager.states.do_moves
        return Case("states.do_moves", do_moves, {"do_move": functools.partial(_check_move, sizes)})

    # --- all groups ---

    def _hold(self) -> Case:
        """Blocks of a prefix; those that were held before are let go."""

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

        def judge(count: int) -> None:
            assert 0 <= count < len(tokens) and (self.manager.states or count % BLOCK_SIZE == 0)

        case.judge = judge
        return case

    def _reset(self) -> Case:
        reset, errors = self.manager.reset_prefix_cache, (RuntimeError,)
        return Case("manager.reset_prefix_cache", reset, errors=errors, may_raise=errors)

    def _make(self) -> Case:
        args = {"num_blocks": 10, "block_size": 4, "enable_prefix_caching": True, "num_host_blocks": 3}
        args |= {"host_policy": None, "rule": None, "pin_quota": 0, "groups": [Window(4, 3), Window(2, 1), States(2)]}
        return Case("BlockManager", functools.partial(make_manager, BlockManager), args)


def _check_move(sizes: tuple[int, int], move: BlockMove) -> None:
    """Pairs are within the tiers, sizes: (device, host), and no destination is written twice."""
    device, host = sizes
    most = {"copy": (device, device), "swap_out": (device, host), "swap_in": (host, device)}[move.kind]
    assert ((move.pairs >= 0) & (move.pairs < most)).all()
    assert len(set(move.pairs[:, 1].tolist())) == len(move.pairs)


def _table(table: Any) -> object:
    return table.first, tuple(table.ids), table.num_cached


def _about(blocks: WindowBlocks) -> object:
    """The blocks of a group: whose they are, what is cached, in which order it would go, and the moves to make."""
    counts = [blocks.pool.ref_count(block_id) for block_id in range(blocks.pool.num_blocks)]
    moves = [(kind, pairs.tolist()) for kind, pairs in blocks.moves]
    host_counts = [blocks.host_pool.ref_count(block_id) for block_id in range(blocks.host_pool.num_blocks)]
    cached = dict(blocks._anchor_of), list(blocks._unused), list(blocks._on_host.items())
    return counts, host_counts, cached, moves
