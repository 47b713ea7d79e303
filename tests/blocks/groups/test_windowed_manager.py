"""BlockManager: a sequence holds its last window, and a prompt goes on where every group has what it reads."""

from dataclasses import replace

import numpy as np
import pytest
from support.group_life import GroupLife

from kvpage import OutOfBlocks
from kvpage.blocks.config import HostPolicy
from kvpage.blocks.explain import Ending
from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.groups.window_blocks import Window
from kvpage.blocks.manager import BlockManager

B = 4
WINDOWS = [1, 2, B - 1, B, B + 1, B + 2, 2 * B, 2 * B + 1]


def life_of(*windows: int, num_blocks: int = 64, num_window_blocks: int = 64, is_caching: bool = True) -> GroupLife:
    groups = [Window(window, num_window_blocks) for window in windows]
    return GroupLife(BlockManager(num_blocks, B, is_caching, groups=groups))


def tokens_of(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


def computed(life: GroupLife, prompt: list[int], portion: int = 64, namespace: bytes = b"") -> int:
    """Begin a sequence, and compute it in portions; return what was cached."""
    num_cached = life.begin(prompt, namespace)
    seq_id = life.next_id
    while life.num_written(seq_id) < len(prompt):
        life.write(seq_id, min(life.num_written(seq_id) + portion, len(prompt)))
        life.check()
    return num_cached


@pytest.mark.parametrize("window", WINDOWS)
def test_a_running_sequence_holds_its_window(window):
    """However long it is: at most window / block_size + 2 blocks where portions are no longer than a block."""
    life = life_of(window, num_blocks=128, num_window_blocks=window // B + 3)
    computed(life, tokens_of(60 * B), B)
    assert life.most_held[0] <= window // B + 2
    seq_id = life.next_id
    for token in range(1000, 1000 + 5 * B):
        life.manager.append([seq_id])
        life.on_device[seq_id].tokens.append(token)
        life.write(seq_id, len(life.on_device[seq_id].tokens))
        assert life.manager.windows[0].num_held_by(seq_id) <= (window + B - 1) // B + 1
    life.check()


def test_what_lies_behind_the_window_is_found_until_it_is_evicted():
    life = life_of(2 * B, num_window_blocks=8)
    prompt = tokens_of(6 * B)
    computed(life, prompt, B)
    assert life.begin([*prompt[: 2 * B], 99], max_cached_tokens=B) == B  # behind the first's window, and still there
    life = life_of(2 * B, num_window_blocks=8)
    computed(life, prompt, B)
    life.release(life.next_id)
    computed(life, tokens_of(4 * B, 500), B)  # evicts what was used least recently: the first prompt's first blocks
    assert life.manager.windows[0].blocks.stats().evicted_blocks > 0
    reaches = life.manager.explain([*prompt, 99]).groups
    assert [(reach.group, reach.num_tokens) for reach in reaches] == [("attention", 6 * B), ("window of 8", 6 * B)]
    cut = life.manager.explain([*prompt[: 2 * B], 99])
    assert cut.groups[0].num_tokens == 2 * B and cut.groups[1].num_tokens == 0 == cut.num_cached_tokens
    assert cut.groups[1].ending is Ending.KV_EVICTED
    assert computed(life, [*prompt, 99], B) == 6 * B


def test_what_a_sequence_is_yet_to_cache_is_not_told_as_evicted():
    """Commits by rows are for the full layers; windows follow with the next step."""
    life = life_of(2 * B)
    manager, prompt = life.manager, tokens_of(2 * B)
    life.begin(prompt)
    manager.windows.open([life.next_id], [2 * B])
    manager.rows.commit(manager.rows.of([life.next_id]), np.array([prompt[0]], np.int32))
    for token in prompt[1:]:
        manager.rows.commit(manager.rows.of([life.next_id]), np.array([token], np.int32))
    assert [group.ending for group in manager.explain([*prompt, 9]).groups][1] is Ending.NOT_CACHED
    manager.windows.open([life.next_id], [2 * B])
    assert manager.explain([*prompt, 9]).groups[1].num_tokens == 2 * B
    differs = manager.explain([*prompt[:B], 77, 78]).groups
    assert [group.differs_at for group in differs] == [B, B]


def test_what_a_load_has_left_out_is_not_told_as_evicted():
    """It brings the last window alone."""
    life = life_of(2 * B)
    manager, prompt = life.manager, tokens_of(10 * B)
    life.begin(prompt)
    manager.windows.skip_to(life.next_id, 8 * B)
    manager.commit(life.next_id, prompt[: 8 * B])
    found = manager.explain([*prompt[: 4 * B], 99]).groups
    assert [(group.num_tokens, group.ending) for group in found] == [(4 * B, Ending.PROMPT), (0, Ending.NOT_CACHED)]


def test_what_comes_from_elsewhere_is_committed_whole():
    """Between the committed tokens and those of skip_to there are no blocks: nothing else gets room before."""
    life = life_of(2 * B)
    manager, prompt = life.manager, tokens_of(10 * B)
    life.begin(prompt)
    seq_id = life.next_id
    assert manager.windows.skip_to(seq_id, 8 * B) == [6 * B]
    for refused in (
        lambda: manager.commit(seq_id, prompt[: 7 * B]),
        lambda: manager.windows.open([seq_id], [9 * B]),
        lambda: manager.windows.open_as_far(seq_id, 9 * B),
        lambda: manager.windows.skip_to(seq_id, 2 * B),
        lambda: manager.give_back_room(seq_id),
    ):
        with pytest.raises(ValueError, match="skip_to"):
            refused()
        manager.check()
    manager.commit(seq_id, prompt[: 8 * B])
    manager.windows.open([seq_id], [9 * B])


def test_what_is_held_leaves_room_for_others():
    """Of 16 blocks 1 is free, and 13 are cached and nobody's: 10 of them are held. The two in use count for nothing."""
    life = life_of(2 * B, num_window_blocks=16)
    prompt = tokens_of(15 * B)
    computed(life, prompt, B)
    places = [life.manager.hold_cached(prompt).windows[0].has.tolist() for _ in range(2)]
    assert places == [[False] * 3 + [True] * 12] * 2
    assert life.manager.windows[0].blocks.num_free == 4
    life.release(life.next_id)
    with pytest.raises(RuntimeError):
        life.manager.reset_prefix_cache()


def test_a_fork_writes_into_a_copy():
    life = life_of(B, 3 * B)
    computed(life, tokens_of(3 * B + 2))
    for new_id in (2, 3):
        life.manager.fork(1, new_id)
        life.on_device[new_id] = replace(life.on_device[1])
    life.check()
    for i, seq_id in enumerate((2, 1, 3)):
        life.manager.append([seq_id], B)
        life.on_device[seq_id].tokens = life.on_device[seq_id].tokens + [50 + i] * B
        life.write(seq_id, len(life.on_device[seq_id].tokens))
        life.check()
    assert life.memory.num_moved["copy"] == 3 * 2  # in three groups, for all but the last holder
    with pytest.raises(ValueError, match="num_tokens must be in \\[16, 18\\], got 12"):
        life.manager.fork(1, 4, 12)


def with_host(
    window: int, num_window_blocks: int, num_host: int, num_host_window_blocks: int, num_blocks: int = 64, **options
) -> GroupLife:
    groups = [Window(window, num_window_blocks, num_host_window_blocks)]
    return GroupLife(BlockManager(num_blocks, B, groups=groups, num_host_blocks=num_host, **options))


def test_without_room_on_the_host_a_swap_changes_nothing():
    life = with_host(2 * B, num_window_blocks=6, num_host=32, num_host_window_blocks=0)
    life.begin(tokens_of(B + 1))
    life.write(1, B + 1)
    with pytest.raises(OutOfBlocks):
        life.manager.swap_out(1)
    life.check()


def test_a_swap_that_another_group_refuses_gives_no_block_back():
    """Blocks before the window are given back when the sequence moves on, which rows leave for later."""
    manager = BlockManager(8, B, num_host_blocks=8, groups=[Window(B, 8, 8), States(2, num_host_slots=0)])
    prompt = tokens_of(2 * B - 1)
    manager.allocate("a", prompt)
    manager.windows.open(["a"], [len(prompt)])
    manager.commit("a", prompt)
    rows = manager.rows.of(["a"])
    manager.rows.append(rows)
    manager.windows.open(["a"], [2 * B])
    manager.rows.commit(rows, [99])
    window, before = manager.windows[0], manager.stats()
    stats, num_held = window.blocks.stats(), window.num_held_by("a")
    with pytest.raises(OutOfBlocks):
        manager.swap_out("a")
    assert (manager.stats(), window.blocks.stats(), window.num_held_by("a")) == (before, stats, num_held)
    manager.check()
    assert window.num_held_by("a") > (window.move_on("a"), window.num_held_by("a"))[1]


def test_pins_keep_the_last_window_of_their_prefix():
    life = with_host(2 * B, num_window_blocks=6, num_host=0, num_host_window_blocks=0, pin_quota=4)
    prompt = tokens_of(4 * B)
    computed(life, prompt, B)
    life.release(1)
    life.manager.space.pin(prompt)
    for first in (50, 90):
        computed(life, tokens_of(4 * B, first), B)
        life.release(life.next_id)
    assert life.manager.num_cached([*prompt, 7]) == 4 * B
    computed(life, tokens_of(6 * B, 130), 6 * B)  # needs all blocks: pins keep nothing from running
    assert life.manager.num_cached([*prompt, 7]) == 0


def test_a_step_without_room_in_one_window_makes_none_in_the_others():
    life = life_of(B, 6 * B, num_window_blocks=4)
    life.begin(tokens_of(6 * B))
    with pytest.raises(OutOfBlocks) as caught:
        life.manager.windows.open([1], [6 * B])
    assert (caught.value.needed, caught.value.free) == (6, 4)
    assert [window.blocks.num_free for window in life.manager.windows] == [4, 4]
    with pytest.raises(ValueError, match=r"positions of 1 must be in \[0, 0\], got \[0, 1\]"):
        life.manager.windows[0].slots(1, 0, 1)
    life.write(1, 4 * B)
    with pytest.raises(OutOfBlocks):
        life.manager.windows.open([1], [4 * B + 1])
    life.check()
    with pytest.raises(OutOfBlocks):
        life.manager.allocate(2, [9] * 64 * B)
    life.check()


def test_room_is_asked_for_before_the_full_layers_have_it():
    """A call that is refused there cannot give their room back where a step under way writes into it."""
    life = life_of(B, 6 * B, num_window_blocks=3)
    life.begin(tokens_of(2 * B))
    life.write(1, 2 * B)
    before = life.manager.stats(), [window.blocks.num_free for window in life.manager.windows]
    life.manager.windows.check_open([1], [3 * B])  # each window takes one block more
    with pytest.raises(OutOfBlocks):
        life.manager.windows.check_open([1], [4 * B])
    assert (life.manager.stats(), [window.blocks.num_free for window in life.manager.windows]) == before
    with pytest.raises(ValueError, match=r"ends must be in \[8, 8\], got 9 for 1"):
        life.manager.windows.open([1], [2 * B + 1])
    life.check()


@pytest.mark.parametrize("num_window_blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("window", [1, B - 1, B, B + 1])
def test_room_for_as_many_tokens_as_fit(window, num_window_blocks):
    life = life_of(window, num_window_blocks=num_window_blocks)
    life.manager.allocate(1, tokens_of(8 * B))
    end = life.manager.windows.open_as_far(1, 8 * B)
    assert end == min(8, num_window_blocks) * B
    assert len(life.manager.windows[0].slot_mappings([1, 1], [0, 1], [end, 1])) == end
    life.manager.commit(1, tokens_of(8 * B)[: end - 1])
    assert life.manager.windows.open_as_far(1, end) == end
    life.manager.check()


def test_as_far_without_room_for_the_copy_of_a_shared_block():
    life = life_of(B, num_window_blocks=1)
    computed(life, tokens_of(2))
    life.manager.fork(1, 2)
    life.manager.append([1, 2], [1, 1])
    assert [life.manager.windows.open_as_far(seq, 3) for seq in (1, 2)] == [2, 2]
    life.manager.release(2)
    assert life.manager.windows.open_as_far(1, 3) == 3
    life.manager.check()


@pytest.mark.parametrize("num_opened", [0, B - 1, B])
def test_a_commit_needs_room_in_all_windows(num_opened):
    life = life_of(B, 6 * B)
    life.begin(tokens_of(2 * B + 1))
    life.manager.windows.open([1], [num_opened])
    most = -(-num_opened // B) * B
    with pytest.raises(ValueError, match=f"windows of 1 must be opened for its tokens, got {most + 1} beyond {most}"):
        life.manager.commit(1, tokens_of(most + 1))
    assert life.manager.state(1).num_written == 0
    life.check()
    life.manager.commit(1, tokens_of(most))
    life.manager.check()


def test_bad_arguments_change_nothing():
    life = life_of(B)
    manager = life.manager
    life.begin(tokens_of(2 * B))
    life.write(1, B)
    for arguments, error, words in [
        (([1, 1], [B, B]), ValueError, "seq_ids must be distinct"),
        (([1], [B - 1]), ValueError, r"ends must be in \[4, 8\], got 3 for 1"),
        (([1], [2 * B + 1]), ValueError, r"ends must be in \[4, 8\], got 9 for 1"),
        (([1], [B, B]), ValueError, "ends must have one entry for each of 1 sequences"),
        (([1], [1.5]), TypeError, "ends must be integers"),
        (([2], [B]), KeyError, "2"),
    ]:
        with pytest.raises(error, match=words):
            manager.windows.open(*arguments)
    with pytest.raises(ValueError, match=r"ends must be in \[4, 8\], got 9 for 1"):
        manager.windows.open_as_far(1, 2 * B + 1)
    life.check()
    for groups, error, words in [
        ([5], TypeError, "groups must be Windows and States, got int"),
        ([States(1), States(1)], ValueError, "groups must hold at most one States, got 2"),
    ]:
        with pytest.raises(error, match=words):
            BlockManager(8, B, groups=groups)
    for numbers in ((0, 1), (1, 0), (-1, 4)):
        with pytest.raises(ValueError, match="must be an integer of at least 1"):
            Window(*numbers)
    with pytest.raises((TypeError, ValueError)):
        Window(1.5, 2)


def test_a_step_waits_for_its_copies():
    life = life_of(B)
    computed(life, tokens_of(B + 1))
    life.manager.fork(1, 2)
    life.manager.append([2])
    life.manager.windows.open([2], [B + 2])
    for call in (lambda: life.manager.windows[0].tables([2]), lambda: life.manager.windows[0].slots(2, B, B + 2)):
        with pytest.raises(RuntimeError, match="do_moves of the window's group"):
            call()
    life.memory.do_moves()
    assert life.manager.windows[0].tables([1, 2]).dtype == np.int32
    assert life.manager.windows[0].tables([]).shape == (0, 0)


@pytest.mark.parametrize("after_hits", [None, 0])
def test_a_windows_block_is_found_while_the_trees_is_on_the_host_alone(after_hits: int | None) -> None:
    """Also where the tree's block went there before the window's stood beside it."""
    policy, groups = HostPolicy(after_hits), [Window(5, 32)]
    manager = BlockManager(4, B, num_host_blocks=16, host_policy=policy, groups=groups)
    prompts = [tokens_of(3 * B + 1), [token + 100 for token in tokens_of(3 * B + 1)]]
    for seq_id, prompt in enumerate(prompts):
        manager.allocate(seq_id, prompt)
        manager.windows.open([seq_id], [len(prompt)])
        manager.commit(seq_id, prompt)
        manager.release(seq_id)
    assert [manager.num_cached(prompt) for prompt in prompts] == [3 * B, 3 * B]
