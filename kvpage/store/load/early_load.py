"""EarlyLoad: a load whose blocks may be used once all is verified, while bytes are still on their way to a GPU.

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
from kvpage.store.load.block_chunks import DeviceBlockChunk
from kvpage.store.load.block_load import BlockLoad
from kvpage.store.load.device.layer_copies import LayerCopies
from kvpage.store.load.layer_load import OpenChunk
from kvpage.store.stack.tier_stack import TierStack

OnVerified = Callable[[int, Arrival], object]
"""Called with the token after the last one that is verified, and with the arrival of its layers."""


class PinnedRecord(NamedTuple):
    """An open record whose payload is in pinned memory as it is. chunk: where its layers go to."""

    opened: OpenChunk
    chunk: DeviceBlockChunk
    payload: memoryview


class EarlyLoad:
    """One load, of the records that `tiers` have.

    Args:
        load: the wanted chunks.
        tiers: asked for them.
        verified: called at most once, before the load has ended. Not called where all bytes are there at once.
    """

    def __init__(self, load: BlockLoad, tiers: TierStack, verified: OnVerified) -> None:
        self._load, self._tiers, self._verified = load, tiers, verified

    def run(self) -> int:
        """Load; return the number of chunks. All bytes are in the blocks on return."""
        if not self._load.blocks.is_on_device:
            return self._read_from(0)
        with ExitStack() as readers:
            opened = self._load.open(self._tiers, in_memory=True)
            for chunk in opened:
                readers.enter_context(chunk.reader)
            records = list(self._pinned(opened))
            return self._run(records) if records else self._read_from(0)

    def _run(self, records: Sequence[PinnedRecord]) -> int:
        engine, num_layers = self._load.blocks.engine, self._load.blocks.num_layers
        pieces = layer_pieces(num_layers, sum(record.chunk.num_bytes for record in records) // num_layers)
        runs = [
            [run for record in records for run in record.chunk.runs_of_layers(record.payload, first, last)]
            for first, last in pieces
        ]
        with self._load.blocks.layer_pipeline.layers(pieces, runs) as copies:
            num_chunks = self._num_right(records, copies)
            if num_chunks:
                self._verified(self._load.end_of(num_chunks), Arrival(copies, engine.layer_ids, pieces))
        return num_chunks

    def _num_right(self, records: Sequence[PinnedRecord], copies: LayerCopies) -> int:
        """Verify the records that are being copied, and load the chunks after them; return the number of chunks."""
        num_threads = self._tiers.threads.each(len(records))

        def verify(index: int) -> bool:
            opened, _, payload = records[index]
            check = partial(opened.verify, payload, num_threads)
            return self._tiers.verified(opened.placed, opened.key, check) or False

        num_right = self._tiers.threads.num_leading(verify, len(records))
        if num_right < len(records):
            copies.wait()  # a slower tier may have the record: its bytes go to the same blocks
        return num_right + self._read_from(num_right)

    def _read_from(self, first: int) -> int:
        """Load the chunks from `first` on whole; return their number."""
        return self._tiers.read(
            self._load.keys[first:],
            lambda index, reader, num_threads: self._load.read(first + index, reader, num_threads),
        )

    def _pinned(self, opened: Sequence[OpenChunk]) -> Iterator[PinnedRecord]:
        """Yield the leading records, up to the first that is encoded, or in memory that a GPU's copies do not reach."""
        for record in opened:
            payload = self._tiers.verified(record.placed, record.key, record.payload)
            if payload is None or not self._load.blocks.layer_pipeline.is_pinned(payload):
                return
            if isinstance(record.chunk, DeviceBlockChunk):
                yield PinnedRecord(record, record.chunk, payload)
