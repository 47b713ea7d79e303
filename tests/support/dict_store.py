"""A store of blocks in a dictionary, for engines; it counts its calls, and can be slow or fail."""

import threading

import torch

from kvpage.store import BlockStore

B = 4
CHUNK = 2 * B


class StandIn(BlockStore):
    """A store whose three calls are another's, and which has the given ones in place of them, or besides."""

    lookup = load_blocks = store_blocks = None  # each one has its own

    def __init__(self, store: BlockStore, **calls) -> None:
        vars(self).update({name: getattr(store, name) for name in ("lookup", "load_blocks", "store_blocks")} | calls)


class DictStore(BlockStore):
    """Blocks of whole chunks by all tokens up to their end. `trouble` is done first by each call."""

    def __init__(self) -> None:
        self.chunks: dict[tuple, list[torch.Tensor]] = {}
        self.calls: list[str] = []
        self.trouble = lambda name: None
        self.lock = threading.Lock()

    def call(self, name: str) -> None:
        with self.lock:
            self.calls.append(name)
        self.trouble(name)

    def ends(self, tokens, namespace: bytes) -> list[tuple[int, tuple]]:
        ends = range(CHUNK, len(tokens) + 1, CHUNK)
        return [(end, (namespace, *tokens[:end].tolist())) for end in ends]

    def lookup(self, tokens, *, namespace: bytes = b"") -> int:
        self.call("lookup")
        held = 0
        for end, key in self.ends(tokens, namespace):
            if key not in self.chunks:
                break
            held = end
        return held

    def load_blocks(self, tokens, engine, block_table, *, start: int, namespace: bytes) -> int:
        self.call("load")
        done = start
        for end, key in self.ends(tokens, namespace):
            if end <= start:
                continue
            if key not in self.chunks:
                break
            first, last = max(start, end - CHUNK) // B, min(end // B, len(block_table))
            for layer, rows in zip(engine.gpu_cache, self.chunks[key], strict=True):
                for block in range(first, last):
                    layer[:, block_table[block]] = rows[:, block - (end - CHUNK) // B]
            done = last * B
        return done

    def store_blocks(self, tokens, engine, block_table, *, namespace: bytes) -> int:
        self.call("store")
        for end, key in self.ends(tokens, namespace):
            ids = torch.from_numpy(block_table[(end - CHUNK) // B : end // B]).long()
            self.chunks[key] = [layer[:, ids].clone() for layer in engine.gpu_cache]
        return len(tokens) // CHUNK * CHUNK
