"""explain: how far each group reaches into a prompt, and why it ends there. Nothing is changed by asking."""

import random

import pytest
from support.block_requests import computed
from support.hybrid_requests import B, manager_of, serve
from support.seeds import seed_of

from kvpage import BlockManager
from kvpage.blocks.explain import MOST_NAMESPACES, Ending, Explanation
from kvpage.blocks.load_or_compute import LoadOrCompute
from kvpage.blocks.manager import BlockManager as Manager
from kvpage.blocks.namespaces import OF_WEIGHTS, WeightsName, past_version

TOKENS = list(range(1, 3 * B + 2))


def filled(**options) -> BlockManager:
    manager = BlockManager(16, B, **options)
    computed(manager, 0, TOKENS)
    manager.release(0)
    return manager


def fill(manager: Manager, num_blocks: int) -> None:
    """Take blocks for a moment, without leaving any cached."""
    manager.allocate("filler", range(1000, 1000 + num_blocks * B))
    manager.do_moves(lambda move: None)
    manager.release("filler")


def reach(manager: Manager, tokens, namespace=b"") -> Explanation:
    before = manager.stats()
    found = manager.explain(tokens, namespace)
    assert manager.stats() == before and str(found).count("\n") >= 1
    return found


@pytest.mark.parametrize("shared", range(3 * B))
def test_the_first_token_that_differs_is_named(shared):
    manager = filled()
    tokens = [*TOKENS[:shared], 99, 98, 97]
    found = reach(manager, tokens)
    (group,) = found.groups
    assert (group.ending, group.num_tokens, group.differs_at) == (Ending.DIFFERENT, shared, shared)
    assert (group.token, group.cached_token) == (99, TOKENS[shared])
    assert found.num_cached_tokens == shared == manager.allocate(1, tokens).num_cached_tokens


def test_whole_blocks_alone():
    found = reach(filled(share_parts=False), [*TOKENS[: B + 1], 99])
    assert found.num_cached_tokens == B == found.groups[0].num_tokens and found.groups[0].differs_at == B + 1


def test_the_end_of_the_prompt_and_of_what_is_cached():
    manager = filled()
    assert reach(manager, TOKENS[: 2 * B]).groups[0].ending is Ending.PROMPT
    assert reach(manager, TOKENS[: 2 * B]).num_cached_tokens == 2 * B - 1
    assert reach(manager, TOKENS[: 2 * B + 1]).groups[0].ending is Ending.PROMPT
    assert reach(manager, [*TOKENS, 7]).groups[0].ending is Ending.NOT_CACHED
    assert reach(BlockManager(4, B, False), TOKENS).groups[0].ending is Ending.OFF


def test_what_a_prompt_cannot_use_is_not_missed():
    """One token is left to compute at least. What differs there is told nevertheless."""
    whole = reach(filled(), [*TOKENS[:10], 99]).groups[0]
    assert (whole.num_tokens, whole.ending, whole.differs_at) == (10, Ending.PROMPT, 10)
    assert reach(filled(), TOKENS[:1]).groups[0].ending is Ending.PROMPT


@pytest.mark.parametrize("share_parts", [True, False])
@pytest.mark.parametrize("latency", [None, 0.03, 0.6])
def test_a_request_finds_what_was_said(latency, share_parts):
    """Blocks are in both tiers, and the rule refuses some of them."""
    rng = random.Random(f"{latency} {share_parts}")
    rule = (
        None if latency is None else LoadOrCompute(1, B, bytes_per_second=1.0, tokens_per_second=3.9, latency=latency)
    )
    manager = BlockManager(40, B, num_host_blocks=12, share_parts=share_parts, rule=rule)
    for seq_id in range(300):
        tokens = [rng.choice((1, 1, 1, 2)) for _ in range(rng.randrange(1, 6 * B + 2))]
        told = manager.explain(tokens).num_cached_tokens
        found = manager.allocate(seq_id, tokens).num_cached_tokens
        assert told == found
        manager.do_moves(lambda move: None)
        manager.commit(seq_id, tokens[found:])
        manager.release(seq_id)
        if manager.num_free_blocks < 12 or rng.random() < 0.4:
            fill(manager, rng.randrange(20, 40))
    space = manager.stats().space
    assert (space.host_hit_tokens > 0) == (latency != 0.6) and (space.refused_tokens > 0) == (latency is not None)


