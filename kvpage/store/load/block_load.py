"""BlockLoad: loads a prompt's chunks into an engine's blocks, at once or layer by layer.

tokens    [ chunk 0 | chunk 1 | chunk 2 | ch]
wanted          [ start ........... end ]           as far as the blocks reach; start may be within a chunk
"""

import functools

from kvpage.store.load.block_chunks import BlockChunk, BlockChunks
from kvpage.store.load.layer_load import LayerLoad, OpenChunk
from kvpage.store.records.kinds import RecordKind, RecordKinds
from kvpage.store.records.record_io import read_record
from kvpage.store.stack.call_gate import CallGate
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.tier import Key, Reader


class BlockLoad:
    """One load. keys: of the chunks with wanted tokens.

    Raises ValueError for a start outside the tokens, and for blocks that do not exist or are named twice.
    """

    def __init__(
        self, blocks: BlockChunks, kinds: RecordKinds, keys: list[Key], num_tokens: int, start: int, namespace: bytes
    ) -> None:
        """Prepare a load; keys: of all chunks of the prompt."""
        self.start, self.end = start, min(num_tokens, blocks.num_tokens)
        if not 0 <= start <= self.end:
            raise ValueError(f"start must be in [0, {self.end}], got {start}")
        blocks.check_writable(start, self.end)
        self._size = kinds.keys.chunk_size
        self._first = start // self._size
        self.keys = keys[self._first : -(-self.end // self._size)]
        self.blocks = blocks
        self._kinds, self._num_tokens, self._namespace = kinds, num_tokens, namespace

    def read(self, index: int, reader: Reader, num_threads: int) -> bool:
        """Load a chunk from its record, and return True. Raises CorruptRecord, see read_record."""
        chunk, kind = self.chunk(index)
        return read_record(reader, kind, chunk, num_threads)

    def chunk(self, index: int) -> tuple[BlockChunk, RecordKind]:
        """Return a chunk with wanted tokens, and the kind of its record."""
        begin = (self._first + index) * self._size
        last = min(begin + self._size, self._num_tokens)
        chunk = self.blocks.chunk(begin, last, max(begin, self.start), min(last, self.end))
        return chunk, self._kinds.of(self.keys[index], chunk.shape, self._namespace)

    def end_of(self, num_chunks: int) -> int:
        """Return the token after the last wanted one of the leading chunks."""
        last = min((self._first + num_chunks) * self._size, self.end)
        return max(last, self.start) if num_chunks else self.start

    def open(self, tiers: TierStack, in_memory: bool = False) -> list[OpenChunk]:
        """Return the leading chunks whose records' heads are right. The caller closes their readers.

        in_memory: only records in memory tiers.
        """
        opened, readers = list[OpenChunk](), tiers.open_leading(self.keys, in_memory)
        for index, (placed, reader) in enumerate(readers):
            make = functools.partial(OpenChunk, placed, reader, *self.chunk(index), self.end_of(index + 1))
            chunk = tiers.verified(placed, self.keys[index], make)
            reader.release_piece()
            if chunk is None:
                break
            opened.append(chunk)
        for _, reader in readers[len(opened) :]:
            reader.close()
        return opened

    def by_layers(self, tiers: TierStack, gate: CallGate) -> LayerLoad:
        """Begin a load of the leading chunks whose records' heads are right.

        It is a call under way, for the gate, until it ends.
        """
        opened = self.open(tiers)
        tiers.count_reads([chunk.placed for chunk in opened])

        def take_chunk(layer: int, index: int) -> bool:
            chunk = opened[index]
            return tiers.verified(chunk.placed, chunk.key, functools.partial(chunk.take, layer)) or False

        def take(layer: int, num_chunks: int) -> int:
            return tiers.threads.num_leading(functools.partial(take_chunk, layer), num_chunks)

        num_layers = self.blocks.num_layers
        return LayerLoad(opened, self.start, num_layers, take, lambda n: tiers.count(hit_tokens=n), gate)
