"""HybridMemory: blocks and state slots of both tiers that hold, in place of numbers, the exact prefix they stand for.

Every prefix has one number: that of its last token's node in a tree of all tokens ever written. A cell of a block holds
the prefix that ends at its token, and a state slot the prefix that the state has seen. What nobody owns is poisoned.
"""

import numpy as np

from kvpage.blocks.manager import BlockManager
from kvpage.blocks.moves import BlockMove

POISON = -1


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


class HybridMemory:
    def __init__(self, manager: BlockManager) -> None:
        self.manager, size = manager, manager.block_size
        states, space = manager.states, manager.space
        self.num_blocks = {"device": space.pool.num_blocks, "host": space.host_pool.num_blocks}
        self.num_slots = {"device": states.device.num_slots, "host": states.host.num_slots}
        tiers = ("device", "host")
        self.blocks = {t: np.full((self.num_blocks[t] + self.num_slots[t], size), POISON, np.int64) for t in tiers}
        self.slots = {t: np.full(self.num_slots[t], POISON, np.int64) for t in tiers}
        self.ids = {t: np.arange(self.num_blocks[t], dtype=np.int32) for t in tiers}

    @property
    def has_moves(self) -> bool:
        return self.manager.space.has_moves or bool(self.manager.states.space.moves)

    def do_moves(self) -> None:
        self.manager.do_moves(lambda move: self._do(self.blocks, move))
        self.manager.states.do_moves(lambda move: self._do(self.slots, move))
        self.poison()

    def _do(self, memory: dict[str, np.ndarray], move: BlockMove) -> None:
        source = "host" if move.kind == "swap_in" else "device"
        target = "host" if move.kind == "swap_out" else "device"
        memory[target][move.pairs[:, 1]] = memory[source][move.pairs[:, 0]]

    def poison(self) -> None:
        """Overwrite what is free, and of tail blocks what is no checkpoint's."""
        states, space, size = self.manager.states, self.manager.space, self.manager.block_size
        pools = {"device": space.pool, "host": space.host_pool}
        for name, tier in (("device", states.device), ("host", states.host)):
            is_free = pools[name].generations(self.ids[name]) % 2 == 0
            blocks, first = self.blocks[name], self.num_blocks[name]
            blocks[:first][is_free] = POISON
            free = list(tier.free_slots)
            self.slots[name][free] = POISON
            for slot, checkpoint in enumerate(tier.checkpoints):
                num_tail_tokens = checkpoint.num_tokens % size if checkpoint else 0
                blocks[first + slot, num_tail_tokens:] = POISON

    def check_sequence(self, seq_id: object, slot: int, path: list[int]) -> None:
        """The state and every token's K and V are those of the path, which begins with the namespace."""
        num_tokens, size = len(path) - 1, self.manager.block_size
        ids = self.manager.block_ids(seq_id)[: -(-num_tokens // size)]
        cells = self.blocks["device"][ids].ravel()[:num_tokens]
        assert cells.tolist() == path[1:], f"K and V of {seq_id}"
        assert num_tokens == 0 or self.slots["device"][slot] == path[-1], f"the state of {seq_id}"

    def checkpoint_numbers(self) -> dict[int, int]:
        """Return by the prefix's number how many whole blocks each checkpoint stands on."""
        states = self.manager.states
        return {
            int(self.slots[name][slot]): checkpoint.anchor.num_blocks
            for name, tier in (("device", states.device), ("host", states.host))
            for slot, checkpoint in enumerate(tier.checkpoints)
            if checkpoint is not None
        }

    def check_checkpoints(self, prefixes: Prefixes) -> None:
        """Each stands for its prefix, has the K and V of its tail, and its blocks are cached."""
        states, size = self.manager.states, self.manager.block_size
        states.drop_stale()
        for name, tier in (("device", states.device), ("host", states.host)):
            for slot, checkpoint in enumerate(tier.checkpoints):
                if checkpoint is None:
                    continue
                namespace, tokens = prefixes.back(int(self.slots[name][slot]))
                path, num_tail = prefixes.path(namespace, tokens), len(tokens) % size
                assert len(tokens) == checkpoint.num_tokens and namespace == checkpoint.anchor.namespace
                tail = np.frombuffer(checkpoint.tail, np.int32).tolist()
                assert tail == tokens[len(tokens) - num_tail :] and checkpoint.anchor.num_blocks == len(tokens) // size
                cells = self.blocks[name][self.num_blocks[name] + slot, :num_tail].tolist()
                assert cells == path[len(path) - num_tail :]
                assert self._num_cached_blocks(tokens, namespace) >= len(tokens) // size

    def _num_cached_blocks(self, tokens: list[int], namespace: bytes) -> int:
        match = self.manager.tree.match(tokens, namespace, num_left_over=0)
        self.manager.tree.release(match)
        return match.num_blocks
