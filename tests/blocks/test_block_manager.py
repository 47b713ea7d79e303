"""BlockManager against a model in which every slot remembers the very prefix that was written into it."""

import random

import numpy as np
import pytest
import torch
from support.slot_memory import SlotMemory
from support.whim import Whim

from kvpage import OutOfBlocks
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.space import HostPolicy

B = 4


class Model:
    """What a cache would hold: for each slot the namespace and all tokens up to and including its own."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.memory = SlotMemory(B)
        self.tokens: dict[int, list[int]] = {}
        self.namespaces: dict[int, bytes] = {}
        self.written: dict[int, int] = {}
        self.left: dict[int, int] = {}  # tokens behind the window, whose blocks are given back
        self.private: dict[int, tuple[int, int]] = {}  # from which token on, and a number for it
        self.num_swapped = 0

    def expected(self, seq_id: int, position: int) -> tuple:
        """What somebody else may read, or, from where a sequence is private on, what nobody but its forks may."""
        secret = self.private.get(seq_id)
        mark = secret[1] if secret and position >= secret[0] else None
        return self.namespaces[seq_id], tuple(self.tokens[seq_id][: position + 1]), mark

    def write(self, seq_id: int, end: int) -> None:
        start = self.written[seq_id]
        self.do_moves()
        for position, slot in zip(range(start, end), self.manager.slot_mapping(seq_id, start, end), strict=True):
            self.memory.device[int(slot)] = self.expected(seq_id, position)
        self.manager.commit(seq_id, self.tokens[seq_id][start:end])
        self.written[seq_id] = end

    def do_moves(self) -> None:
        self.num_swapped += self.memory.do(self.manager.take_moves())

    def verify(self) -> None:
        self.do_moves()
        self.manager.check()
        for seq_id, end in self.written.items():
            start = min(self.left.get(seq_id, 0), end)
            for position, slot in enumerate(self.manager.slot_mapping(seq_id, start, end).tolist(), start):
                assert self.memory.device[slot] == self.expected(seq_id, position), (seq_id, position)


class RandomLife:
    """Random operations on a small alphabet, so that prefixes meet, part, and meet again."""

    def __init__(self, seed: int, num_blocks: int, enable_prefix_caching: bool = True, **options) -> None:
        self.rng = random.Random(seed)
        self.manager = BlockManager(num_blocks, B, enable_prefix_caching, **options)
        self.swapped: dict[int, int] = {}  # tokens written of each
        self.handles: list[int] = []
        self.num_parts = self.num_restored = self.num_part_forks = self.num_left_blocks = self.num_decoded = 0
        self.model = Model(self.manager)
        self.next_id = 0
        self.num_refused = 0

    def state(self) -> tuple[int, int]:
        return self.manager.num_free_blocks, self.manager.stats().num_sequences

    def some_tokens(self, num_tokens: int) -> list[int]:
        return [int(self.rng.random() < 0.1) for _ in range(num_tokens)]

    def step(self) -> None:
        before, num_pinned = self.state(), len(self.manager.space.pins)
        try:
            operations = [self.allocate, self.write, self.append, self.fork, self.release, self.swap_out, self.swap_in]
            hints = [self.pin, self.unpin, self.prefetch, self.drop]
            operations += [self.leave, self.make_private, self.give_back_room, self.decode]
            self.rng.choices([*operations, *hints], [6, 8, 5, 2, 6, 2, 3, 1, 0.5, 0.5, 3, 1, 1, 1, 1])[0]()
        except OutOfBlocks as error:
            self.num_refused += 1
            assert before == self.state() or num_pinned > len(self.manager.space.pins)
            assert error.needed > error.free
        self.model.verify()

    def allocate(self) -> None:
        model, tokens = self.model, self.some_tokens(self.rng.randrange(1, 5 * B))
        self.next_id += 1
        namespace = self.rng.choice([b"", b"tenant"])
        most = self.rng.choice([None, None, None, self.rng.randrange(5 * B)])
        allocation = self.manager.allocate(self.next_id, tokens, namespace, self.rng.choice([0, 0, 3]), most)
        assert most is None or allocation.num_cached_tokens <= most
        assert allocation.num_cached_tokens < len(tokens)
        self.num_parts += allocation.num_cached_tokens % B > 0
        assert len(allocation.block_ids) == -(-len(tokens) // B)
        model.tokens[self.next_id], model.namespaces[self.next_id] = tokens, namespace
        model.written[self.next_id] = allocation.num_cached_tokens

    def any(self) -> int | None:
        return self.rng.choice(list(self.model.written)) if self.model.written else None

    def write(self) -> None:
        if (seq_id := self.any()) is not None:
            self.model.write(seq_id, self.rng.randint(self.model.written[seq_id], len(self.model.tokens[seq_id])))

    def append(self) -> None:
        ids = [i for i, written in self.model.written.items() if written == len(self.model.tokens[i])]
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randrange(4)))
        counts = [self.rng.randrange(B + 2) for _ in chosen]
        self.manager.append(chosen, counts)
        for seq_id, count in zip(chosen, counts, strict=True):
            self.model.tokens[seq_id] = self.model.tokens[seq_id] + self.some_tokens(count)

    def decode(self) -> None:
        """One token more for some sequences, by rows."""
        model, steps = self.model, self.manager.rows
        ids = [i for i, written in model.written.items() if written == len(model.tokens[i])]
        chosen = self.rng.sample(ids, min(len(ids), self.rng.randrange(6)))
        rows = steps.of(chosen)
        steps.append(rows)
        for seq_id in chosen:
            model.tokens[seq_id] = model.tokens[seq_id] + self.some_tokens(1)
        model.do_moves()
        slots, tables, lengths = steps.inputs(rows)
        for seq_id, slot, table, length in zip(chosen, slots.tolist(), tables, lengths.tolist(), strict=True):
            block_ids = self.manager.block_ids(seq_id)
            assert length == len(model.tokens[seq_id]) and slot == self.manager.slot_mapping(seq_id, length - 1, length)
            assert table.tolist() == [*block_ids.tolist(), *[0] * (len(table) - len(block_ids))]
            model.memory.device[slot] = model.expected(seq_id, length - 1)
        steps.commit(rows, [model.tokens[seq_id][-1] for seq_id in chosen])
        for seq_id in chosen:
            model.written[seq_id] = len(model.tokens[seq_id])
        self.num_decoded += len(chosen)

    def fork(self) -> None:
        seq_id = self.any()
        if seq_id is None or self.model.written[seq_id] != len(self.model.tokens[seq_id]):
            return
        model, num_tokens = self.model, len(self.model.tokens[seq_id])
        fewest = num_tokens // B * B if self.manager.enable_prefix_caching else model.left.get(seq_id, 0)
        wanted = self.rng.randint(max(fewest, 1), num_tokens)
        self.num_part_forks += wanted < num_tokens
        self.next_id += 1
        self.manager.fork(seq_id, self.next_id, self.rng.choice([wanted, None]) if wanted == num_tokens else wanted)
        model.tokens[self.next_id], model.written[self.next_id] = model.tokens[seq_id][:wanted], wanted
        model.namespaces[self.next_id], model.left[self.next_id] = model.namespaces[seq_id], model.left.get(seq_id, 0)
        if seq_id in model.private:
            model.private[self.next_id] = model.private[seq_id]

    def give_back_room(self) -> None:
        seq_id = self.any()
        if seq_id is not None and self.model.written[seq_id]:
            self.manager.give_back_room(seq_id)
            self.model.tokens[seq_id] = self.model.tokens[seq_id][: self.model.written[seq_id]]
            assert len(self.manager.block_ids(seq_id)) == -(-self.model.written[seq_id] // B)

    def make_private(self) -> None:
        if (seq_id := self.any()) is not None:
            self.manager.make_private(seq_id)
            self.model.private.setdefault(seq_id, (self.model.written[seq_id], seq_id))

    def leave(self) -> None:
        if (seq_id := self.any()) is not None:
            num_tokens = self.rng.randint(0, self.model.written[seq_id])
            num_blocks = self.manager.release_before(seq_id, num_tokens)
            assert num_blocks == 0 or not self.manager.enable_prefix_caching or seq_id in self.model.private
            self.num_left_blocks += num_blocks
            if num_blocks:
                self.model.left[seq_id] = num_tokens // B * B

    def release(self) -> None:
        if self.swapped and self.rng.random() < 0.2:
            seq_id, written = self.swapped.popitem()
            self.model.written[seq_id] = written
        else:
            seq_id = self.any()
        if seq_id is not None:
            self.manager.release(seq_id)
            for table in (self.model.tokens, self.model.namespaces, self.model.written):
                del table[seq_id]
            self.model.left.pop(seq_id, None)
            self.model.private.pop(seq_id, None)

    def swap_out(self) -> None:
        if (seq_id := self.any()) is not None:
            self.manager.swap_out(seq_id)
            self.swapped[seq_id] = self.model.written.pop(seq_id)

    def swap_in(self) -> None:
        if self.swapped:
            seq_id = self.rng.choice(list(self.swapped))
            allocation = self.manager.swap_in(seq_id, self.model.tokens[seq_id])
            written = self.swapped.pop(seq_id)
            self.num_restored += allocation.num_cached_tokens >= written > 0
            self.model.written[seq_id] = allocation.num_cached_tokens

    def pin(self) -> None:
        try:
            self.handles.append(self.manager.space.pin(self.some_tokens(self.rng.randrange(5 * B))))
        except ValueError as error:
            assert "pins must hold at most" in str(error)

    def unpin(self) -> None:
        if self.handles:
            self.manager.space.unpin(self.handles.pop(self.rng.randrange(len(self.handles))))

    def prefetch(self) -> None:
        self.manager.space.prefetch(self.some_tokens(self.rng.randrange(5 * B)))

    def drop(self) -> None:
        self.manager.space.drop(self.some_tokens(self.rng.randrange(5 * B)))


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_host_blocks, after_hits", [(0, None), (12, None), (60, None), (40, 0), (40, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_random_lives_read_what_they_wrote(seed, enable_prefix_caching, num_host_blocks, after_hits):
    options = {"num_host_blocks": num_host_blocks, "host_policy": HostPolicy(after_hits), "pin_quota": 8}
    options["rule"] = Whim(seed, B) if seed else None
    life = RandomLife(seed, num_blocks=24, enable_prefix_caching=enable_prefix_caching, **options)
    for _ in range(3000):
        life.step()
    stats = life.manager.stats()
    assert life.num_refused > 10, "blocks were never scarce"
    assert (stats.hit_tokens > 1000 and stats.evicted_blocks > 100) == enable_prefix_caching, stats
    assert (life.num_parts > 10) == enable_prefix_caching
    assert life.num_decoded > 20
    assert life.num_part_forks > 0 and (life.num_left_blocks > 5 or enable_prefix_caching)
    assert num_host_blocks == 0 or (life.model.num_swapped > 40 and life.num_restored > 5)
    if num_host_blocks and enable_prefix_caching:
        assert stats.space.host_hit_tokens > 20 and stats.space.promoted_blocks > 5
        assert (stats.space.written_blocks > 0) == (after_hits is not None)
    for seq_id in list(life.model.tokens):
        life.manager.release(seq_id)
    for handle in life.handles:
        life.manager.space.unpin(handle)
    life.manager.check()
    assert life.manager.num_free_blocks == life.manager.num_blocks


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 3 * B, 3 * B + 1])
def test_a_second_prompt_computes_at_least_one_token(num_tokens):
    manager, tokens = BlockManager(16, B), list(range(num_tokens))
    assert manager.allocate("first", tokens).num_cached_tokens == 0
    manager.commit("first", tokens)
    cached = manager.allocate("second", tokens).num_cached_tokens
    assert cached == (num_tokens - 1 if num_tokens % B == 0 else num_tokens // B * B)  # a part of the last block, too
    assert manager.block_ids("second")[: cached // B].tolist() == manager.block_ids("first")[: cached // B].tolist()
    assert [kind for kind, _ in manager.take_moves()] == ["copy"] * (num_tokens % B == 0)
    manager.check()


def test_nothing_uncommitted_is_found():
    manager, tokens = BlockManager(16, B), list(range(3 * B))
    manager.allocate("writer", tokens)
    assert manager.allocate("a", tokens).num_cached_tokens == 0
    manager.commit("writer", tokens[: 2 * B - 1])
    assert manager.allocate("b", tokens).num_cached_tokens == B
    manager.commit("writer", tokens[2 * B - 1 :])
    assert manager.allocate("c", tokens + [1]).num_cached_tokens == 3 * B


def test_generated_tokens_are_found():
    manager = BlockManager(16, B)
    manager.allocate(0, [1, 2, 3])
    manager.commit(0, [1, 2, 3])
    for token in (4, 5, 6, 7, 8):
        manager.append([0])
        assert len(manager.take_moves()) == 0
        manager.commit(0, [token])
    manager.release(0)
    assert manager.allocate(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]).num_cached_tokens == 8


def test_namespaces_do_not_meet():
    manager, tokens = BlockManager(16, B), list(range(2 * B))
    manager.allocate(0, tokens, b"one")
    manager.commit(0, tokens)
    assert manager.allocate(1, tokens, b"two").num_cached_tokens == 0
    assert manager.allocate(2, tokens + [0], b"one").num_cached_tokens == 2 * B


def test_equal_prompts_in_flight_end_on_one_set_of_blocks():
    manager, tokens = BlockManager(16, B), list(range(2 * B))
    for seq_id in (0, 1):
        manager.allocate(seq_id, tokens)
    assert not set(manager.block_ids(0)) & set(manager.block_ids(1))
    for seq_id in (0, 1):
        manager.commit(seq_id, tokens)
    assert manager.block_ids(0).tolist() == manager.block_ids(1).tolist()
    assert manager.stats().num_used_blocks == 2
    manager.check()


def test_fork_copies_the_shared_block_once_per_writer_but_one():
    manager, tokens = BlockManager(16, B), list(range(B + 1))
    manager.allocate(0, tokens)
    manager.commit(0, tokens)
    manager.fork(0, 1)
    manager.fork(0, 2)
    assert manager.stats().num_used_blocks == 2
    shared = int(manager.block_ids(0)[1])
    manager.append([0, 1, 2])
    ((kind, copies),) = manager.take_moves()
    assert kind == "copy" and copies.dtype == np.int64 and copies[:, 0].tolist() == [shared, shared]
    own = [int(manager.block_ids(seq_id)[1]) for seq_id in (0, 1, 2)]
    assert own == [*copies[:, 1].tolist(), shared] and len(set(own)) == 3
    manager.append([0, 1, 2])
    assert len(manager.take_moves()) == 0
    manager.check()


def test_fork_at_a_full_block_copies_nothing():
    manager, tokens = BlockManager(16, B), list(range(2 * B))
    manager.allocate(0, tokens)
    manager.commit(0, tokens)
    manager.fork(0, 1)
    manager.append([0, 1])
    assert len(manager.take_moves()) == 0
    assert manager.block_ids(0)[:2].tolist() == manager.block_ids(1)[:2].tolist()
    assert manager.block_ids(0)[2] != manager.block_ids(1)[2]


@pytest.mark.parametrize("count", [np.int64(2), np.int32(2), [np.int64(2)], np.array([2]), (2,)])
def test_append_takes_any_integers(count):
    manager = BlockManager(16, B)
    manager.allocate(0, [1] * B)
    manager.append([0], count)
    assert len(manager.block_ids(0)) == 2
    assert len(manager.slot_mapping(0, np.int32(B), np.int64(B + 2))) == 2
    with pytest.raises(ValueError, match="positions"):
        manager.slot_mapping(0, 0, B + 3)


def test_out_of_blocks_changes_nothing():
    manager = BlockManager(4, B)
    manager.allocate(0, list(range(3 * B)))
    manager.commit(0, list(range(3 * B)))
    before = manager.stats(), manager.block_ids(0).tolist()
    with pytest.raises(OutOfBlocks) as error:
        manager.allocate(1, list(range(B)) + [77] * (2 * B))
    assert (error.value.needed, error.value.free) == (2, 1)
    with pytest.raises(OutOfBlocks):
        manager.append([0], [B + 1])
    assert (manager.stats(), manager.block_ids(0).tolist()) == before
    manager.check()


def test_append_of_several_is_all_or_nothing():
    manager = BlockManager(3, B)
    for seq_id in (0, 1):
        manager.allocate(seq_id, [seq_id] * B)
        manager.commit(seq_id, [seq_id] * B)
    with pytest.raises(OutOfBlocks):
        manager.append([0, 1])
    assert [len(manager.block_ids(seq_id)) for seq_id in (0, 1)] == [1, 1]
    manager.append([0])
    manager.check()


def test_block_tables_and_slots_of_several():
    manager = BlockManager(64, B)
    for seq_id, num_tokens in enumerate((1, 3 * B + 1, B)):
        manager.allocate(seq_id, [seq_id] * num_tokens)
    tables = manager.block_tables([1, 0])
    assert tables.dtype == np.int32 and tables.shape == (2, 4)
    assert tables[0].tolist() == manager.block_ids(1).tolist() and tables[1, 0] == manager.block_ids(0)[0]
    slots = manager.slot_mappings([2, 0, 1], [1, 0, B - 1], [3, 0, B + 1])
    first, (a, b, *_) = int(manager.block_ids(2)[0]), manager.block_ids(1).tolist()
    assert slots.dtype == np.int64 and slots.tolist() == [first * B + 1, first * B + 2, a * B + B - 1, b * B]
    assert manager.block_tables([]).shape == (0, 0) and len(manager.slot_mappings([], [], [])) == 0


def test_many_and_long_sequences():
    manager = BlockManager(4000, B)
    ids = {}
    for seq_id in range(50):
        ids[seq_id] = manager.allocate(seq_id, [seq_id] * (seq_id * 5 + 1)).block_ids.tolist()
    manager.release(7)
    manager.append([3], [1000])
    for seq_id in set(ids) - {7, 3}:
        assert manager.block_ids(seq_id).tolist() == ids[seq_id]
    assert len(manager.block_ids(3)) == -(-1016 // B)
    manager.check()


BAD_CALLS = {
    "seq_id in use": (lambda m: m.allocate(0, [1]), ValueError, "in use"),
    "no tokens": (lambda m: m.allocate(9, []), ValueError, "at least one token"),
    "negative max_cached_tokens": (lambda m: m.allocate(9, [1], max_cached_tokens=-1), ValueError, "must not be neg"),
    "unknown make_private": (lambda m: m.make_private(9), KeyError, "9"),
    "float tokens": (lambda m: m.allocate(9, [1.5]), ValueError, "must be integers"),
    "two-dimensional tokens": (lambda m: m.allocate(9, [[1]]), ValueError, "one-dimensional"),
    "token of 33 bits": (lambda m: m.allocate(9, [1 << 32]), ValueError, "32 bits"),
    "namespace of text": (lambda m: m.allocate(9, [1], "tenant"), TypeError, "namespace must be bytes, got str"),
    "no namespace": (lambda m: m.allocate(9, [1], None), TypeError, "namespace must be bytes, got NoneType"),
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
    "commit too much": (lambda m: m.commit(0, [1] * 99), ValueError, "room"),
    "unknown commit": (lambda m: m.commit(9, [1]), KeyError, "9"),
    "fork of uncommitted": (lambda m: m.fork(0, 9), ValueError, "committed"),
    "fork of part of what is cached": (lambda m: m.fork(1, 9, B - 1), ValueError, r"num_tokens must be in \[4, 4\]"),
    "fork of too many": (lambda m: m.fork(1, 9, B + 1), ValueError, r"num_tokens must be in \[4, 4\]"),
    "fork onto one in use": (lambda m: m.fork(0, 0), ValueError, "in use"),
    "unknown fork": (lambda m: m.fork(9, 10), KeyError, "9"),
    "unknown release": (lambda m: m.release(9), KeyError, "9"),
    "slots past the end": (lambda m: m.slot_mapping(0, 0, B + 2), ValueError, "positions"),
    "slots backwards": (lambda m: m.slot_mapping(0, 2, 1), ValueError, "positions"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_raise_and_change_nothing(case):
    call, error, text = BAD_CALLS[case]
    manager = BlockManager(16, B)
    manager.allocate(0, list(range(B + 1)))
    manager.commit(0, list(range(B)))
    manager.allocate(1, list(range(1, B + 1)))
    manager.commit(1, list(range(1, B + 1)))
    before = manager.stats(), manager.block_ids(0).tolist(), manager.slot_mapping(0, 0, B + 1).tolist()
    with pytest.raises(error, match=text):
        call(manager)
    assert (manager.stats(), manager.block_ids(0).tolist(), manager.slot_mapping(0, 0, B + 1).tolist()) == before
    manager.check()


@pytest.mark.parametrize("ttl", ["1", [1.0], torch.tensor([1.0, 2.0])])
def test_a_pin_with_a_ttl_that_is_no_number_leaves_no_match(ttl):
    manager = BlockManager(8, 4, pin_quota=4)
    with pytest.raises(TypeError, match="ttl must be a number"):
        manager.space.pin([1, 2, 3, 4], ttl=ttl)
    assert manager.tree.num_matches == 0 and len(manager.space.pins) == 0
