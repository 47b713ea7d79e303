"""TensorLoad: loads a prompt's chunks into tensors.

tokens    [ chunk 0 | chunk 1 | chunk 2 | ch]
wanted          [ skipped .............. end]       may begin within a chunk
"""

from collections.abc import Sequence

from kvpage.store.load.tensor_results import NewResult, TensorOut
from kvpage.store.records.kinds import RecordKinds
from kvpage.store.records.kv_tensors import with_tokens
from kvpage.store.records.record import Shape
from kvpage.store.records.record_io import read_record, read_shape
from kvpage.store.records.tensor_chunk import TokenParts
from kvpage.store.stack.chunk_threads import num_leading
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.tiers.tier import Key, Reader


class TensorLoad:
    """One load. keys: of all chunks of the prompt. num_skipped: leading tokens that are not wanted."""

    def __init__(
        self,
        kinds: RecordKinds,
        fmt: str,
        keys: Sequence[Key],
        num_tokens: int,
        num_skipped: int,
        namespace: bytes,
    ) -> None:
        self._size = kinds.keys.chunk_size
        self._first = num_skipped // self._size
        self._keys = keys[self._first :] if num_skipped < num_tokens else ()
        self._kinds, self._fmt, self._namespace = kinds, fmt, namespace
        self._num_tokens, self._num_skipped = num_tokens, num_skipped

    def run(self, tiers: TierStack, result: NewResult | TensorOut) -> int:
        """Load K and V from the first wanted token on, as far as tiers have them; return the number of tokens.

        Raises the errors of `result`, before anything is written.
        """
        located = tiers.locate(self._keys)
        count = num_leading(tier is not None for tier in located)
        shape = self._shape(tiers) if count else None
        if shape is None:
            return 0
        num_most = self._end(count) - self._num_skipped
        parts = result.room(with_tokens(shape, self._fmt, num_most), self._kinds.dtype)
        num_chunks = tiers.read_located(self._keys, located, lambda *record: self._read(parts, *record))
        return self._end(num_chunks) - self._num_skipped if num_chunks else 0

    def _end(self, num_chunks: int) -> int:
        """Return the token after the first `num_chunks` chunks."""
        return min((self._first + num_chunks) * self._size, self._num_tokens)

    def _shape(self, tiers: TierStack) -> Shape | None:
        return tiers.first(self._keys[0], lambda reader: read_shape(reader, self._kinds, self._namespace))

    def _read(self, parts: TokenParts, index: int, reader: Reader, num_threads: int) -> None:
        begin = (self._first + index) * self._size
        first, end = max(begin, self._num_skipped), min(begin + self._size, self._num_tokens)
        chunk = parts.chunk(first - self._num_skipped, end - self._num_skipped, num_unwanted=first - begin)
        read_record(reader, self._kinds.of(self._keys[index], chunk.shape, self._namespace), chunk, num_threads)
