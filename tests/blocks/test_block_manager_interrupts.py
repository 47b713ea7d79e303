"""BlockManager: Ctrl-C at any line of a call loses no block, no row and no copy that is due."""

import signal
from collections.abc import Callable

import pytest
from support.ctrl_c import CtrlC, pythons_handler  # noqa: F401, a fixture for all that is here
from support.insides import sequences_of

from kvpage import BlockManager

B = 4
PROMPT = list(range(1, 3 * B))
OTHER = [*PROMPT[: B + 2], 70, 71, 72, 73]


def begun(num_host_blocks: int) -> BlockManager:
    """One sequence that ended, whose blocks are cached; one that is committed; and one that is swapped out."""
    manager = BlockManager(24, B, num_host_blocks=num_host_blocks)
    for seq_id, tokens in (("ended", PROMPT), ("parent", [9] * (B + 1)), ("away", [8] * B + [7])):
        num_cached = manager.allocate(seq_id, tokens).num_cached_tokens
        manager.take_moves()
        manager.commit(seq_id, tokens[num_cached:])
    manager.release("ended")
    if num_host_blocks:
        manager.swap_out("away")
        manager.take_moves()
    return manager


def append_to_fork(manager: BlockManager) -> None:
    """The shared last block is replaced by a copy, which is in the moves whenever it is in the table."""
    manager.fork("parent", "child")
    before = manager.block_ids("child").tolist()
    try:
        manager.append(["child", "parent"])
    finally:
        copied = [pair for move in manager.take_moves() for pair in move.pairs.tolist()]
        changed = manager.block_ids("child").tolist()[: len(before)] != before
        assert changed == (len(copied) > 0)


CALLS: dict[str, tuple[int, Callable[[BlockManager], object]]] = {
    "allocate": (0, lambda manager: manager.allocate("new", OTHER)),
    "allocate with a host tier": (8, lambda manager: manager.allocate("new", OTHER)),
    "fork": (0, lambda manager: manager.fork("parent", "new")),
    "append": (0, append_to_fork),
    "swap out": (8, lambda manager: manager.swap_out("parent")),
    "swap in": (8, lambda manager: manager.swap_in("away", [8] * B + [7, 6])),
    "release": (0, lambda manager: manager.release("parent")),
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_each_line(name: str) -> None:
    num_host_blocks, call = CALLS[name]
    manager = begun(num_host_blocks)
    with CtrlC() as lines:
        call(manager)
    for nth in range(1, lines.num_lines + 1):
        manager = begun(num_host_blocks)
        with pytest.raises(KeyboardInterrupt), CtrlC(nth):
            call(manager)
        manager.check()
        for seq_id in [*sequences_of(manager).on_device, *sequences_of(manager).swapped]:
            manager.release(seq_id)
        manager.check()
        assert manager.tree.num_matches == 0, nth
        assert manager.num_free_blocks == 24, nth


def test_ctrl_c_as_soon_as_a_row_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the native call and the line after it: its result never reaches Python's code."""

    class Interrupting:
        """The rows, with Ctrl-C when `name` has ended."""

        def __init__(self, rows: object, name: str) -> None:
            self._rows, self._name = rows, name

        def __getattr__(self, name: str) -> object:
            found = getattr(self._rows, name)
            return found if name != self._name else lambda *args, **named: self._then_press(found, *args, **named)

        def _then_press(self, call: Callable[..., object], *args: object, **named: object) -> object:
            result = call(*args, **named)
            signal.raise_signal(signal.SIGINT)
            return result

    for name, (num_host_blocks, call) in CALLS.items():
        for native in ("begin", "resume", "fork", "remove", "append", "append_if_free"):
            manager = begun(num_host_blocks)
            with monkeypatch.context() as patch:
                patch.setattr(sequences_of(manager), "rows", Interrupting(sequences_of(manager).rows, native))
                try:
                    call(manager)
                except KeyboardInterrupt:
                    assert name == "append" or "new" not in sequences_of(manager).on_device
            manager.check()
            for seq_id in [*sequences_of(manager).on_device, *sequences_of(manager).swapped]:
                manager.release(seq_id)
            manager.check()
            assert manager.num_free_blocks == 24, (name, native)


def test_an_id_that_cannot_be_kept_costs_no_block() -> None:
    """Its __eq__ raises when the row is put beside another of the same hash: at the end of the call."""

    class Id:
        def __init__(self, num_equal: int) -> None:
            self.num_equal = num_equal

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            self.num_equal -= 1
            if self.num_equal < 0:
                raise KeyboardInterrupt
            return self is other

    manager = BlockManager(8, B)
    manager.allocate(first := Id(1), [1, 2])
    with pytest.raises(KeyboardInterrupt):
        manager.allocate(Id(1), [3, 4])
    assert first.num_equal < 0
    manager.check()
    assert manager.num_free_blocks == 7