@pytest.mark.parametrize("num_host_blocks", [0, 5])
@pytest.mark.parametrize("num_running", [0, 2])
def test_a_part_is_not_promised_where_no_block_is_left_to_copy_it_to(num_host_blocks, num_running):
    rng = random.Random(seed_of(num_host_blocks + num_running))
    manager, num_lacking = BlockManager(8, B, num_host_blocks=num_host_blocks), 0
    for seq_id in range(num_running):
        computed(manager, f"running {seq_id}", [seq_id, 1, 1])
    for seq_id in range(400):
        tokens = [rng.choice((1, 1, 2)) for _ in range(rng.randrange(1, (6 - num_running) * B + 2))]
        told = manager.explain(tokens)
        found = manager.allocate(seq_id, tokens).num_cached_tokens
        assert told.num_cached_tokens == found
        if told.lacks_room:
            num_lacking += 1
            assert told.groups[0].num_tokens > found and found % B == 0 and "no block is left" in str(told)
        manager.do_moves(lambda move: None)
        manager.commit(seq_id, tokens[found:])
        manager.release(seq_id)
    assert num_lacking


def test_a_pin_that_ends_for_a_prompt_may_make_room_for_its_part():
    """Explained as things stand: nobody can tell which pins end before they do."""
    manager = BlockManager(3, B, pin_quota=1)
    computed(manager, "pinned", [7] * B)
    manager.space.pin([7] * B)
    manager.release("pinned")
    computed(manager, "running", [1, 1, 2, 2, 3])
    told = manager.explain([1, 1, 9])
    assert (told.num_cached_tokens, told.groups[0].num_tokens, told.lacks_room) == (0, 2, True)
    assert manager.allocate("next", [1, 1, 9]).num_cached_tokens == 2


def test_another_namespace_that_has_more_is_named():
    manager = filled()
    found = reach(manager, TOKENS, b"tenant")
    assert found.elsewhere == (b"", 3 * B) and found.num_cached_tokens == 0
    assert reach(manager, TOKENS).elsewhere is None
    for searched in ("own", "none"):
        assert manager.explain(TOKENS, b"tenant", searched).elsewhere is None
    assert "another namespace, b'', has 12 tokens" in str(found)


def test_a_state_without_a_checkpoint():
    manager = manager_of()
    serve(manager, TOKENS, cache_at=[5])
    found = reach(manager, [*TOKENS[:10], 99, 98])
    attention, state = found.groups
    assert (attention.num_tokens, attention.ending) == (10, Ending.DIFFERENT)
    assert (state.num_tokens, state.ending, state.below, state.above) == (5, Ending.NO_CHECKPOINT, 5, None)
    assert found.num_cached_tokens == 5 == serve(manager, [*TOKENS[:10], 99])
    assert "nearest checkpoint below: 5, above: none" in str(found)


def test_a_checkpoint_that_leaves_no_token_over():
    manager = manager_of()
    serve(manager, TOKENS, cache_at=[2, 2 * B])
    state = reach(manager, TOKENS[: 2 * B]).groups[1]
    assert (state.num_tokens, state.above) == (2, 2 * B)


def test_a_tail_that_reaches_further_than_cached_blocks():
    """The first prompt has the block in another way; the checkpoint's tail has it in the prompt's."""
    manager = manager_of()
    serve(manager, [*TOKENS[:5], 90, 91, 92])
    serve(manager, TOKENS[: B + 3])
    attention, state = reach(manager, [*TOKENS[: B + 2], 80, 81]).groups
    assert (attention.num_tokens, attention.ending, attention.differs_at) == (B + 2, Ending.NOT_CACHED, None)
    assert state.num_tokens == B + 2


