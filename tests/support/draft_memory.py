"""DraftMemory: cells of a draft model's blocks that hold the tokens they depend on: those up to the successor's."""

from support.group_memory import free_blocks

from kvpage import BlockManager
from kvpage.blocks.drafted_manager import positions
from kvpage.blocks.sequence_state import Allocation

POISON = "poison"


class DraftMemory:
    def __init__(self, manager: BlockManager) -> None:
        self.manager, self.size = manager, manager.block_size
        tiers = {"device": manager.pool.num_blocks, "host": manager.space.host_pool.num_blocks}
        self.cells: dict[str, list[object]] = {t: [POISON] * (count * self.size) for t, count in tiers.items()}

    def allocate(self, seq_id: object, tokens: list[int], namespace: bytes = b"", **options: object) -> Allocation:
        """Give room for as many positions as the target has tokens."""
        return self.manager.allocate(seq_id, *positions(tokens, namespace), **options)

    def do_moves(self) -> None:
        tiers = {"copy": ("device", "device"), "swap_out": ("device", "host"), "swap_in": ("host", "device")}
        for kind, pairs in self.manager.take_moves():
            source, target = (self.cells[tier] for tier in tiers[kind])
            for a, b in pairs.tolist():
                target[b * self.size : (b + 1) * self.size] = source[a * self.size : (a + 1) * self.size]
        self.poison()

    def poison(self) -> None:
        """Overwrite what is free."""
        for name, pool in (("device", self.manager.pool), ("host", self.manager.space.host_pool)):
            for block_id in free_blocks(pool).nonzero()[0].tolist():
                self.cells[name][block_id * self.size : (block_id + 1) * self.size] = [POISON] * self.size

    def write(self, seq_id: object, tokens: list[int], namespace: bytes, start: int, end: int) -> None:
        """Write and commit positions; the tokens go on at least to the last one's successor."""
        self.do_moves()
        slots = self.manager.slot_mapping(seq_id, start, end).tolist()
        for position, slot in zip(range(start, end), slots, strict=True):
            self.cells["device"][slot] = (namespace, tuple(tokens[: position + 2]))
        self.manager.commit(seq_id, tokens[start + 1 : end + 1])

    def check(self, seq_id: object, tokens: list[int], namespace: bytes, end: int) -> None:
        """The positions before `end` are those of these tokens."""
        self.do_moves()
        slots = self.manager.slot_mapping(seq_id, 0, end).tolist()
        for position, slot in enumerate(slots):
            assert self.cells["device"][slot] == (namespace, tuple(tokens[: position + 2])), (seq_id, position)
