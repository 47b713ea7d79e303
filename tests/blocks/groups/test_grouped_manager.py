"""GroupedManager: a target and the model that drafts for it begin where both can, and nothing is done by halves."""

import random

import pytest
from support.draft_memory import DraftMemory
from support.slot_memory import SlotMemory

from kvpage import BlockManager, OutOfBlocks
from kvpage.blocks.groups.grouped_manager import GroupedManager
from kvpage.blocks.groups.successor_manager import SuccessorManager
from kvpage.blocks.hybrid.manager import HybridManager

B = 4


def managers(num_blocks: int = 64, num_drafts: int = 64, **options: object) -> GroupedManager:
    return GroupedManager(BlockManager(num_blocks, B, **options), SuccessorManager(num_drafts, B, **options))


class Life:
    """Sequences of both groups, whose cells remember the tokens that they depend on."""

    def __init__(self, manager: GroupedManager, seed: int = 0) -> None:
        self.rng, self.manager = random.Random(seed), manager
        self.cells, self.drafts = SlotMemory(B), DraftMemory(manager.drafts)
        self.tokens: dict[int, list[int]] = {}  # with the token that is sampled last
        self.names: dict[int, bytes] = {}
        self.next_id = self.num_shared = self.num_refused = 0

    def begin(self, prompt: list[int], namespace: bytes = b"") -> int:
        self.next_id += 1
        seq_id = self.next_id
        given = self.manager.allocate(seq_id, prompt, namespace)
        begin, drafted = given.num_cached_tokens, given.drafts.num_cached_tokens
        assert begin <= drafted < len(prompt), "the draft model needs the target's hidden states"
        self.cells.do(self.manager.target.take_moves())
        self.drafts.check(seq_id, prompt, namespace, drafted)
        self.check_target(seq_id, prompt, namespace, begin)
        self.tokens[seq_id], self.names[seq_id] = [*prompt, self.rng.randrange(2)], namespace
        self.compute(seq_id, begin, len(prompt), drafted, len(prompt))
        self.num_shared += begin
        return begin

    def compute(self, seq_id: int, begin: int, end: int, first_draft: int, last_draft: int) -> None:
        tokens, name = self.tokens[seq_id], self.names[seq_id]
        self.cells.do(self.manager.target.take_moves())
        self.drafts.do_moves()
        slots = self.manager.target.slot_mapping(seq_id, begin, end).tolist()
        for position, slot in zip(range(begin, end), slots, strict=True):
            self.cells.device[slot] = (name, tuple(tokens[: position + 1]))
        slots = self.manager.drafts.slot_mapping(seq_id, first_draft, last_draft).tolist()
        for position, slot in zip(range(first_draft, last_draft), slots, strict=True):
            self.drafts.cells["device"][slot] = (name, tuple(tokens[: position + 2]))
        self.manager.commit(seq_id, tokens[begin:end], tokens[first_draft + 1 : last_draft + 1])

    def check_target(self, seq_id: int, tokens: list[int], namespace: bytes, end: int) -> None:
        for position, slot in enumerate(self.manager.target.slot_mapping(seq_id, 0, end).tolist()):
            assert self.cells.device[slot] == (namespace, tuple(tokens[: position + 1])), (seq_id, position)

    def check(self) -> None:
        self.cells.do(self.manager.target.take_moves())
        self.manager.check()
        for seq_id, tokens in self.tokens.items():
            self.check_target(seq_id, tokens, self.names[seq_id], len(tokens) - 1)
            self.drafts.check(seq_id, tokens, self.names[seq_id], len(tokens) - 1)

    def step(self, seq_id: int) -> None:
        """Some drafted tokens have room, some of them are accepted, and one more is sampled."""
        tokens = self.tokens[seq_id]
        num_drafted = self.rng.randrange(B + 2)
        self.manager.append([seq_id], 1 + num_drafted)
        num_new, written = 1 + self.rng.randint(0, num_drafted), len(tokens) - 1
        tokens += [self.rng.randrange(2) for _ in range(num_new)]
        self.compute(seq_id, written, written + num_new, written, written + num_new)
        self.manager.give_back_room(seq_id)

    def live(self, count: int) -> None:
        for _ in range(count):
            seq_id = self.rng.choice(list(self.tokens)) if self.tokens else None
            before = self.manager.target.stats(), self.manager.drafts.stats()
            try:
                if seq_id is None or self.rng.random() < 0.3:
                    prompt = [int(self.rng.random() < 0.1) for _ in range(self.rng.randrange(1, 5 * B))]
                    self.begin(prompt, self.rng.choice([b"", b"tenant"]))
                elif self.rng.random() < 0.5:
                    self.step(seq_id)
                else:
                    self.manager.release(seq_id)
                    del self.tokens[seq_id]
            except OutOfBlocks as error:
                self.num_refused += 1
                assert error.needed > error.free
                assert (self.manager.target.stats(), self.manager.drafts.stats()) == before
            self.check()


