"""DraftedManager: a target and the model that drafts for it begin where both can, and nothing is done by halves."""

import pytest
from support.drafted_life import WORLDS, B, DraftedLife, managers
from support.life import lived, total
from support.managers import manager_of_states

from kvpage import BlockManager, OutOfBlocks
from kvpage.blocks.drafted_manager import DraftedManager


def test_random_lives():
    """The long form is a battery."""
    figures = total(lived(WORLDS, 120))
    assert figures["shared"] > 0 and figures["refused"] > 0


@pytest.mark.parametrize("num_shared", range(2 * B + 3))
def test_the_target_begins_where_the_draft_model_can(num_shared):
    """The last shared token's position has another successor: the target computes it again, for its hidden state."""
    life = DraftedLife(managers())
    first = list(range(10, 10 + 2 * B + 2))
    life.begin(first)
    second = [*first[:num_shared], 90, 91]
    expected = min(max(num_shared - 1, 0), 2 * B)
    assert life.manager.explain(second).num_cached_tokens == expected
    assert life.begin(second) == expected
    life.check()
    assert life.begin(first) >= 2 * B


def test_a_hybrid_target_begins_at_a_checkpoint():
    manager = DraftedManager(manager_of_states(64, B, num_slots=8), BlockManager(64, B))
    target, prompt = manager.target, list(range(10, 10 + 3 * B))
    for seq_id, (tokens, expected) in enumerate(
        [(prompt, 0), (prompt, len(prompt) - 1), ([*prompt, 90, 91], len(prompt) - 1), ([*prompt[:-1], 92], 0)]
    ):
        assert manager.explain(tokens).num_cached_tokens == expected
        given = manager.allocate(seq_id, tokens)
        assert given.num_cached_tokens == expected <= given.drafts.num_cached_tokens
        target.states.reserve(seq_id, expected, len(tokens))
        manager.target.take_moves(), target.states.do_moves(lambda move: None), manager.drafts.take_moves()
        manager.commit(seq_id, tokens[expected:], [*tokens[given.drafts.num_cached_tokens + 1 :], 7])
        target.keep(seq_id)
        manager.release(seq_id)
        manager.check()


def test_the_explanation_has_all_groups():
    life = DraftedLife(managers())
    life.begin(list(range(10)), b"a")
    found = life.manager.explain([0, 1, 2, 3, 4, 5, 99], b"a")
    assert [reach.group for reach in found.groups] == ["attention", "successor"]
    assert [reach.num_tokens for reach in found.groups] == [6, 5] and found.num_cached_tokens == 5
    assert life.manager.explain(list(range(10))).elsewhere == (b"a", 8)


@pytest.mark.parametrize(("num_blocks", "num_drafts"), [(2, 8), (8, 2)])
def test_a_prompt_without_room_in_one_group_changes_neither(num_blocks, num_drafts):
    manager = managers(num_blocks, num_drafts)
    with pytest.raises(OutOfBlocks) as caught:
        manager.allocate(1, [1] * (2 * B + 1))
    assert (caught.value.needed, caught.value.free) == (3, 2)
    manager.allocate(1, [1] * 2 * B)
    with pytest.raises(OutOfBlocks):
        manager.append([1])
    assert [len(m.block_ids(1)) for m in (manager.target, manager.drafts)] == [2, 2]
    manager.check()


def test_bad_arguments_change_neither():
    manager = managers()
    manager.allocate(1, [1, 2, 3])
    with pytest.raises(ValueError, match="seq_id must not be in use, 1 is"):
        manager.allocate(1, [1])
    manager.drafts.allocate(2, [1])
    with pytest.raises(ValueError, match="seq_id must not be in use, 2 is"):
        manager.allocate(2, [1])
    with pytest.raises(ValueError, match="tokens must be at most 3, got 4 for 1"):
        manager.commit(1, [1, 2, 3, 4], [2, 3, 4])
    with pytest.raises(ValueError, match="successors must be at most 3, got 4 for 1"):
        manager.commit(1, [1, 2, 3], [2, 3, 4, 5])
    with pytest.raises(ValueError, match="seq_ids|rows must be distinct"):
        manager.append([1, 1])
    with pytest.raises(ValueError, match="negative"):
        manager.append([1], -1)
    with pytest.raises(KeyError):
        manager.release(9)
    with pytest.raises(KeyError):
        manager.append([9])
    assert [m.state(1).num_written for m in (manager.target, manager.drafts)] == [0, 0]
    assert [m.state(1).num_tokens for m in (manager.target, manager.drafts)] == [3, 3]
    with pytest.raises(TypeError, match="target must be a BlockManager, got NoneType"):
        DraftedManager(None, manager.drafts)
    with pytest.raises(ValueError, match="drafts must be another manager than target"):
        DraftedManager(manager.drafts, manager.drafts)
    with pytest.raises(ValueError, match="drafts must have no groups"):
        DraftedManager(manager.target, manager_of_states(8, B, num_slots=2))
    with pytest.raises(RuntimeError, match="reset_prefix_cache needs all sequences to be released, 1 are not"):
        manager.reset_prefix_cache()
