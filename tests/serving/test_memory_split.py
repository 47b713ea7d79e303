"""The split of memory over blocks of all tokens and windows, or checkpoints: compared with the best split of any."""

from itertools import product

import pytest

from kvpage.serving.assembly.memory_split import checkpoint_share, num_beside, split_windows


@pytest.mark.parametrize(("most", "expected"), [(0, 0), (1, 1), (4, 4), (5, 5), (6, 5)])
def test_units_take_half_of_the_memory_at_most(most: int, expected: int) -> None:
    assert num_beside(109, 1, 10, most) == expected
    assert num_beside(54, 0, 10, most) == expected  # nothing else needs it


def test_windows_of_four_times_the_running_sequences_come_first() -> None:
    assert split_windows(10_000, 5, 20, num_sequence_blocks=6, num_seqs=3, num_step_blocks=7) == (
        (10_000 - 20 * (4 * 3 * 6 + 7)) // 5,
        4 * 3 * 6 + 7,
    )


def test_windows_alone_take_all_memory() -> None:
    assert split_windows(59, 0, 10, num_sequence_blocks=2, num_seqs=4, num_step_blocks=0) == (0, 5)
    assert split_windows(20, 0, 10, num_sequence_blocks=2, num_seqs=4, num_step_blocks=0) == (0, 2)
    assert split_windows(19, 0, 10, num_sequence_blocks=2, num_seqs=4, num_step_blocks=0) is None


@pytest.mark.parametrize(("num_bytes", "expected"), [(0, None), (60, None), (61, None), (72, (12, 6)), (73, (13, 6))])
def test_one_table_where_a_window_leaves_no_more_to_the_others(num_bytes: int, expected: object) -> None:
    """72 bytes are 6 blocks of one table, or 6 blocks of a window and 12 others."""
    assert split_windows(num_bytes, 1, 10, num_sequence_blocks=6, num_seqs=1, num_step_blocks=0) == expected


@pytest.mark.parametrize(("block_bytes", "window_bytes", "window"), [*product((1, 5, 20), (1, 5, 20), (2, 3, 10))])
def test_half_as_many_sequences_fit_at_least_as_in_the_best_split(block_bytes, window_bytes, window) -> None:
    for num_bytes, length, num_seqs in product((0, 99, 400, 3000), (10, 11, 40, 150), (1, 3)):
        split = split_windows(num_bytes, block_bytes, window_bytes, window, num_seqs, 2)
        num_table_blocks = num_bytes // (block_bytes + window_bytes)
        num_blocks, num_window_blocks = split or (num_table_blocks, num_table_blocks)
        assert num_blocks * block_bytes + num_window_blocks * window_bytes <= num_bytes
        fitting = num_blocks // length
        if split is not None:
            assert num_blocks > num_table_blocks
            fitting = min(fitting, num_window_blocks // window)
        best = num_bytes // (block_bytes * length + window_bytes * window)
        assert fitting >= min(best // 2, 4 * num_seqs)


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes", "num_slots"),
    [(0, 1, 0), (19, 1, 0), (20, 1, 1), (639, 1, 31), (640, 1, 32), (10**6, 1, 32), (39, 0, 3), (10**6, 0, 32)],
)
def test_checkpoints_are_sixteen_for_each_running_sequence_at_most(num_bytes, block_bytes, num_slots) -> None:
    assert checkpoint_share(num_bytes, block_bytes, 10, num_seqs=2) == 10 * num_slots
