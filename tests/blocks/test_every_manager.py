"""What all kinds of managers promise alike: what they refuse, that it changes nothing, and what a reset waits for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.managers import manager_of_states

from kvpage import BlockManager
from kvpage.blocks.groups.window_blocks import Window

B, NUM_BLOCKS = 4, 16
KINDS: dict[str, Callable[[], BlockManager]] = {
    "one table": lambda: BlockManager(NUM_BLOCKS, B),
    "states": lambda: manager_of_states(NUM_BLOCKS, B, num_slots=8),
    "windows": lambda: BlockManager(NUM_BLOCKS, B, groups=[Window(5, NUM_BLOCKS)]),
}


@pytest.fixture(params=KINDS)
def manager(request: pytest.FixtureRequest) -> BlockManager:
    """Sequence 0 has B committed tokens and room for one more; of sequence 1 all B tokens are committed."""
    made = KINDS[request.param]()
    for seq_id, num_tokens in ((0, B + 1), (1, B)):
        made.allocate(seq_id, [seq_id] * num_tokens)
        if made.windows:
            made.windows.open([seq_id], [num_tokens])
        made.commit(seq_id, [seq_id] * B)
    return made


def seen(manager: BlockManager) -> object:
    """All that a refused call could have changed."""
    manager.check()
    ids = [manager.block_ids(seq_id).tolist() for seq_id in (0, 1)]
    states = [repr(manager.state(seq_id)) for seq_id in (0, 1)]
    return manager.stats(), ids, states, manager.tree.num_matches


BAD_CALLS: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "seq_id in use": (lambda m: m.allocate(0, [1]), ValueError, "seq_id must not be in use, 0 is"),
    "no tokens": (lambda m: m.allocate(9, []), ValueError, "at least one token"),
    "negative max_cached_tokens": (lambda m: m.allocate(9, [1], max_cached_tokens=-1), ValueError, "must not be neg"),
    "negative num_left_over": (lambda m: m.allocate(9, [1], num_left_over=-1), ValueError, "num_left_over must not be"),
    "part of a num_left_over": (lambda m: m.allocate(9, [1], num_left_over=1.5), TypeError, "num_left_over must be an"),
    "priority 8": (lambda m: m.allocate(9, [1], priority=8), ValueError, "priority"),
    "unknown make_private": (lambda m: m.make_private(9), KeyError, "9"),
    "float tokens": (lambda m: m.allocate(9, [1.5]), ValueError, "must be integers"),
    "two-dimensional tokens": (lambda m: m.allocate(9, [[1]]), ValueError, "one-dimensional"),
    "token of 33 bits": (lambda m: m.allocate(9, [1 << 32]), ValueError, "32 bits"),
    "namespace of text": (lambda m: m.allocate(9, [1], "tenant"), TypeError, "namespace must be bytes, got str"),
    "no namespace": (lambda m: m.allocate(9, [1], None), TypeError, "namespace must be bytes, got NoneType"),
    "explain in a text": (lambda m: m.explain([1], "tenant"), TypeError, "namespace must be bytes"),
    "append of a float": (lambda m: m.append([0], 1.0), TypeError, "num_new_tokens must be .* integer.*, got 1.0"),
    "append of floats": (lambda m: m.append([0], [1.5]), TypeError, r"num_new_tokens must be .* integer.*, got \[1.5"),
    "append of an array of floats": (lambda m: m.append([0], np.ones(1)), TypeError, "num_new_tokens must be"),
    "append of nothing": (lambda m: m.append([0], None), TypeError, "num_new_tokens must be .*, got None"),
    "append of text": (lambda m: m.append([0], "1"), TypeError, "num_new_tokens must be .*, got '1'"),
    "slot of a float": (lambda m: m.slot_mapping(0, 0.5, 2), TypeError, "starts must be integers, got float64"),
    "slots to a float": (lambda m: m.slot_mappings([0], [0], [2.0]), TypeError, "ends must be integers, got float64"),
    "slots of text": (lambda m: m.slot_mapping(0, "0", 2), TypeError, "starts must be integers"),
    "slots without an end": (lambda m: m.slot_mappings([0], [0], []), ValueError, "one entry for each"),
    "slots of two dimensions": (lambda m: m.slot_mappings([0], [[0]], [[1]]), ValueError, "one entry for each"),
    "unknown append": (lambda m: m.append([0, 9]), KeyError, "9"),
    "append twice": (lambda m: m.append([0, 0]), ValueError, "distinct"),
    "negative append": (lambda m: m.append([0], [-1]), ValueError, "negative"),
    "append count missing": (lambda m: m.append([0], [1, 2]), ValueError, "one per sequence"),
    "commit too much": (lambda m: m.commit(0, [1] * 99), ValueError, "room|opened"),
    "unknown commit": (lambda m: m.commit(9, [1]), KeyError, "9"),
    "fork of uncommitted": (lambda m: m.fork(0, 9), ValueError, "committed"),
    "fork onto one in use": (lambda m: m.fork(0, 0), ValueError, "in use"),
    "unknown fork": (lambda m: m.fork(9, 10), KeyError, "9"),
    "unknown release": (lambda m: m.release(9), KeyError, "9"),
    "unknown swap_in": (lambda m: m.swap_in(9, [1]), KeyError, "9"),
    "unknown swap_out": (lambda m: m.swap_out(9), KeyError, "9"),
    "slots past the end": (lambda m: m.slot_mapping(0, 0, B + 2), ValueError, "positions"),
    "slots backwards": (lambda m: m.slot_mapping(0, 2, 1), ValueError, "positions"),
    "reset amid sequences": (lambda m: m.reset_prefix_cache(), RuntimeError, "all sequences to be released, 2 are not"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_raise_and_change_nothing(manager: BlockManager, case: str) -> None:
    call, error, text = BAD_CALLS[case]
    before = seen(manager)
    with pytest.raises(error, match=text):
        call(manager)
    assert seen(manager) == before


def test_a_reset_leaves_nothing(manager: BlockManager) -> None:
    for seq_id in (0, 1):
        manager.release(seq_id)
    manager.reset_prefix_cache()
    assert manager.tree.num_cached == 0 and manager.num_free_blocks == manager.pool.num_free == NUM_BLOCKS
    manager.check()


def test_the_check_finds_a_block_that_nobody_has(manager: BlockManager) -> None:
    manager.check()
    manager.pool.allocate(1)
    with pytest.raises(RuntimeError):
        manager.check()