def test_an_evicted_checkpoint_is_remembered_while_its_block_is_cached():
    manager = manager_of(num_slots=2, num_blocks=64)
    serve(manager, TOKENS)
    for start in range(100, 500, 100):
        serve(manager, range(start, start + 2 * B))
    state = reach(manager, TOKENS).groups[1]
    assert (state.num_tokens, state.ending, state.above) == (0, Ending.EVICTED, len(TOKENS) - 1)
    manager.space.drop(TOKENS)
    assert reach(manager, TOKENS).groups[1].ending is Ending.NO_CHECKPOINT


def test_a_checkpoint_that_went_with_its_blocks_is_told_of():
    manager = manager_of(num_slots=8, num_blocks=4)
    serve(manager, TOKENS)
    serve(manager, range(100, 100 + 3 * B))
    attention, state = reach(manager, TOKENS).groups
    assert attention.ending is Ending.KV_EVICTED and (state.ending, state.num_tokens) == (Ending.GONE, 0)
    assert "any checkpoint on them" in str(state)


def test_statistics_while_an_anchor_leaves():
    """Any thread may ask: what is read twice may have changed."""
    manager = manager_of()
    serve(manager, TOKENS)
    anchors = manager.states.space.anchors

    manager.tree.evict(manager.tree.num_evictable)
    num_lost = manager.stats().slots.lost
    anchors._at.clear()  # what the tree says is from before they were removed
    assert num_lost > 0 == manager.stats().slots.lost


def test_wrong_arguments():
    for manager in (filled(), manager_of()):
        with pytest.raises(TypeError, match="namespace must be bytes"):
            manager.explain(TOKENS, "tenant")
        with pytest.raises(ValueError, match="at least one token"):
            manager.explain([])


@pytest.mark.parametrize("adapter", ["", "digest"])
@pytest.mark.parametrize("others", ["callers", "versions"])
def test_a_caller_among_many_is_told_of_its_own_other_versions(others, adapter):
    """More namespaces than are searched stand before the caller's own, of other callers or of their versions."""
    num_others = MOST_NAMESPACES + 9
    manager = BlockManager(num_others + 8, B)
    names = [
        WeightsName("v1" if others == "versions" else "", "").within(b"a%d" % number) for number in range(num_others)
    ]
    own = {version: WeightsName(version, adapter).within(b"own") for version in ("", "v1", "v2", "v3")}
    own_lengths = {"": 0, "v1": 2 * B, "v2": B, "v3": 0}
    paths = [(name, TOKENS[: B + 1]) for name in names] + [
        (own[v], TOKENS[: n + 1]) for v, n in own_lengths.items() if n
    ]
    for number, (name, tokens) in enumerate(paths):
        computed(manager, number, tokens, name)
        manager.release(number)
    for version, name in own.items():
        told = manager.explain(TOKENS, name, "own")
        longer = own_lengths[version] < 2 * B
        assert told.version == (("v1", 2 * B) if longer else None) and told.elsewhere is None
        assert manager.explain(TOKENS, name, "none").version is None
    stranger = manager.explain(TOKENS, WeightsName("v3", "another").within(b"own"), "own")
    assert stranger.version is None


@pytest.mark.parametrize("version", ["", "v", "\U0010ffff", "a" * 128])
def test_the_names_of_a_version_end_where_those_of_the_next_begin(version):
    names = [
        WeightsName(version, adapter).within(caller) for adapter in ("", "d") for caller in (b"", b"\xff\xff", b"z")
    ]
    names = [name for name in names if name.startswith(OF_WEIGHTS)]
    end = past_version(names[0])
    assert all(past_version(name) == end > name for name in names)
    for other in ("", "u", "w", "\U0010fffe", "a" * 127, "a" * 129, "b" * 128):
        name = WeightsName(other, "d").within(b"x")
        assert other == version or (name < end) == (name < min(names))
    assert past_version(b"\xff" * 40) == b""
