"""Lives notice what they are for: a part that leaves something out, or a model that expects something else."""

from collections.abc import Sequence

import pytest
from support import drafted_life, group_worlds, naive_pool, naive_tree, slot_life, slot_oracle, store_life, tree_life
from support.life import World

from kvpage.blocks.drafted_manager import DraftedManager
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.space import BlockSpace
from kvpage.store import KVStore


def is_noticed(worlds: Sequence[World], num_rounds: int = 2) -> bool:
    """Whether some life ends in an error. What is wrong need not be an assertion."""
    for number in range(num_rounds * len(worlds)):
        try:
            worlds[number % len(worlds)].life(number).live(300)
        except Exception:
            return True
    return False


@pytest.mark.parametrize(
    ("worlds", "part", "method"),
    [
        (tree_life.WORLDS, naive_pool.NaivePool, "share"),
        (tree_life.WORLDS, naive_tree.NaiveTree, "unpin"),
        (tree_life.WORLDS, naive_tree.NaiveTree, "shorten"),
        (tree_life.WORLDS, tree_life.TreeLife, "disown"),
        (group_worlds.ALONE, BlockSpace, "add_move"),
        (group_worlds.ALONE, BlockManager, "give_back_room"),
        (drafted_life.WORLDS, DraftedManager, "give_back_room"),
        (slot_life.WORLDS, slot_oracle.SlotOracle, "use"),
        (store_life.WORLDS, KVStore, "clear"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_left_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, worlds: Sequence[World], part: type, method: str
) -> None:
    monkeypatch.setattr(part, method, lambda *args, **options: None)
    assert is_noticed(worlds)
