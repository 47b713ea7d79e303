"""StateRecords: the states of recurrent layers in a KVStore, each after an exact prefix, beside the chunks of K and V.

    put(tokens, state)   ─► key of the tokens ─► record ─► every tier ─► its position joins the index
    longest(tokens)      ─► indexes of the prompt's whole chunks ─► the longest state whose chunks are there, too
    get_into(tokens, ..) ─► key of the tokens ─► record ─► verified, copied into the memory

Every read gives nothing, or exactly the bytes that were put after these tokens. The K and V of the tokens are chunks as
`KVStore.store_blocks` stores them; tokens after the last whole chunk make a shorter chunk.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpage.blocks.explain import Ending, Explanation, GroupReach
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import as_integer, check_flag
from kvpage.store.bytes.byte_jobs import limit_of
from kvpage.store.bytes.pieces import RunPayload, pieces_of
from kvpage.store.load.layer_chunks import LayerChunks
from kvpage.store.records.keys import checked_tokens
from kvpage.store.records.kinds import RecordKind
from kvpage.store.records.record_io import Source, read_record
from kvpage.store.stack.call_gate import CallGate, gated
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.states.state_index import StateIndex, StateKeys
from kvpage.store.tiers.tier import Key, Reader

Array = npt.NDArray[np.int32]
Memory = Any
"""bytes, bytearray, memoryview, numpy array, or a tensor in host memory; contiguous, of the bytes of one slot."""


class StateRecords:
    """The records of one layout of states. Thread-safe; made by `KVStore.states`, and open as long as the store.

    Calls take `tokens`, int [num_tokens], at least one; tokens of different namespaces never meet. Wrong arguments
    raise ValueError or TypeError, and nothing is written.

    Args:
        tiers: Of the store.
        gate: Of the store.
        lock: One for all indexes of the store.
        keys: Names of the records.
        chunks: The chunks of the same tokens; None for a model without K and V.

    Attributes:
        layout: The place of each part in a state.
    """

    def __init__(
        self, tiers: TierStack, gate: CallGate, lock: threading.Lock, keys: StateKeys, chunks: LayerChunks | None
    ) -> None:
        self.gate, self.layout = gate, keys.layout
        self._tiers, self._keys, self._chunks = tiers, keys, chunks
        self._index = StateIndex(tiers, keys, lock)

    @gated
    def put(
        self,
        tokens: Tokens,
        state: Memory,
        namespace: bytes = b"",
        skip_existing: bool = True,
        deadline: float | None = None,
    ) -> bool:
        """Store the state after exactly these tokens.

        Args:
            tokens: all that the state has seen.
            state: the bytes of a slot.
            namespace: of the tokens.
            skip_existing: leave a record alone that every tier has. Otherwise it is replaced in all tiers.
            deadline: seconds of the call; a tier is not begun afterwards. None for no limit.

        Returns:
            Whether some tier has the record now.
        """
        array = self._checked(tokens, namespace)
        check_flag("skip_existing", skip_existing)
        limit, payload = limit_of(deadline), self._payload(state, writable=False)
        prefix, key, start = self._key_of(array, namespace)

        def record(_: int) -> tuple[RecordKind, Source]:
            return self._keys.state_kind(key, len(array), namespace), payload

        is_there = self._tiers.put([key], record, skip_existing, limit).is_there[0]
        if is_there:
            self._index.add(prefix, start, namespace, array[start:], limit)
        return is_there

    @gated
    def get_into(self, tokens: Tokens, state: Memory, namespace: bytes = b"", deadline: float | None = None) -> bool:
        """Read the state after exactly these `tokens` of a `namespace` into `state`, with a `deadline` as in `put`.

        Returns:
            True if the memory has exactly the bytes that were put. False for a miss: its bytes mean nothing then.
        """
        array = self._checked(tokens, namespace)
        limit, payload = limit_of(deadline), self._payload(state, writable=True)
        _, key, _ = self._key_of(array, namespace)
        kind = self._keys.state_kind(key, len(array), namespace)

        def read(_: int, reader: Reader, num_threads: int) -> bool:
            return read_record(reader, kind, payload, num_threads)

        return self._tiers.read_each([key], read, limit)[0]

    @gated
    def prefetch(self, tokens: Tokens, namespace: bytes = b"") -> bool:
        """Copy the state after exactly these `tokens` of a `namespace` into the faster tiers; see KVStore.prefetch.

        Returns:
            Whether the fastest tier that can have it has it.
        """
        return self._tiers.promote([self._key_of(self._checked(tokens, namespace), namespace)[1]])[0]

    @gated
    def longest(self, tokens: Tokens, namespace: bytes = b"", most: int | None = None) -> int:
        """Return the longest position of a prompt, `tokens` of a `namespace`, that can be loaded; 0 for none.

        Its state is there, and so are all chunks before it, or were a moment ago.

        Args:
            most: the longest position to return; None for all of the tokens.

        Raises:
            ValueError: `most` is no position of the tokens.
        """
        array = self._checked(tokens, namespace)
        limit = len(array) if most is None else as_integer("most", most)
        if not 0 <= limit <= len(array):
            raise ValueError(f"most must be in [0, {len(array)}], got {limit}")
        return self._longest(array, namespace, limit)

    @gated
    def positions(self, tokens: Tokens, namespace: bytes = b"") -> list[int]:
        """Return the positions of all states of a prompt, `tokens` of a `namespace`, the longest first."""
        return self._positions(self._checked(tokens, namespace), namespace)

    @gated
    def remove(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Remove the states at all positions of a prompt, `tokens` of a `namespace`, from every tier. Chunks stay.

        Returns:
            The number of states removed from the tier that had most of them.
        """
        array = self._checked(tokens, namespace)
        positions = self._positions(array, namespace)
        return self._tiers.remove([self._key_of(array[:end], namespace)[1] for end in positions])

    @gated
    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        """Return how far chunks and states reach into a prompt, `tokens` of a `namespace`, and why not further."""
        array = self._checked(tokens, namespace)
        num_tokens, usable = len(array), self._longest(array, namespace, len(array) - 1)
        above = min((end for end in self._positions(array, namespace) if end > usable), default=None)
        ending = _ending(usable, num_tokens - 1, above)
        state = GroupReach("state", usable, ending, below=usable or None, above=above)
        if self._chunks is None:
            return Explanation(num_tokens, usable, (state,))
        chunks = self._chunks.reach(array, namespace)
        if usable > chunks.num_tokens:  # by the shorter chunk before the state
            chunks = replace(chunks, num_tokens=usable, ending=Ending.PROMPT if usable == num_tokens else chunks.ending)
        return Explanation(num_tokens, usable, (chunks, state))

    # --- the search ---------------------------------------------------------------------------------------------------

    def _key_of(self, tokens: Array, namespace: bytes) -> tuple[bytes, Key, int]:
        """Return the prefix before the last tokens, the key of the state after all of them, and the prefix's tokens."""
        prefix = self._keys.prefixes(tokens, namespace)[-1]
        start = len(tokens) // self._keys.chunk_size * self._keys.chunk_size
        return prefix, self._keys.state(prefix, tokens[start:]), start

    def _positions(self, tokens: Array, namespace: bytes) -> list[int]:
        """Return the positions of all states of a prompt, the longest first."""
        listed = list(self._listed(tokens, namespace, len(tokens)))
        there = self._tiers.locate([key for _, key in listed])
        return [position for (position, _), tier in zip(listed, there, strict=True) if tier is not None]

    def _longest(self, tokens: Array, namespace: bytes, most: int) -> int:
        """Return the longest position up to `most` with a state and all chunks before it; 0 for none."""
        num_in_chunks = most if self._chunks is None else self._chunks.count(tokens[:most], namespace)
        reach = min(num_in_chunks + self._keys.chunk_size - 1, most)
        listed = self._listed(tokens[:reach], namespace, most)
        return next((position for position, key in listed if self._is_there(tokens[:position], key, namespace)), 0)

    def _is_there(self, tokens: Array, key: Key, namespace: bytes) -> bool:
        """Return whether the state is there, and the chunk after the last whole one, if there is any."""
        keys = [key]
        if self._chunks is not None and len(tokens) % self._keys.chunk_size:
            keys.append(self._chunks.keys(tokens, namespace)[-1])
        return None not in self._tiers.locate(keys)

    def _listed(self, tokens: Array, namespace: bytes, most: int) -> Iterator[tuple[int, Key]]:
        """Yield the positions of a prompt that an index has, and the keys of their states, the longest first.

        An entry counts where the prompt has its tokens.
        """
        prefixes = self._keys.prefixes(tokens, namespace)
        for at in np.flatnonzero(self._index.there(prefixes))[::-1].tolist():
            start = at * self._keys.chunk_size
            entries = self._index.read(prefixes[at], start, namespace)
            for rest in sorted(set(entries.values()), reverse=True):
                position = start + rest
                if 0 < position <= min(most, len(tokens)):
                    key = self._keys.state(prefixes[at], tokens[start:position])
                    if entries.get(key) == rest:
                        yield position, key

    # --- inside -------------------------------------------------------------------------------------------------------

    def _payload(self, state: Memory, writable: bool) -> RunPayload:
        payload = RunPayload.of(pieces_of(state, writable))
        if payload.num_bytes != self.layout.slot_bytes:
            raise ValueError(f"state must have the {self.layout.slot_bytes} bytes of a slot, got {payload.num_bytes}")
        return payload

    def _checked(self, tokens: Tokens, namespace: bytes) -> Array:
        array = checked_tokens(tokens, namespace)
        if not len(array):
            raise ValueError("tokens must be at least one, got none")
        return array


def _ending(usable: int, most: int, above: int | None) -> Ending:
    """Return why no longer position is usable. above: the next one with a state."""
    if usable >= most:
        return Ending.PROMPT
    return Ending.NO_CHECKPOINT if above is None or above > most else Ending.NO_KV
