"""BlockLoad: loads a prompt's chunks into an engine's blocks: at once, early, or layer by layer.

    tokens    [ chunk 0 | chunk 1 | chunk 2 | ch]
    wanted          [ start ........... end ]           as far as the blocks reach; start may be within a chunk

An early load lets the blocks be used once all is verified, while bytes are still on their way to a GPU:

    records in pinned memory   host     [ hash all chunks ]─► verified: tokens, and an event for each layer
                               lanes    [ layer 0 ][ layers 1, 2 ][ layers 3 to 6 ] ...
                               attention                 0    1    2    ...          each layer waits for its event
    all others                          read, verified and copied whole, before `verified` is called

A digest that is wrong ends the load before that chunk: nothing of it is ever announced.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from kvpage.cache.layered_moves import Arrival, layer_pieces
from kvpage.store.load.block_chunks import BlockChunk, BlockChunks, DeviceBlockChunk
from kvpage.store.load.device.layer_copies import LayerCopies
from kvpage.store.records.codec import Codec
from kvpage.store.records.kinds import RecordKind, RecordKinds
from kvpage.store.records.record import CorruptRecord
from kvpage.store.records.record_io import (
    check_kind,
    check_raw,
    decode,
    read_head,
    read_into_runs,
    read_piece,
    read_record,
)
from kvpage.store.stack.placed import Placed
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.stretches import Runs, digests_of
from kvpage.store.tiers.tier import Key, Reader

OnVerified = Callable[[int, Arrival], object]
"""Called with the token after the last one that is verified, and with the arrival of its layers."""


class OpenChunk:
    """A record whose head is right, with its tier and key, to be loaded bit by bit.

    chunk: where it goes to. end: the token after its last wanted one. Raises CorruptRecord or TierError.
    """

    def __init__(self, placed: Placed, reader: Reader, chunk: BlockChunk, kind: RecordKind, end: int) -> None:
        self.placed, self.reader, self.key, self.chunk, self.end = placed, reader, kind.key, chunk, end
        self._head, self._digests = read_head(reader, kind.meta)
        self._codec: Codec | None = check_kind(self._head, kind)
        self._decoded: memoryview | None = None
        self._runs: Runs | None = None  # of all layers, for a reader that reads straight into them
        if self._codec is None:
            check_raw(self._head, chunk)
            self._runs = chunk.runs() if reader.takes_runs else None

    def payload(self) -> memoryview | None:
        """Return the payload of a record in memory; None for an encoded one."""
        return None if self._codec else self.reader.piece(self._head.payload_begin, self._head.payload_end)

    def verify(self, payload: memoryview, num_threads: int) -> bool:
        """Return True. Raises CorruptRecord for a wrong payload."""
        if digests_of(payload, self.chunk.stretch_bytes, num_threads) != self._digests:
            raise CorruptRecord("a digest is wrong")
        return True

    def take(self, layer: int) -> bool:
        """Load a layer and return True. After CorruptRecord or TierError no layer of this chunk counts."""
        begin, end = self.chunk.layer_span(layer)
        if self._codec is not None:
            return self._take_decoded(begin, end, self._codec)
        if self._runs is not None:
            num_runs = len(self._runs) // self.chunk.num_layers
            runs = self._runs[layer * num_runs : (layer + 1) * num_runs]
            read_into_runs(self.reader, self._head, self._digests, begin, end, runs)
        else:
            read_piece(self.reader, self._head, self._digests, begin, end, self.chunk)
        self.reader.release_piece()
        return True

    def _take_decoded(self, begin: int, end: int, codec: Codec) -> bool:
        if self._decoded is None:  # a codec's output is one piece
            self._decoded = decode(self.reader, self._head, self._digests, codec)
            self.reader.release_piece()
        piece = self._decoded[begin:end]
        if self.chunk.take(begin, piece, 1) != digests_of(piece, self.chunk.stretch_bytes):
            raise CorruptRecord("a digest is wrong")  # the memory changed meanwhile
        return True


class _PinnedRecord(NamedTuple):
    """An open record whose payload is in pinned memory as it is. chunk: where its layers go to."""

    opened: OpenChunk
    chunk: DeviceBlockChunk
    payload: memoryview


class BlockLoad:
    """One load, of the records that `tiers` have. keys: of all chunks of the prompt.

    Raises ValueError for a start outside the tokens, and for blocks that do not exist or are named twice.
    """

    def __init__(
        self,
        tiers: TierStack,
        blocks: BlockChunks,
        kinds: RecordKinds,
        keys: Sequence[Key],
        num_tokens: int,
        start: int,
        namespace: bytes,
    ) -> None:
        self.start, self.end = start, min(num_tokens, blocks.num_tokens)
        if not 0 <= start <= self.end:
            raise ValueError(f"start must be in [0, {self.end}], got {start}")
        blocks.check_writable(start, self.end)
        self._size = kinds.keys.chunk_size
        self._first = start // self._size
        self.tiers, self.blocks, self.keys = tiers, blocks, keys[self._first : -(-self.end // self._size)]
        self._kinds, self._num_tokens, self._namespace = kinds, num_tokens, namespace

    def run(self, verified: OnVerified | None = None) -> int:
        """Load; return the number of chunks. All bytes are in the blocks on return.

        verified: called at most once, before the load has ended; not called where all bytes are there at once.
        """
        if verified is None or not self.blocks.is_on_device:
            return self._read_from(0)
        with ExitStack() as readers:
            opened = self.open(in_memory=True)
            for chunk in opened:
                readers.enter_context(chunk.reader)
            records = list(self._pinned(opened))
            return self._run_early(records, verified) if records else self._read_from(0)

    def end_of(self, num_chunks: int) -> int:
        """Return the token after the last wanted one of the leading chunks."""
        last = min((self._first + num_chunks) * self._size, self.end)
        return max(last, self.start) if num_chunks else self.start

    def open(self, in_memory: bool = False) -> list[OpenChunk]:
        """Return the leading chunks whose records' heads are right. The caller closes their readers.

        in_memory: only records in memory tiers.
        """
        opened, readers = list[OpenChunk](), self.tiers.open_leading(self.keys, in_memory)
        for index, (placed, reader) in enumerate(readers):
            make = partial(OpenChunk, placed, reader, *self._chunk(index), self.end_of(index + 1))
            chunk = self.tiers.verified(placed, self.keys[index], make)
            reader.release_piece()
            if chunk is None:
                break
            opened.append(chunk)
        for _, reader in readers[len(opened) :]:
            reader.close()
        return opened

    def take_layer(self, layer: int, chunks: Sequence[OpenChunk]) -> int:
        """Load a layer of open chunks; return the number of leading ones that are right."""

        def take(index: int) -> bool:
            chunk = chunks[index]
            return self.tiers.verified(chunk.placed, chunk.key, chunk.take, layer) or False

        return self.tiers.threads.num_leading(take, len(chunks))

    # --- inside ---

    def _chunk(self, index: int) -> tuple[BlockChunk, RecordKind]:
        """Return a chunk with wanted tokens, and the kind of its record."""
        begin = (self._first + index) * self._size
        last = min(begin + self._size, self._num_tokens)
        chunk = self.blocks.chunk(begin, last, max(begin, self.start), min(last, self.end))
        return chunk, self._kinds.of(self.keys[index], chunk.shape, self._namespace)

    def _read_from(self, first: int) -> int:
        """Load the chunks from `first` on whole; return their number."""

        def read(index: int, reader: Reader, num_threads: int) -> bool:
            chunk, kind = self._chunk(first + index)
            return read_record(reader, kind, chunk, num_threads)

        return self.tiers.read(self.keys[first:], read)

    def _run_early(self, records: Sequence[_PinnedRecord], verified: OnVerified) -> int:
        num_layers = self.blocks.num_layers
        pieces = layer_pieces(num_layers, sum(record.chunk.num_bytes for record in records) // num_layers)
        runs = [
            [run for record in records for run in record.chunk.runs_of_layers(record.payload, first, last)]
            for first, last in pieces
        ]
        with self.blocks.layer_pipeline.layers(pieces, runs) as copies:
            num_chunks = self._num_right(records, copies)
            if num_chunks:
                verified(self.end_of(num_chunks), Arrival(copies, self.blocks.engine.layer_ids, pieces))
        return num_chunks

    def _num_right(self, records: Sequence[_PinnedRecord], copies: LayerCopies) -> int:
        """Verify the records that are being copied, and load the chunks after them; return the number of chunks."""
        num_threads = self.tiers.threads.each(len(records))

        def verify(index: int) -> bool:
            opened, _, payload = records[index]
            return self.tiers.verified(opened.placed, opened.key, opened.verify, payload, num_threads) or False

        num_right = self.tiers.threads.num_leading(verify, len(records))
        if num_right < len(records):
            copies.wait()  # a slower tier may have the record: its bytes go to the same blocks
        return num_right + self._read_from(num_right)

    def _pinned(self, opened: Sequence[OpenChunk]) -> Iterator[_PinnedRecord]:
        """Yield the leading records, up to the first that is encoded, or in memory that a GPU's copies do not reach."""
        for record in opened:
            payload = self.tiers.verified(record.placed, record.key, record.payload)
            if payload is None or not self.blocks.layer_pipeline.is_pinned(payload):
                return
            if isinstance(record.chunk, DeviceBlockChunk):
                yield _PinnedRecord(record, record.chunk, payload)
