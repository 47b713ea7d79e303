"""Loading or computing: every call and every kind of manager decides by the same rule, on tokens that loading saves."""

import numpy as np
import pytest

from kvpage import BlockManager, States, Window
from kvpage.blocks.load_or_compute import LoadOrCompute

B, NUM_BLOCKS = 4, 16
KINDS = {
    "one table": (),
    "windows": (Window(2 * B, NUM_BLOCKS, NUM_BLOCKS),),
    "states": (States(8, 8),),
    "both": (Window(2 * B, NUM_BLOCKS, NUM_BLOCKS), States(8, 8)),
}
TOKENS = list(range(1, 3 * B + 3))  # three cached blocks, and one of the sequence's own with two tokens


def a_rule(tokens_per_second: float | None = None, latency: float = 0.0) -> LoadOrCompute:
    """A block takes a second to load. Without a speed of computing, all is loaded."""
    return LoadOrCompute(1, B, bytes_per_second=1.0, tokens_per_second=tokens_per_second, latency=latency)


def manager_of(kind: str, rule: LoadOrCompute | None, is_caching: bool = True) -> BlockManager:
    groups = KINDS[kind]
    return BlockManager(NUM_BLOCKS, B, is_caching, num_host_blocks=NUM_BLOCKS, rule=rule, groups=groups)


def make_moves(manager: BlockManager) -> int:
    """Return how many blocks of the layers that attend to all tokens come from the host."""
    num_loaded = sum(len(move.pairs) for move in manager.take_moves() if move.kind == "swap_in")
    for window in manager.windows:
        window.blocks.moves.do(lambda move: None)
    if manager.states:
        manager.states.do_moves(lambda move: None)
    return num_loaded


def compute(manager: BlockManager, seq_id: object, start: int = 0) -> None:
    """Compute TOKENS, as a step does."""
    manager.windows.open([seq_id], [len(TOKENS)])
    if manager.states:
        manager.states.reserve(seq_id, start, len(TOKENS))
    make_moves(manager)
    manager.commit(seq_id, TOKENS[start:])
    manager.keep(seq_id)


def evict(manager: BlockManager, num_blocks: int) -> None:
    """Move cached blocks to the host, the last ones of the prompt first."""
    num_needed = manager.pool.num_free + num_blocks
    manager.allocate("filler", np.arange(1000, 1000 + num_needed * B))
    make_moves(manager)
    manager.release("filler")


def swapped_out(kind: str, rule: LoadOrCompute, num_evicted: int, is_caching: bool = True) -> BlockManager:
    """Return a manager whose one sequence is off the device, with `num_evicted` of its cached blocks on the host."""
    manager = manager_of(kind, rule, is_caching)
    manager.allocate(0, TOKENS, cache_at=[B])
    compute(manager, 0)
    manager.swap_out(0)
    make_moves(manager)
    if num_evicted:
        evict(manager, num_evicted)
    return manager


