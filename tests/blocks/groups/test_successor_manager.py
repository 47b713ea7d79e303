"""SuccessorManager: a draft model's cache is found to the last token, and never with another token after it."""

import pytest
from support.draft_memory import DraftMemory

from kvpage import OutOfBlocks
from kvpage.blocks.drafts.successor_manager import SuccessorManager, successors
from kvpage.blocks.explain import Ending

B = 4


def tokens_of(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


def run(memory: DraftMemory, seq_id: object, tokens: list[int], namespace: bytes = b"") -> int:
    """Begin a sequence, check what it shares, and write the positions whose successor the prompt has."""
    given = memory.manager.allocate(seq_id, tokens, namespace)
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
    memory = DraftMemory(SuccessorManager(64, B))
    first = tokens_of(3 * B + 3)
    assert run(memory, 1, first) == 0
    second = first[:num_shared] + tokens_of(num_more + (num_shared == 0), 100)
    num_cached = (len(first) - 1) // B * B
    assert run(memory, 2, second) == max(min(num_shared - 1, num_cached), 0)


def test_without_parts_only_whole_blocks_are_shared():
    memory = DraftMemory(SuccessorManager(64, B, share_parts=False))
    run(memory, 1, tokens_of(2 * B + 1))
    assert run(memory, 2, tokens_of(2 * B)) == B
    assert run(memory, 3, tokens_of(2 * B + 1)) == 2 * B
    assert run(memory, 4, [*tokens_of(2 * B), 77]) == B


def test_the_first_token_and_the_namespace_are_part_of_the_key():
    memory = DraftMemory(SuccessorManager(64, B))
    prompt = tokens_of(2 * B + 1)
    assert run(memory, 1, prompt) == 0
    assert run(memory, 2, [9, *prompt[1:]]) == 0
    assert run(memory, 3, prompt, b"tenant") == 0
    assert run(memory, 4, prompt) == run(memory, 5, prompt, b"tenant") == 2 * B
    assert successors([7, 1, 2], b"x")[0].tolist() == [1, 2]
    names = {successors([token], space)[1] for token in (0, 1, -1, 256) for space in (b"", b"\0", b"\0\0\0\0")}
    assert len(names) == 12


@pytest.mark.parametrize("num_tokens", [1, 2, B - 1, B, B + 1])
def test_the_last_position_waits_for_its_successor(num_tokens):
    memory = DraftMemory(SuccessorManager(64, B))
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
    memory = DraftMemory(SuccessorManager(16, B))
    run(memory, 1, tokens_of(B))
    memory.manager.append([1], 2 * B)
    assert len(memory.manager.block_ids(1)) == 3
    memory.manager.keep_room(1, B)
    assert len(memory.manager.block_ids(1)) == 1 and memory.manager.state(1).num_tokens == B
    memory.manager.keep_room(1, 5 * B)
    assert memory.manager.state(1).num_tokens == B
    memory.manager.check()


@pytest.mark.parametrize("num_free", range(4))
def test_foresee_tells_what_allocate_gives(num_free):
    """Also where a part of a block has no room, and where the prompt has none."""
    memory = DraftMemory(SuccessorManager(8, B))
    run(memory, 1, tokens_of(2 * B + 1))
    memory.manager.release(1)
    memory.manager.allocate("fills", [0] * ((8 - num_free - 2) * B))
    for prompt in ([*tokens_of(2 * B), 77], tokens_of(2 * B + 1), tokens_of(2 * B), tokens_of(4 * B), [5], [0] * 9):
        before = memory.manager.stats()
        try:
            foreseen = memory.manager.foresee(prompt)
        except OutOfBlocks as error:
            with pytest.raises(OutOfBlocks) as caught:
                memory.manager.allocate(2, prompt)
            assert (caught.value.needed, caught.value.free) == (error.needed, error.free)
            assert memory.manager.stats() == before
            continue
        assert memory.manager.stats() == before
        assert memory.manager.allocate(2, prompt).num_cached_tokens == foreseen
        memory.do_moves()
        memory.manager.release(2)
        memory.manager.check()


def test_a_sequence_goes_to_the_host_and_comes_back():
    memory = DraftMemory(SuccessorManager(4, B, num_host_blocks=8))
    tokens = tokens_of(2 * B)
    run(memory, 1, tokens)
    memory.manager.swap_out(1)
    run(memory, 2, tokens_of(4 * B, 50))
    memory.manager.release(2)
    given = memory.manager.swap_in(1, tokens)
    assert given.num_cached_tokens == 2 * B - 1
    memory.check(1, tokens, b"", 2 * B - 1)
    memory.manager.swap_out(1)
    with pytest.raises(ValueError, match="tokens must be at least the 7 committed ones, got 6"):
        memory.manager.swap_in(1, tokens[:6])


def test_the_explanation_tells_of_the_prompts_own_tokens():
    memory = DraftMemory(SuccessorManager(16, B))
    prompt = tokens_of(2 * B + 1)
    run(memory, 1, prompt, b"tenant")
    differs = memory.manager.explain([*prompt[:6], 77, 78], b"tenant")
    reach = differs.groups[0]
    assert (reach.group, reach.num_tokens, reach.ending) == ("successor", 5, Ending.DIFFERENT)
    assert (reach.differs_at, reach.token, reach.cached_token) == (6, 77, 7)
    assert str(differs).startswith("5 of 8 tokens are cached\n  successor: 5 tokens, then the prompt differs")
    whole = memory.manager.explain(prompt, b"tenant")
    assert (whole.num_cached_tokens, whole.groups[0].ending) == (2 * B, Ending.PROMPT)
    other = memory.manager.explain(prompt)
    assert other.elsewhere == (b"tenant", 2 * B) and other.num_cached_tokens == 0
    assert memory.manager.explain([9, *prompt[1:]]).elsewhere is None
    assert memory.manager.explain([1], b"tenant").num_cached_tokens == 0
    off = SuccessorManager(16, B, enable_prefix_caching=False).explain(prompt)
    assert (off.groups[0].group, off.groups[0].ending, off.elsewhere) == ("successor", Ending.OFF, None)


def test_limits_of_what_is_shared():
    manager = SuccessorManager(64, B)
    memory, prompt = DraftMemory(manager), tokens_of(2 * B + 1)
    run(memory, 1, prompt)
    for left, most, expected in ((0, None, 8), (1, None, 8), (2, None, 7), (9, None, 0), (1, 5, 5), (0, 0, 0)):
        assert manager.allocate(2, prompt, num_left_over=left, max_cached_tokens=most).num_cached_tokens == expected
        manager.release(2)
        assert left > 1 or manager.foresee(prompt, max_cached_tokens=most) == expected
    memory.do_moves()
    assert SuccessorManager(8, B, enable_prefix_caching=False).foresee(prompt) == 0


def test_the_first_token_leaves_a_namespace_less_room():
    manager = SuccessorManager(8, B)
    with pytest.raises(ValueError, match="namespace must be at most"):
        manager.allocate(1, [1], b"x" * 4093)
    assert manager.stats().num_sequences == 0 and manager.num_free_blocks == 8
    manager.check()
