"""GroupMemory: blocks and slots of all groups and tiers. In place of numbers they hold the prefixes they stand for.

Every prefix has one number: that of its last token's node in a tree of all tokens ever written. A cell of a block holds
the prefix that ends at its token, and a state slot the prefix that the state has seen. What nobody owns is poisoned.
"""

from collections import Counter

import numpy as np

from kvpage import BlockPool
from kvpage.blocks.groups.states.checkpoint import Checkpoint
from kvpage.blocks.groups.window_blocks import WindowBlocks
from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import BlockMove
from kvpage.blocks.space import BlockSpace

POISON = -1


def free_blocks(pool: BlockPool) -> np.ndarray:
    """Whether nobody owns a block, by id: bool [num_blocks]."""
    return np.array([pool.ref_count(block_id) == 0 for block_id in range(pool.num_blocks)], bool)


class Prefixes:
    """Numbers of prefixes. A prefix is a namespace, or another one with a token more."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, object], int] = {}
        self.parents: list[int] = []
        self.tokens: list[object] = []

    def number(self, parent: object, token: object) -> int:
        found = self._numbers.get((parent, token))
        if found is None:
            found = self._numbers[parent, token] = len(self.tokens)
            self.parents.append(parent if isinstance(parent, int) else POISON)
            self.tokens.append(token)
        return found

    def path(self, namespace: bytes, tokens: list[int]) -> list[int]:
        """Return the numbers of the namespace and of each prefix."""
        path = [self.number("namespace", namespace)]
        for token in tokens:
            path.append(self.number(path[-1], token))
        return path

    def back(self, number: int) -> tuple[bytes, list[int]]:
        """Return the namespace and the tokens of a prefix."""
        tokens = []
        while self.parents[number] != POISON:
            tokens.append(self.tokens[number])
            number = self.parents[number]
        return self.tokens[number], tokens[::-1]


class GroupMemory:
    """The cells of one manager's groups: of the layers that attend to all tokens, of each window, and of states."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager, self.size = manager, manager.block_size
        self.owners = [manager.space, *(window.blocks for window in manager.windows)]
        space = manager.states.space if manager.states else None
        self.slot_tiers = {"device": space.device, "host": space.host} if space else {}
        self.blocks = {tier: [self._cells(tier, owner) for owner in self.owners] for tier in ("device", "host")}
        self.slots = {name: np.full(tier.num_slots, POISON, np.int64) for name, tier in self.slot_tiers.items()}
        self.num_moved = Counter[str]()

    def _cells(self, tier: str, owner: BlockSpace | WindowBlocks) -> np.ndarray:
        num_tails = self.slot_tiers[tier].num_slots if self.slot_tiers else 0
        return np.full((pool_of(owner, tier).num_blocks + num_tails, self.size), POISON, np.int64)

    @property
    def has_moves(self) -> bool:
        states, windows = self.manager.states, self.manager.windows
        moves = [window.blocks.moves for window in windows] + ([states.space.moves] if states else [])
        return self.manager.space.has_moves or any(map(bool, moves))

    def do_moves(self) -> None:
        for group, owner in enumerate(self.owners):
            cells = {tier: self.blocks[tier][group] for tier in self.blocks}
            owner.do_moves(lambda move, cells=cells: self._do(cells, move))
        if self.manager.states:
            self.manager.states.do_moves(lambda move: self._do(self.slots, move))
        self.poison()

    def _do(self, memory: dict[str, np.ndarray], move: BlockMove) -> None:
        source = "host" if move.kind == "swap_in" else "device"
        target = "host" if move.kind == "swap_out" else "device"
        memory[target][move.pairs[:, 1]] = memory[source][move.pairs[:, 0]]
        self.num_moved[move.kind] += len(move.pairs)

    def poison(self) -> None:
        """Overwrite what is free, and of tail blocks what is no checkpoint's."""
        for tier, each in self.blocks.items():
            for owner, cells in zip(self.owners, each, strict=True):
                pool = pool_of(owner, tier)
                is_free = free_blocks(pool)
                cells[: pool.num_blocks][is_free] = POISON
                for slot, checkpoint in enumerate(self._checkpoints(tier)):
                    num_tail_tokens = checkpoint.num_tokens % self.size if checkpoint else 0
                    cells[pool.num_blocks + slot, num_tail_tokens:] = POISON
            if self.slot_tiers:
                self.slots[tier][list(self.slot_tiers[tier].free_slots)] = POISON

    def write(self, seq_id: object, begin: int, end: int, path: list[int]) -> None:
        """Write the K and V of a portion in all groups that have blocks."""
        slots = [self.manager.slot_mapping(seq_id, begin, end)]
        slots += [window.slots(seq_id, begin, end) for window in self.manager.windows]
        for cells, places in zip(self.blocks["device"], slots, strict=True):
            assert len(set(places.tolist())) == end - begin
            cells.reshape(-1)[places] = path[begin + 1 : end + 1]

    def check_sequence(self, seq_id: object, path: list[int], num_left: int = 0) -> None:
        """All that the next token reads is the path's: K and V, those of windows, and the state."""
        end, manager = len(path) - 1, self.manager
        ids = manager.block_ids(seq_id)[: -(-end // self.size)]
        cells = self.blocks["device"][0][ids].ravel()[num_left:end]
        assert cells.tolist() == path[num_left + 1 :], f"K and V of {seq_id}"
        for window, cells in zip(manager.windows, self.blocks["device"][1:], strict=True):
            first = max(end - window.blocks.window.num_tokens + 1, 0)
            slots, table = window.slots(seq_id, first, end).tolist(), window.tables([seq_id])[0]
            assert table.shape == manager.block_tables([seq_id])[0].shape
            assert [table[i // self.size] * self.size + i % self.size for i in range(first, end)] == slots
            assert cells.reshape(-1)[slots].tolist() == path[first + 1 :], f"a window of {seq_id}"
        if manager.states and end:
            assert self.slots["device"][manager.states.slot_of(seq_id)] == path[-1], f"the state of {seq_id}"

    def checkpoint_numbers(self) -> dict[int, int]:
        """Return by the prefix's number how many whole blocks each checkpoint stands on."""
        return {
            int(self.slots[tier][slot]): checkpoint.anchor.num_blocks
            for tier in self.slot_tiers
            for slot, checkpoint in enumerate(self._checkpoints(tier))
            if checkpoint is not None
        }

    def check_checkpoints(self, prefixes: Prefixes) -> None:
        """Each stands for its prefix, has the K and V of its tail in each group, and its blocks are cached."""
        if self.manager.states:
            self.manager.states.space.drop_stale()
        for tier in self.slot_tiers:
            for slot, checkpoint in enumerate(self._checkpoints(tier)):
                if checkpoint is None:
                    continue
                namespace, tokens = prefixes.back(int(self.slots[tier][slot]))
                path, num_tail = prefixes.path(namespace, tokens), len(tokens) % self.size
                assert len(tokens) == checkpoint.num_tokens and namespace == checkpoint.anchor.namespace
                tail = np.frombuffer(checkpoint.tail, np.int32).tolist()
                num_blocks = len(tokens) // self.size
                assert tail == tokens[len(tokens) - num_tail :] and checkpoint.anchor.num_blocks == num_blocks
                for owner, cells in zip(self.owners, self.blocks[tier], strict=True):
                    in_tail = cells[pool_of(owner, tier).num_blocks + slot, :num_tail].tolist()
                    assert in_tail == path[len(path) - num_tail :]
                assert self._num_cached_blocks(tokens, namespace) >= num_blocks

    def _checkpoints(self, tier: str) -> list[Checkpoint | None]:
        return self.slot_tiers[tier].checkpoints if self.slot_tiers else []

    def _num_cached_blocks(self, tokens: list[int], namespace: bytes) -> int:
        match = self.manager.tree.match(tokens, namespace, num_left_over=0)
        self.manager.tree.release(match)
        return match.num_blocks


def pool_of(owner: BlockSpace | WindowBlocks, tier: str) -> BlockPool:
    return owner.pool if tier == "device" else owner.host_pool
