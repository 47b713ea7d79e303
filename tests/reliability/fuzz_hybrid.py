"""HybridManager: what BlockManager takes, and marks, checkpoints and states."""

import random
from typing import Any

from fuzz_blocks import as_integers
from fuzz_case import Case
from fuzz_manager import BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS, ManagerWorld

from kvpage import HybridManager, OutOfBlocks

OWN = ("marks", "marks", "keep", "keep", "keep_end", "keep_end", "give_up", "slot", "explain", "state_moves")


class HybridWorld(ManagerWorld):
    """Sequences with states that grow, fork, swap, leave checkpoints and end."""

    covers = ("kvpage.HybridManager", "kvpage.SlotStats", "kvpage.Explanation", "kvpage.GroupReach", "kvpage.Ending")
    manager: HybridManager

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        has_host = rng.random() < 0.5
        self.manager = HybridManager(
            NUM_BLOCKS,
            BLOCK_SIZE,
            rng.random() < 0.8,
            num_slots=rng.choice((3, 8)),
            num_host_slots=3 * has_host,
            checkpoint_every=rng.choice((None, 3)),
            num_host_blocks=NUM_HOST_BLOCKS * has_host,
            pin_quota=4,
        )

    def __exit__(self, kind: object, *error: object) -> None:
        super().__exit__(kind, *error)
        if kind is None:
            slots = self.manager.stats().slots
            assert slots is not None and slots.num_free_slots + slots.num_checkpoints == slots.num_slots

    def snapshot(self) -> object:
        states, of = self.manager.states, self.manager._states_of.running
        running = [
            (seq_id, one.slot, one.is_on_host, one.is_spoiled, sorted(one.reserved.items()), sorted(one.marks))
            for seq_id, one in of.items()
        ]
        kept = [[one and one.num_tokens for one in tier.checkpoints] for tier in (states.device, states.host)]
        moves = [(kind, pairs.tolist()) for kind, pairs in states.moves]
        free = states.device.free_slots, states.host.free_slots
        return super().snapshot(), running, kept, free, moves

    def case(self, rng: random.Random) -> Case:
        return getattr(self, f"_{rng.choice(OWN)}")() if rng.random() < 0.4 else super().case(rng)

    def _allocate(self) -> Case:
        case = super()._allocate()
        count = len(case.args["tokens"])
        marks = self.rng.sample(range(1, count + 1), min(count, self.rng.randrange(3)))
        case.args |= {"num_left_over": self.rng.choice((0, 1)), "cache_at": as_integers(marks, self.rng)}
        return case

    def _fork(self) -> Case:
        self.num_made += 1
        return self._call("fork", seq_id=self._some(), new_seq_id=self.num_made, num_tokens=None)

    def _marks(self) -> Case:
        seq_id, start, end = self._some(), 0, 0
        if seq_id in self.manager._sequences.on_device:
            seq = self.manager._sequences.state(seq_id)
            start, end = seq.num_written, seq.num_tokens
        return self._call("marks_of", seq_id=seq_id, start=start, end=end)

    def _keep(self) -> Case:
        return self._call("keep", seq_id=self._some())

    def _keep_end(self) -> Case:
        return self._call("keep_end", seq_id=self._some())

    def _give_up(self) -> Case:
        return self._call("give_up_marks", seq_id=self._some())

    def _slot(self) -> Case:
        return self._call("slot_of", seq_id=self._some())

    def _explain(self) -> Case:
        tokens = as_integers(self._tokens(), self.rng)
        return self._call("explain", tokens=tokens, namespace=self.rng.choice((b"", b"a")))

    def _state_moves(self) -> Case:
        function = self.manager.do_state_moves
        return Case("manager.do_state_moves", function, {"do_move": lambda move: None}, fixed=("do_move",))

    def _make(self) -> Case:
        args: dict[str, Any] = {"num_blocks": 10, "block_size": 4, "num_slots": 3, "num_host_slots": 2}
        args |= {"checkpoint_every": 5, "num_host_blocks": 3, "pin_quota": 0}
        return Case("HybridManager", make_manager, args, may_raise=(OutOfBlocks,))


def make_manager(**given: Any) -> Any:
    """Sizes that are allowed and do not fit into the machine are no finding."""
    for name in ("num_blocks", "num_host_blocks", "num_slots", "num_host_slots"):
        size = given.get(name)
        if type(size) is int and size > 10**6:
            return None
    return HybridManager(**given)
