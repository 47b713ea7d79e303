"""EarlyLoad: a load whose blocks may be used once all is verified, while bytes are still on their way to a GPU.

    records in pinned memory   host     [ hash all chunks ]─► verified: tokens, and an event for each layer
                               lanes    [ layer 0 ][ layers 1, 2 ][ layers 3 to 6 ] ...
                               attention                 0    1    2    ...          each layer waits for its event
    all others                          read, verified and copied whole, before `verified` is called

A digest that is wrong ends the load before that chunk: nothing of it is ever announced.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from kvpage.cache.layered_moves import Arrival, layer_pieces
from kvpage.store.load.block_chunks import DeviceBlockChunk
from kvpage.store.load.block_load import BlockLoad
from kvpage.store.load.device.layer_copies import LayerCopies
from kvpage.store.records.record import CorruptRecord
from kvpage.store.records.record_io import check_kind, check_raw, read_head
from kvpage.store.stack.chunk_threads import num_leading
from kvpage.store.stack.placed import Placed
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.stretches import digests_of
from kvpage.store.tiers.tier import Key, Reader

OnVerified = Callable[[int, Arrival], object]
"""Called with the token after the last one that is verified, and with the arrival of its layers."""


class PinnedRecord(NamedTuple):
    """An open record with the right head, whose payload is in pinned memory as it is."""

    placed: Placed
    key: Key
    chunk: DeviceBlockChunk
    payload: memoryview
    digests: bytes

    def verify(self, num_threads: int) -> bool:
        """Return True. Raises CorruptRecord."""
        if digests_of(self.payload, self.chunk.stretch_bytes, num_threads) != self.digests:
            raise CorruptRecord("a digest is wrong")
        return True


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
        with ExitStack() as held:
            records = self._open(held) if self._load.blocks.is_on_device else []
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
        """Verify the records that are being copied, and load what comes after them; return the number of chunks."""
        num_threads = self._tiers.threads.each(len(records))

        def verify(index: int) -> bool:
            one = records[index]
            return self._tiers.verified(one.placed, one.key, partial(one.verify, num_threads)) or False

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

    def _open(self, held: ExitStack) -> list[PinnedRecord]:
        """Return the leading records in pinned memory; `held` closes them."""
        tiers, keys = self._tiers, self._load.keys
        located = tiers.locate(keys)
        count = num_leading(at is not None and tiers.tiers[at].tier.is_in_memory for at in located)
        readers = tiers.open(keys[:count], located[:count])
        for reader in readers:
            if reader is not None:
                held.enter_context(reader)
        records: list[PinnedRecord] = []
        for index, (at, reader) in enumerate(zip(located, readers, strict=False)):
            placed = tiers.tiers[at or 0]
            if reader is None or not (found := self._pinned(placed, index, reader)):
                break
            records.append(found)
        return records

    def _pinned(self, placed: Placed, index: int, reader: Reader) -> PinnedRecord | None:
        """Return the record; None if it is wrong, encoded, or in memory that a GPU's copies do not reach."""
        return self._tiers.verified(placed, self._load.keys[index], partial(self._checked, placed, index, reader))

    def _checked(self, placed: Placed, index: int, reader: Reader) -> PinnedRecord | None:
        chunk, kind = self._load.chunk(index)
        head, digests = read_head(reader, kind.meta)
        if check_kind(head, kind) is not None or not isinstance(chunk, DeviceBlockChunk):
            return None
        check_raw(head, chunk)
        payload = reader.piece(head.payload_begin, head.payload_end)
        if not self._load.blocks.layer_pipeline.is_pinned(payload):
            return None
        return PinnedRecord(placed, self._load.keys[index], chunk, payload, digests)
