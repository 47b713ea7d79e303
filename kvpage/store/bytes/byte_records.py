"""ByteRecords: records of bytes beside the chunks of a store, in the same tiers. They live and close with the store."""

from collections.abc import Sequence

from kvpage.store.bytes.byte_jobs import Buffer, ByteJobs, ByteKeys
from kvpage.store.bytes.events import ByteEvents
from kvpage.store.bytes.header import Header, encode_header
from kvpage.store.stack.call_gate import CallGate, gated
from kvpage.store.stack.tier_feed import TierFeed
from kvpage.store.stack.tier_stack import TierStack


class ByteRecords:
    """Records of one header. Thread-safe. Keys and buffers are as of a ByteStore, and so are the promises.

    Args:
        tiers: where they are.
        gate: counts the calls of the store as under way.
        header: all facts besides the key that the bytes depend on; records of another header are others.

    Raises:
        ValueError, TypeError: the header is wrong.
    """

    def __init__(self, tiers: TierStack, gate: CallGate, header: Header) -> None:
        self.gate: CallGate = gate
        self._jobs = ByteJobs(tiers, ByteKeys(encode_header(header)), ByteEvents(TierFeed(tiers.tiers)))

    @gated
    def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        skip_existing: bool = True,
        deadline: float | None = None,
    ) -> list[bool]:
        """Store a record for each of the `keys` from its buffer; see `ByteStore.put` for `buffers`, `skip_existing` and
        `deadline`, and for the flags that are returned."""
        return self._jobs.put(keys, buffers, skip_existing, deadline)()

    @gated
    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer], deadline: float | None = None) -> list[bool]:
        """Read the record of each of the `keys` into its buffer; see `ByteStore.get_into` for `buffers`, `deadline` and
        the flags that are returned."""
        return self._jobs.get_into(keys, buffers, deadline)()

    @gated
    def remove(self, keys: Sequence[bytes], deadline: float | None = None) -> list[bool]:
        """Return for each of the `keys` whether a tier had its record by the `deadline`, and is rid of it."""
        return self._jobs.remove(keys, deadline)()
