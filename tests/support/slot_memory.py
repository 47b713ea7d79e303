"""Two tiers of blocks whose slots remember the tokens written into them, and in which moves are carried out."""

from kvpage.blocks.moves import BlockMoves


class SlotMemory:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.device: dict[int, object] = {}  # by slot
        self.host: dict[int, object] = {}

    def do(self, moves: BlockMoves) -> int:
        """Carries the moves out in their order; how many blocks went between the tiers."""
        memories = {"swap_out": (self.device, self.host), "swap_in": (self.host, self.device)}
        num_swapped = 0
        for kind, pairs in moves:
            sources, destinations = memories.get(kind, (self.device, self.device))
            assert len(set(pairs[:, 1].tolist())) == len(pairs), "a destination is named twice"
            if kind == "copy":
                assert set(pairs[:, 0].tolist()).isdisjoint(pairs[:, 1].tolist()), "what is written is read, too"
            num_swapped += len(pairs) * (kind != "copy")
            for src, dst in pairs.tolist():
                for offset in range(self.block_size):
                    destinations[dst * self.block_size + offset] = sources.get(src * self.block_size + offset)
        return num_swapped