@pytest.mark.parametrize(("num_blocks", "num_drafts"), [(64, 64), (24, 16), (14, 24)])
@pytest.mark.parametrize("seed", range(2))
def test_random_lives(seed, num_blocks, num_drafts):
    life = Life(managers(num_blocks, num_drafts), seed)
    life.live(150)
    assert life.num_shared > 0 and (num_blocks == 64 or life.num_refused > 0)
    for seq_id in life.tokens:
        life.manager.release(seq_id)
    life.manager.reset_prefix_cache()
    assert [m.num_free_blocks for m in (life.manager.target, life.manager.drafts)] == [num_blocks, num_drafts]


@pytest.mark.parametrize("num_shared", range(2 * B + 3))
def test_the_target_begins_where_the_draft_model_can(num_shared):
    """The last shared token's position has another successor: the target computes it again, for its hidden state."""
    life = Life(managers())
    first = list(range(10, 10 + 2 * B + 2))
    life.begin(first)
    second = [*first[:num_shared], 90, 91]
    expected = min(max(num_shared - 1, 0), 2 * B)
    assert life.manager.explain(second).num_cached_tokens == expected
    assert life.begin(second) == expected
    life.check()
    assert life.begin(first) >= 2 * B


def test_whole_blocks_alone_agree_without_parts():
    life = Life(managers(share_parts=False))
    first = list(range(10, 10 + 2 * B + 1))
    life.begin(first)
    assert life.begin(first) == 2 * B
    assert life.manager.explain([*first[: 2 * B], 90]).num_cached_tokens == B
    assert life.begin([*first[: 2 * B], 90]) == B


def test_a_hybrid_target_begins_at_a_checkpoint():
    manager = GroupedManager(HybridManager(64, B, num_slots=8), SuccessorManager(64, B))
    target, prompt = manager.target, list(range(10, 10 + 3 * B))
    for seq_id, (tokens, expected) in enumerate(
        [(prompt, 0), (prompt, len(prompt) - 1), ([*prompt, 90, 91], len(prompt) - 1), ([*prompt[:-1], 92], 0)]
    ):
        assert manager.explain(tokens).num_cached_tokens == expected
        given = manager.allocate(seq_id, tokens)
        assert given.num_cached_tokens == expected <= given.drafts.num_cached_tokens
        target.marks_of(seq_id, expected, len(tokens))
        manager.target.take_moves(), target.do_state_moves(lambda move: None), manager.drafts.take_moves()
        manager.commit(seq_id, tokens[expected:], [*tokens[given.drafts.num_cached_tokens + 1 :], 7])
        target.keep(seq_id)
        manager.release(seq_id)
        manager.check()


def test_the_explanation_has_all_groups():
    life = Life(managers())
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
    for arguments in ((manager.drafts, manager.drafts), (manager.target, manager.target), (None, manager.drafts)):
        with pytest.raises(TypeError, match="target must be|drafts must be"):
            GroupedManager(*arguments)
    with pytest.raises(RuntimeError, match="reset_prefix_cache needs all sequences to be released, 1 are not"):
        manager.reset_prefix_cache()