def on_device(manager: BlockManager) -> int:
    return int((manager.tree.look(TOKENS, b"")[0][0] >= 0).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_evicted", [0, 1, 2, 3])
def test_a_swapped_sequence_comes_back_from_the_host_where_that_is_faster(kind, num_evicted):
    rule = a_rule()
    manager = swapped_out(kind, rule, num_evicted)
    assert on_device(manager) == 3 - num_evicted
    rule.tokens_per_second = 0.1
    assert manager.swap_in(0, TOKENS).num_cached_tokens == len(TOKENS)
    assert make_moves(manager) == num_evicted + 1
    manager.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_evicted", [0, 1, 2, 3])
def test_a_swapped_sequence_is_computed_again_where_that_is_faster(kind, num_evicted):
    """Nothing comes from the host: neither cached blocks, nor the sequence's own."""
    rule = a_rule()
    manager = swapped_out(kind, rule, num_evicted)
    rule.tokens_per_second = 1e9
    has_states = any(isinstance(group, States) for group in KINDS[kind])
    expected = (3 - num_evicted) * B
    if has_states:  # states stand after the first block, and before the last token, beside the third block
        expected = min(expected, B) if num_evicted else len(TOKENS) - 1
    num_cached = manager.swap_in(0, TOKENS).num_cached_tokens
    assert num_cached == expected and make_moves(manager) == 0
    manager.check()
    compute(manager, 0, num_cached)
    manager.release(0)
    manager.check()
    assert manager.num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("kind", KINDS)
def test_without_prefix_caching_the_rule_is_the_same(kind):
    rule = a_rule()
    manager = swapped_out(kind, rule, 0, is_caching=False)
    rule.tokens_per_second = 1e9
    assert manager.swap_in(0, TOKENS).num_cached_tokens == 0 and make_moves(manager) == 0
    manager.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_one_block_is_loaded_for_as_many_tokens_as_that_saves(kind, is_swapped):
    """A block takes 1 second, its tokens 0.8. But without it states begin at 0, and all of their tokens take longer."""
    rule = a_rule()
    manager = manager_of(kind, rule)
    manager.allocate(0, TOKENS, cache_at=[3 * B])
    compute(manager, 0)
    manager.swap_out(0) if is_swapped else manager.release(0)
    make_moves(manager)
    evict(manager, 1)
    rule.tokens_per_second = B / 0.8
    has_states = manager.states is not None
    num_cached = (manager.swap_in if is_swapped else manager.allocate)(0, TOKENS).num_cached_tokens
    assert num_cached == (len(TOKENS) - (not is_swapped) if has_states else 2 * B)
    assert make_moves(manager) == (1 + is_swapped if has_states else 0)
    manager.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens_per_second", [1e9, 0.1])
def test_what_is_told_to_be_cached_is_what_a_prompt_gets(kind, tokens_per_second):
    rule = a_rule()
    manager = manager_of(kind, rule)
    manager.allocate(0, TOKENS, cache_at=[B, 3 * B])
    compute(manager, 0)
    manager.release(0)
    evict(manager, 2)
    rule.tokens_per_second = tokens_per_second
    told, explained = manager.num_cached(TOKENS), manager.explain(TOKENS).num_cached_tokens
    num_cached = manager.allocate(1, TOKENS).num_cached_tokens
    longest = len(TOKENS) - 1 if manager.states else 3 * B
    assert told == explained == num_cached == (B if tokens_per_second > 1 else longest)


def test_the_rule_counts_the_tokens_that_are_saved():
    """And whole blocks are the same with their tokens and without, also where a sum is rounded."""
    rounded = LoadOrCompute(1, 10, bytes_per_second=10.0, tokens_per_second=50.0, latency=0.3)
    rule = LoadOrCompute(1000, 10, bytes_per_second=1e6, tokens_per_second=1000.0, latency=0.05)
    for num_blocks in range(100):
        for each in (rounded, rule):
            assert each.should_load(num_blocks, num_blocks * 10) == each.should_load(num_blocks)
    assert [rule.should_load(1, num_tokens) for num_tokens in (0, 50, 51, 52)] == [False, False, False, True]
    rule.tokens_per_second = None
    assert rule.should_load(1, 0)


# --- the rule alone ---


@pytest.mark.parametrize(("name", "call"), [("bytes_per_second", "saw_transfer"), ("tokens_per_second", "saw_prefill")])
def test_speeds_are_moving_averages(name, call):
    """The newest measurement weighs a fifth. Nothing, or no time, is no measurement."""
    rule = LoadOrCompute(1, B)
    see = getattr(rule, call)
    see(1, 2.0)
    assert getattr(rule, name) == 0.5
    see(21, 2.0)
    assert getattr(rule, name) == pytest.approx(0.5 + 0.2 * 10)
    before = getattr(rule, name)
    for amount, seconds in ((0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0)):
        see(amount, seconds)
        assert getattr(rule, name) == before
    see(5, 0.5)
    assert getattr(rule, name) == pytest.approx(before + 0.2 * (10 - before))


@pytest.mark.parametrize("speeds", [{}, {"bytes_per_second": 1e-9}, {"tokens_per_second": 1e9}])
def test_a_rule_that_lacks_a_speed_loads_and_stores_all(speeds):
    rule = LoadOrCompute(1, B, latency=1.0, **speeds)
    assert rule.fewest_to_load == 0 and rule.should_store() is True
    for num_blocks in (0, 1, 9):
        assert rule.should_load(num_blocks) is rule.should_load(num_blocks, num_blocks * B + 1) is True


def test_loading_takes_its_latency_and_the_blocks_time():
    assert LoadOrCompute(6, B, latency=0.5).load_seconds(3) is None
    rule = LoadOrCompute(6, B, bytes_per_second=2.0, latency=0.5)
    assert [rule.load_seconds(num_blocks) for num_blocks in (0, 1, 3)] == [0.5, 3.5, 9.5]


def test_what_takes_as_long_is_computed():
    """A block takes a second, either way."""
    rule = LoadOrCompute(1, B, bytes_per_second=1.0, tokens_per_second=float(B))
    assert rule.fewest_to_load is None and rule.should_store() is False
    assert [rule.should_load(num_blocks) for num_blocks in (0, 1, 9)] == [False] * 3
    assert [rule.should_load(1, num_tokens) for num_tokens in (B - 1, B, B + 1)] == [False, False, True]
    rule.tokens_per_second = B / 2
    rule.latency = 1.0  # as long as the first block saves
    assert rule.fewest_to_load == 2 and rule.should_store() is True
    assert [rule.should_load(num_blocks) for num_blocks in (0, 1, 2)] == [False, False, True]
    assert [rule.should_load(2, num_tokens) for num_tokens in (5, 6, 7)] == [False, False, True]
    assert rule.should_load(2 * B, 2) is False


def test_the_rule_loads_until_it_knows_better():
    rule = LoadOrCompute(block_bytes=1000, block_size=10)
    assert rule.should_load(1) and rule.should_store()
    rule.saw_transfer(5000, 1.0)  # 0.2 s a block
    assert rule.should_load(1)
    rule.saw_prefill(100, 1.0)  # 0.1 s a block
    assert not rule.should_load(1) and not rule.should_load(100) and not rule.should_store()
    for _ in range(60):
        rule.saw_transfer(1_000_000, 1.0)
    assert rule.should_load(1) and rule.should_store()
    rule.saw_transfer(0, 1.0)
    rule.saw_prefill(10, 0.0)
    assert rule.should_load(1)


def test_latency_decides_over_few_blocks_only():
    rule = LoadOrCompute(1000, 10, bytes_per_second=1e6, tokens_per_second=1000.0, latency=0.05)
    assert [rule.should_load(n) for n in (1, 5, 6, 100)] == [False, False, True, True] and rule.should_store()


@pytest.mark.parametrize("name", ["block_bytes", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "1", None])
def test_a_block_is_of_a_positive_number(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {value!r}"):
        LoadOrCompute(**{"block_bytes": 1, "block_size": 1, name: value})


@pytest.mark.parametrize("name", ["bytes_per_second", "tokens_per_second"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_speeds_of_a_rule_are_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive, got {value!r}"):
        LoadOrCompute(1, 1, **{name: value})


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_latency_is_not_negative(value):
    with pytest.raises(ValueError, match=f"latency must not be negative, got {value!r}"):
        LoadOrCompute(1, 1, latency=value)


@pytest.mark.parametrize("name", ["bytes_per_second", "tokens_per_second", "latency"])
@pytest.mark.parametrize("value", ["1e9", [1.0], 1j])
def test_speeds_of_a_rule_are_numbers(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a number, got {type(value).__name__}"):
        LoadOrCompute(1 << 16, 4, **{name: value})


def test_a_latency_is_needed():
    with pytest.raises(TypeError, match="latency must be a number, got NoneType"):
        LoadOrCompute(1, 1, latency=None)
