"""BlockManager: sequences with state slots that are marked, kept, forked, swapped, failed and ended."""

import functools
from typing import Any

from fuzz_blocks import as_integers
from fuzz_case import Case
from fuzz_manager import BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS, ManagerWorld, make_manager
from support.insides import sequences_of
from support.managers import manager_of_states

from kvpage import BlockManager
from kvpage.blocks.groups.states.checkpoint import Checkpoint
from kvpage.blocks.moves import BlockMove


class HybridWorld(ManagerWorld):
    """Sequences of one manager, of which some end badly. Prompts are nearly the same, so that many go on from others.

    A refused call may drop checkpoints whose blocks are gone. So those count as free slots.
    """

    covers = ("kvpage.BlockManager",)
    calls = ManagerWorld.calls + " marks marks mark keep keep keep_end end fail slot state_moves state_moves reset"
    manager: BlockManager

    def __exit__(self, kind: object, *error: object) -> None:
        super().__exit__(kind, *error)
        if kind is None:
            self.manager.reset_prefix_cache()
            self.manager.check()
            for tier in (self.manager.states.space.device, self.manager.states.space.host):
                assert tier.num_free == tier.num_slots

    def snapshot(self) -> object:
        manager, tiers = self.manager, (self.manager.states.space.device, self.manager.states.space.host)
        running = [
            (seq_id, one.slot, one.is_on_host, one.is_spoiled, sorted(one.marks), sorted(one.reserved.items()))
            for seq_id, one in manager.states._states.running.items()
        ]
        checkpoints = [[self._about(one) for one in tier.checkpoints] for tier in tiers]
        num_unused = [
            tier.num_slots - sum(map(bool, of_tier)) for tier, of_tier in zip(tiers, checkpoints, strict=True)
        ]
        moves = [(kind, pairs.tolist()) for kind, pairs in manager.states.space.moves]
        return super().snapshot(), running, checkpoints, num_unused, moves

    def _about(self, one: Checkpoint | None) -> object:
        if one is None or not self.manager.states.space.anchors.is_valid(one.anchor):
            return None
        return one.anchor.namespace, one.num_tokens, one.tail, one.kind, one.priority, one.is_dropped

    def _new_manager(self) -> BlockManager:
        return manager_of_states(
            NUM_BLOCKS,
            BLOCK_SIZE,
            self.rng.random() < 0.9,
            num_slots=self.rng.choice((1, 3, 8)),
            num_host_slots=self.rng.choice((0, 2)),
            num_checkpoints=self.rng.choice((None, None, 0, 2)),
            checkpoint_every=self.rng.choice((None, 1, 3)),
            num_host_blocks=self.rng.choice((0, NUM_HOST_BLOCKS)),
            pin_quota=4,
        )

    def _token(self) -> int:
        return 1 if self.rng.random() < 0.97 else 2

    def _running(self) -> Any:
        known = list(sequences_of(self.manager).on_device)
        return self.rng.choice(known) if known else "nobody"

    def _allocate(self) -> Case:
        case = super()._allocate()
        num_tokens = len(case.args["tokens"])
        cache_at = self.rng.sample(range(1, num_tokens + 1), min(self.rng.randrange(3), num_tokens))
        case.args |= {"num_left_over": self.rng.choice((1, 1, 0)), "cache_at": as_integers(cache_at, self.rng)}
        return case

    def _marks(self) -> Case:
        """Of what is computed next; or of any other portion."""
        seq_id, start, end = self._running(), 0, 0
        if seq_id != "nobody":
            seq = sequences_of(self.manager).state(seq_id)
            start, end = seq.num_written, seq.num_tokens
        if self.rng.random() < 0.2:
            start = self.rng.randint(0, end)
        case = self._call("marks_of", seq_id=seq_id, start=start, end=end)

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
        return self._call("slot_of", seq_id=self._some())

    def _state_moves(self) -> Case:
        sizes = {"device": self.manager.states.space.device.num_slots, "host": self.manager.states.space.host.num_slots}
        tiers = {"copy": ("device", "device"), "swap_out": ("device", "host"), "swap_in": ("host", "device")}

        def do_move(move: BlockMove) -> None:
            for tier, slots in zip(tiers[move.kind], move.pairs.T.tolist(), strict=True):
                assert all(0 <= slot < sizes[tier] for slot in slots)
            assert len(set(move.pairs[:, 1].tolist())) == len(move.pairs)

        return Case("manager.do_state_moves", self.manager.do_state_moves, {"do_move": do_move})

    def _reset(self) -> Case:
        reset, errors = self.manager.reset_prefix_cache, (RuntimeError,)
        return Case("manager.reset_prefix_cache", reset, errors=errors, may_raise=errors)

    def _make(self) -> Case:
        args = {"num_blocks": 10, "block_size": 4, "enable_prefix_caching": True, "num_slots": 3, "num_host_slots": 2}
        args |= {"checkpoint_every": 4, "num_host_blocks": 3, "host_policy": None, "rule": None, "pin_quota": 0}
        return Case("BlockManager", functools.partial(make_manager, BlockManager), args)
