"""The state machines find what they are for: a part that leaves something out, or a model that expects otherwise."""

import contextlib
import io

import pytest
from battery_machines import search
from machines import MACHINES, StoreLife
from support import oracle, slot_oracle, tier_oracle

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.space import BlockSpace
from kvpage.serving.loop.scheduler import Scheduler
from kvpage.store import KVStore


def is_caught(name: str, num_examples: int = 150, num_seeds: int = 10) -> bool:
    """Whether one of the seeds does: what a machine does depends a little on the process, too."""
    with contextlib.redirect_stdout(io.StringIO()):
        for seed in range(num_seeds):
            try:
                search(MACHINES[name], seed, num_examples, shrinks=False)
            except Exception:
                return True
    return False


@pytest.mark.parametrize(
    "name, part, method",
    [
        ("pool", oracle.NaivePool, "share"),
        ("tree", tier_oracle.TierTree, "unpin"),
        ("tree", tier_oracle.TierTree, "trim"),
        ("manager", BlockSpace, "add_copies"),
        ("manager", BlockManager, "give_back_room"),
        ("slots", slot_oracle.SlotOracle, "use"),
        ("store", KVStore, "clear"),
        ("scheduler", Scheduler, "_commit"),
    ],
)
def test_what_is_left_out_is_noticed(monkeypatch, name, part, method):
    monkeypatch.setattr(part, method, lambda *args, **options: None)
    assert is_caught(name)


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_else_is_noticed(name):
    assert not is_caught(name, 3, 1)


def test_a_pin_promises_nothing_of_what_was_removed() -> None:
    """Found by the long form, and shrunk: what is put anew need not fit beside what the pin keeps."""
    life = StoreLife(1)
    life.some = lambda: ([0] * StoreLife.CHUNK, b"")
    life.do(life.put)
    life.do(life.pin)
    life.do(life.clear)
    life.some = lambda: ([0] * (4 * StoreLife.CHUNK + 1), b"")
    life.do(life.put)
    life.do(life.unpin)
    life.end()
