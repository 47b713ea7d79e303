"""ByteRecords: records of bytes by key in the tiers of a store: beside its chunks, or all that a ByteStore has."""

from collections.abc import Sequence

from kvpage.store.bytes.byte_jobs import Buffer, ByteJobs, ByteKeys
from kvpage.store.bytes.events import ByteEvents
from kvpage.store.bytes.header import Header, encode_header
from kvpage.store.stack.call_gate import CallGate, gated
from kvpage.store.stack.tier_feed import TierFeed
from kvpage.store.stack.tier_stack import TierStack


class ByteRecords:
    """Records of one header. They live and close with the store. Thread-safe.

    A key has 1 to 65535 bytes. A buffer is the memory of one record. It is bytes, a bytearray, a memoryview, a numpy
    array or a tensor in host memory, or a list of such pieces. Pieces are contiguous. They are read and written where
    they are. The pieces that read a record may differ from the pieces that wrote it, as long as both have as many bytes
    together. Wrong arguments raise ValueError or TypeError, and nothing is written.

    Args:
        jobs: makes the calls.
        gate: counts the calls of the store as under way.
    """

    def __init__(self, jobs: ByteJobs, gate: CallGate) -> None:
        self._jobs, self.gate = jobs, gate

    @gated
    def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        skip_existing: bool = True,
        deadline: float | None = None,
    ) -> list[bool]:
        """Store a record for each key.

        Args:
            keys: each once.
            buffers: the memory of each record. None for one that is not to be stored.
            skip_existing: leave records alone that every tier has, whatever their bytes. Otherwise they are replaced in
                all tiers, but for one that is out of reach or open for reading only.
            deadline: seconds of the call; None for no limit. A record is not begun afterwards; one that is under way is
                finished, within the deadlines of its tiers.

        Returns:
            A flag for each key: whether some tier has its record now. A record that is removed or replaced by another
            call meanwhile, or cleared, is left to that call.
        """
        return self._jobs.put(keys, buffers, skip_existing, deadline)()

    @gated
    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer], deadline: float | None = None) -> list[bool]:
        """Read the record of each of the `keys` into its buffer, whatever becomes of the others; `deadline` as in
        `put`.

        Args:
            buffers: writable memory for each record, as long as it is. None for one that is not wanted. No two share
                a byte.

        Returns:
            A flag for each key: True if the buffer has exactly the bytes that were put. False for a miss: the buffer's
            bytes mean nothing then. A record of another length is a miss, and is dropped: otherwise it would stand in
            the way of the right one.
        """
        return self._jobs.get_into(keys, buffers, deadline)()

    @gated
    def remove(self, keys: Sequence[bytes], deadline: float | None = None) -> list[bool]:
        """Return for each of the `keys` whether a tier had its record by the `deadline`, in seconds or None, and is rid
        of it.

        A tier that is out of reach keeps its records.
        """
        return self._jobs.remove(keys, deadline)()


def records_beside(tiers: TierStack, gate: CallGate, header: Header) -> ByteRecords:
    """Return records beside the chunks of a store, in the same tiers. Raise ValueError or TypeError for the header."""
    return ByteRecords(ByteJobs(tiers, ByteKeys(encode_header(header)), ByteEvents(TierFeed(tiers.tiers))), gate)
