"""StateRecords: the states of recurrent layers in a KVStore, each after an exact prefix, beside the chunks of K and V.

    put(tokens, state)   ─► key of the tokens ─► record ─► every tier ─► its position joins the index
    longest(tokens)      ─► indexes of the prompt's whole chunks ─► the longest state whose chunks are there, too
    get_into(tokens, ..) ─► key of the tokens ─► record ─► verified, copied into the memory

Every read gives nothing, or exactly the bytes that were put after these tokens. The K and V of the tokens are chunks as
`KVStore.store_blocks` stores them; those after the last whole chunk are a shorter one.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.explain import Explanation
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import as_integer, check_flag, check_namespace
from kvpage.layout.groups import StateLayout
from kvpage.store.bytes.byte_jobs import limit_of
from kvpage.store.bytes.pieces import pieces_of
from kvpage.store.bytes.run_payload import RunPayload
from kvpage.store.load.known_dtype import KnownDtype
from kvpage.store.records.kinds import RecordKind, RecordKinds
from kvpage.store.records.payload import Source
from kvpage.store.records.record_io import read_record
from kvpage.store.stack.call_gate import gated
from kvpage.store.states.explaining import explain_states
from kvpage.store.states.state_index import StateIndex
from kvpage.store.states.state_keys import StateKeys
from kvpage.store.states.state_parts import StateParts
from kvpage.store.states.state_search import StateSearch
from kvpage.store.tiers.tier import Reader

Memory = Any
"""bytes, bytearray, memoryview, numpy array, or a tensor in host memory; contiguous, of the bytes of one slot."""


class StateRecords:
    """The records of one layout of states. Thread-safe; made by `KVStore.states`, and open as long as the store.

    Args:
        parts: Of the store.
        keys: Names of the records.
        kinds: Names of the chunks of the same tokens; None for a model without K and V.
        layout: The place of each part in a state.
    """

    def __init__(self, parts: StateParts, keys: StateKeys, kinds: RecordKinds | None, layout: StateLayout) -> None:
        self.gate, self.layout = parts.gate, layout
        self._tiers, self._keys = parts.tiers, keys
        self._index = StateIndex(parts.tiers, keys, parts.lock)
        self._search = StateSearch(parts.tiers, keys, self._index, kinds)

    @classmethod
    def of(
        cls, parts: StateParts, dtype: KnownDtype, layout: StateLayout, kv_dtype: torch.dtype | None
    ) -> "StateRecords":
        """Return the records of a layout; see KVStore.states.

        Args:
            parts: Of the store.
            dtype: Of the store, settled by `kv_dtype`.
            layout: The place of each part in a state.
            kv_dtype: Of the K and V; None for a model without any.

        Raises:
            TypeError: An argument is of another type.
            ValueError: The store is of another dtype, or its metadata are too long.
        """
        if not isinstance(layout, StateLayout):
            raise TypeError(f"layout must be a StateLayout, got {type(layout).__name__}")
        if kv_dtype is not None and not isinstance(kv_dtype, torch.dtype):
            raise TypeError(f"kv_dtype must be a torch.dtype or None, got {type(kv_dtype).__name__}")
        kinds = None if kv_dtype is None else dtype.settle(kv_dtype)
        lossy_codec = "" if kinds is None else kinds.keys.lossy_codec
        keys = StateKeys(dtype.metadata, layout, kv_dtype, dtype.chunk_size, lossy_codec)
        return cls(parts, keys, kinds, layout)

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
            tokens: int [num_tokens], all that the state has seen, at least one.
            state: the bytes of a slot.
            namespace: tokens of different namespaces never meet.
            skip_existing: leave a record alone that every tier has. Otherwise it is replaced in all tiers.
            deadline: seconds of the call; a tier is not begun afterwards. None for no limit.

        Returns:
            Whether some tier has the record now.

        Raises:
            ValueError, TypeError: arguments are wrong; nothing is written.
        """
        array = self._checked(tokens, namespace)
        check_flag("skip_existing", skip_existing)
        limit, payload = limit_of(deadline), self._payload(state, writable=False)
        prefix, key, start = self._search.key_of(array, namespace)

        def record(_: int) -> tuple[RecordKind, Source]:
            return self._keys.state_kind(key, len(array), namespace), payload

        is_there = self._tiers.put([key], record, skip_existing, limit).is_there[0]
        if is_there:
            self._index.add(prefix, start, namespace, array[start:], limit)
        return is_there

    @gated
    def get_into(self, tokens: Tokens, state: Memory, namespace: bytes = b"", deadline: float | None = None) -> bool:
        """Read the state after exactly these tokens.

        Args:
            tokens: as in `put`.
            state: writable memory of the bytes of a slot.
            namespace: the one that it was stored in.
            deadline: as in `put`.

        Returns:
            True if the memory has exactly the bytes that were put. False for a miss: its bytes mean nothing then.

        Raises:
            ValueError, TypeError: arguments are wrong; nothing is written.
        """
        array = self._checked(tokens, namespace)
        limit, payload = limit_of(deadline), self._payload(state, writable=True)
        _, key, _ = self._search.key_of(array, namespace)
        kind = self._keys.state_kind(key, len(array), namespace)

        def read(_: int, reader: Reader, num_threads: int) -> None:
            read_record(reader, kind, payload, num_threads)

        return self._tiers.read_each([key], read, limit)[0]

    @gated
    def prefetch(self, tokens: Tokens, namespace: bytes = b"") -> bool:
        """Copy the state after exactly these tokens into the faster tiers; see KVStore.prefetch.

        Args:
            tokens: as in `put`.
            namespace: the one that it was stored in.

        Returns:
            Whether the fastest tier that can have it has it.
        """
        return self._tiers.promote([self._search.key_of(self._checked(tokens, namespace), namespace)[1]])[0]

    @gated
    def longest(self, tokens: Tokens, namespace: bytes = b"", most: int | None = None) -> int:
        """Return the longest position that can be loaded: its state is there, and so are all chunks before it.

        Args:
            tokens: int [num_tokens], a prompt.
            namespace: where to look.
            most: the longest position to return; None for all of the tokens.

        Returns:
            The position, or that of a moment ago; 0 for none.

        Raises:
            ValueError, TypeError: arguments are wrong.
        """
        array = self._checked(tokens, namespace)
        limit = len(array) if most is None else as_integer("most", most)
        if not 0 <= limit <= len(array):
            raise ValueError(f"most must be in [0, {len(array)}], got {limit}")
        return self._search.longest(array, namespace, limit)

    @gated
    def positions(self, tokens: Tokens, namespace: bytes = b"") -> list[int]:
        """Return the positions of all states of a prompt, the longest first, whatever chunks are there.

        Args:
            tokens: int [num_tokens], a prompt.
            namespace: where to look.
        """
        return self._search.all_of(self._checked(tokens, namespace), namespace)

    @gated
    def remove(self, tokens: Tokens, namespace: bytes = b"") -> int:
        """Remove the states at all positions of a prompt from every tier. Chunks stay.

        Args:
            tokens: int [num_tokens], a prompt.
            namespace: the one that they were stored in.

        Returns:
            The number of states removed from the tier that had most of them.
        """
        array = self._checked(tokens, namespace)
        positions = self._search.all_of(array, namespace)
        return self._tiers.remove([self._search.key_of(array[:end], namespace)[1] for end in positions])

    @gated
    def explain(self, tokens: Tokens, namespace: bytes = b"") -> Explanation:
        """Return how far chunks and states reach into a prompt, and why not further.

        Args:
            tokens: int [num_tokens], a prompt.
            namespace: where to look.
        """
        array, search = self._checked(tokens, namespace), self._search
        usable, positions = search.longest(array, namespace, len(array) - 1), search.all_of(array, namespace)
        return explain_states(len(array), usable, positions, search.reach_of_chunks(array, namespace))

    def _payload(self, state: Memory, writable: bool) -> RunPayload:
        payload = RunPayload.of(pieces_of(state, writable))
        if payload.num_bytes != self.layout.slot_bytes:
            raise ValueError(f"state must have the {self.layout.slot_bytes} bytes of a slot, got {payload.num_bytes}")
        return payload

    def _checked(self, tokens: Tokens, namespace: bytes) -> npt.NDArray[np.int32]:
        check_namespace(namespace)
        array = as_tokens(tokens)
        if not len(array):
            raise ValueError("tokens must be at least one, got none")
        return array
