"""BlockManager: a call that raises leaves everything as it was, whatever it raises."""

import pytest
from support.block_requests import B, computed

from kvpage import BlockManager, OutOfBlocks

MINE, OTHERS = list(range(10, 10 + 2 * B)), list(range(50, 50 + 2 * B))


@pytest.mark.parametrize("counts", [[-1, 0], [0, -1], [1, -1]])
def test_append_takes_no_room_back(counts):
    manager = BlockManager(4, B)
    for seq_id in (1, 2):
        manager.allocate(seq_id, MINE[:2])
    wrong = 1 + counts.index(-1)
    with pytest.raises(ValueError, match=f"num_new_tokens must not be negative, got -1 for {wrong}"):
        manager.append([1, 2], counts)
    for seq_id in (1, 2):
        assert len(manager.slot_mapping(seq_id, 0, 2)) == 2
        with pytest.raises(ValueError, match="positions"):
            manager.slot_mapping(seq_id, 0, 3)


@pytest.mark.parametrize("error", [OutOfBlocks(9, 0), MemoryError(), KeyboardInterrupt()], ids=repr)
def test_whatever_fails_leaves_no_pin(monkeypatch, error):
    """Nor is the sequence in two places."""
    manager = BlockManager(12, B, num_host_blocks=4)
    computed(manager, 1, MINE)
    manager.release(1)
    computed(manager, 2, MINE[: B + 1])
    manager.swap_out(2)
    before = manager.stats(), manager.tree.num_matches

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(type(manager.space), "native", property(fail))
        manager.swap_in(2, MINE)
    assert (manager.stats(), manager.tree.num_matches) == before and before[1] == 0
    manager.check()
    assert manager.swap_in(2, MINE).num_cached_tokens > 0
    manager.check()


@pytest.mark.parametrize("on_device", [0, 1])
@pytest.mark.parametrize("swapped", [0, 1])
def test_nothing_is_forgotten_while_there_are_sequences(on_device, swapped):
    manager = BlockManager(8, B, num_host_blocks=4)
    computed(manager, 1, MINE)
    manager.release(1)
    for seq_id in range(2, 2 + on_device + swapped):
        manager.allocate(seq_id, OTHERS[:1])
    if swapped:
        manager.swap_out(2)
    if on_device + swapped:
        with pytest.raises(RuntimeError, match=f"all sequences to be released, {on_device + swapped} are not"):
            manager.reset_prefix_cache()
        assert manager.tree.num_cached == 2
        for seq_id in range(2, 2 + on_device + swapped):
            manager.release(seq_id)
    manager.reset_prefix_cache()
    assert manager.tree.num_cached == 0 and manager.pool.num_free == 8
    manager.check()
