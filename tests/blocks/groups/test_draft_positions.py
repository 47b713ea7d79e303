"""A draft model's cache is found to the last token, and never with another token after it."""

import pytest
from support.draft_memory import DraftMemory

from kvpage import BlockManager, OutOfBlocks
from kvpage.blocks.drafted_manager import DraftedManager, positions
from kvpage.blocks.explain import Ending
from kvpage.checks.values import MAX_NAMESPACE_BYTES

B = 4


def tokens_of(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


def run(memory: DraftMemory, seq_id: object, tokens: list[int], namespace: bytes = b"") -> int:
    """Begin a sequence, check what it shares, and write the positions whose successor the prompt has."""
    given = memory.allocate(seq_id, tokens, namespace)
    assert len(given.block_ids) == -(-len(tokens) // B)
    memory.check(seq_id, tokens, namespace, given.num_cached_tokens)
    memory.write(seq_id, tokens, namespace, given.num_cached_tokens, len(tokens) - 1)
    memory.check(seq_id, tokens, namespace, len(tokens) - 1)
    memory.manager.check()
    return given.num_cached_tokens


@pytest.mark.parametrize("num_more", [0, 1, 5])
@pytest.mark.parametrize("num_shared", range(3 * B + 3))
def test_a_prompt_shares_every_position_that_its_tokens_determine(num_shared, num_more):
    """The oracle: a position is the same where all tokens up to its successor are; only whole blocks are cached."""
    memory = DraftMemory(BlockManager(64, B))
    first = tokens_of(3 * B + 3)
    assert run(memory, 1, first) == 0
    second = first[:num_shared] + tokens_of(num_more + (num_shared == 0), 100)
    num_cached = (len(first) - 1) // B * B
    assert run(memory, 2, second) == max(min(num_shared - 1, num_cached), 0)


def test_without_parts_only_whole_blocks_are_shared():
    memory = DraftMemory(BlockManager(64, B, share_parts=False))
    run(memory, 1, tokens_of(2 * B + 1))
    assert run(memory, 2, tokens_of(2 * B)) == B
    assert run(memory, 3, tokens_of(2 * B + 1)) == 2 * B
    assert run(memory, 4, [*tokens_of(2 * B), 77]) == B


def test_the_first_token_and_the_namespace_are_part_of_the_key():
    memory = DraftMemory(BlockManager(64, B))
    prompt = tokens_of(2 * B + 1)
    assert run(memory, 1, prompt) == 0
    assert run(memory, 2, [9, *prompt[1:]]) == 0
    assert run(memory, 3, prompt, b"tenant") == 0
    assert run(memory, 4, prompt) == run(memory, 5, prompt, b"tenant") == 2 * B
    assert positions([7, 1, 2], b"x")[0].tolist()[:2] == [1, 2]
    names = {positions([token], space)[1] for token in (0, 1, -1, 256) for space in (b"", b"\0", b"\0\0\0\0")}
    assert len(names) == 12


@pytest.mark.parametrize("num_tokens", [1, 2, B - 1, B, B + 1])
def test_the_last_position_waits_for_its_successor(num_tokens):
    memory = DraftMemory(BlockManager(64, B))
    tokens = tokens_of(num_tokens)
    run(memory, 1, tokens)
    for token in range(50, 50 + 2 * B):
        position = len(tokens) - 1
        tokens.append(token)
        memory.write(1, tokens, b"", position, position + 1)
        memory.manager.append([1])
        memory.check(1, tokens, b"", position + 1)
    memory.manager.release(1)
    assert run(memory, 2, tokens) == (len(tokens) - 1) // B * B


def test_drafted_positions_are_given_back():
    manager = DraftedManager(BlockManager(16, B), BlockManager(16, B))
    manager.allocate(1, tokens_of(B))
    manager.commit(1, tokens_of(B), tokens_of(B - 1, 2))
    manager.append([1], 2 * B)
    assert len(manager.drafts.block_ids(1)) == 3
    for _ in range(2):  # the second time nothing is left to give back
        manager.give_back_room(1)
        assert len(manager.drafts.block_ids(1)) == 1 and manager.drafts.state(1).num_tokens == B
    manager.check()


@pytest.mark.parametrize("num_free", range(4))
def test_the_target_begins_no_later_than_the_draft_model(num_free):
    """Also where a part of a block has no room, and where the prompt has none."""
    memory = DraftMemory(BlockManager(8, B))
    manager = DraftedManager(BlockManager(64, B), memory.manager)
    run(memory, 1, tokens_of(2 * B + 1))
    manager.target.allocate(1, tokens_of(2 * B + 1))
    manager.target.commit(1, tokens_of(2 * B + 1))
    manager.release(1)
    manager.drafts.allocate("fills", [0] * ((8 - num_free - 2) * B))
    for prompt in ([*tokens_of(2 * B), 77], tokens_of(2 * B + 1), tokens_of(2 * B), tokens_of(4 * B), [5], [0] * 9):
        before = manager.target.stats(), manager.drafts.stats()
        try:
            given = manager.allocate(2, prompt)
        except OutOfBlocks as error:
            with pytest.raises(OutOfBlocks) as caught:
                memory.allocate(2, prompt)
            assert (caught.value.needed, caught.value.free) == (error.needed, error.free)
            assert (manager.target.stats(), manager.drafts.stats()) == before
            continue
        assert given.num_cached_tokens == given.drafts.num_cached_tokens
        memory.do_moves()
        manager.target.take_moves()
        manager.release(2)
        manager.check()


def test_a_sequence_goes_to_the_host_and_comes_back():
    memory = DraftMemory(BlockManager(4, B, num_host_blocks=8))
    tokens = tokens_of(2 * B)
    run(memory, 1, tokens)
    memory.manager.swap_out(1)
    run(memory, 2, tokens_of(4 * B, 50))
    memory.manager.release(2)
    given = memory.manager.swap_in(1, positions(tokens)[0])
    assert given.num_cached_tokens == 2 * B - 1
    memory.check(1, tokens, b"", 2 * B - 1)
    memory.manager.swap_out(1)
    with pytest.raises(ValueError, match="tokens must be at least the 7 committed ones, got 6"):
        memory.manager.swap_in(1, positions(tokens[:6])[0])


def test_the_explanation_tells_of_the_prompts_own_tokens():
    memory = DraftMemory(BlockManager(16, B))
    manager, prompt = DraftedManager(BlockManager(16, B), memory.manager), tokens_of(2 * B + 1)
    run(memory, 1, prompt, b"tenant")
    reach = manager.explain([*prompt[:6], 77, 78], b"tenant").groups[1]
    assert (reach.group, reach.num_tokens, reach.ending) == ("successor", 5, Ending.DIFFERENT)
    assert (reach.differs_at, reach.token, reach.cached_token) == (6, 77, 7)
    whole = manager.explain(prompt, b"tenant").groups[1]
    assert (whole.num_tokens, whole.ending) == (2 * B, Ending.PROMPT)
    assert manager.explain(prompt).groups[1].num_tokens == manager.explain([1], b"tenant").groups[1].num_tokens == 0
    off = DraftedManager(BlockManager(16, B), BlockManager(16, B, enable_prefix_caching=False)).explain(prompt)
    assert (off.groups[1].group, off.groups[1].ending) == ("successor", Ending.OFF)


def test_the_first_token_leaves_a_namespace_less_room():
    manager = BlockManager(8, B)
    with pytest.raises(ValueError, match="namespace must be at most"):
        DraftedManager(BlockManager(8, B), manager).allocate(1, [1], b"x" * (MAX_NAMESPACE_BYTES - 3))
    assert manager.stats().num_sequences == 0 and manager.num_free_blocks == 8
    manager.check()
