"""StateSearch: the positions of a prompt that have a state, and the longest one whose chunks are there, too.

    chunks      [ chunk 0 | chunk 1 | chunk 2 |    -    ]
    indexes     3 after 0 | -       | 5 after 2 | 1 after 3         an entry counts where the prompt has its tokens
    states          ^                    ^            x             2 * chunk_size + 5, if the short chunk is there

The tokens after the last whole chunk are a chunk of their own, as `store_blocks` makes one.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvpage.blocks.explain import GroupReach
from kvpage.store.records.kinds import RecordKinds
from kvpage.store.stack.chunk_threads import num_leading
from kvpage.store.stack.tier_stack import TierStack
from kvpage.store.states.explaining import explain_chunks
from kvpage.store.states.state_index import StateIndex
from kvpage.store.states.state_keys import StateKeys
from kvpage.store.tiers.tier import Key

Array = npt.NDArray[np.int32]


class StateSearch:
    """Thread-safe.

    Args:
        tiers: Where chunks and states are.
        keys: Names of states.
        index: Their positions.
        kinds: Names of chunks; None for a model without K and V.
    """

    def __init__(self, tiers: TierStack, keys: StateKeys, index: StateIndex, kinds: RecordKinds | None) -> None:
        self._tiers, self._keys, self._index, self._kinds = tiers, keys, index, kinds

    def key_of(self, tokens: Array, namespace: bytes) -> tuple[bytes, Key, int]:
        """Return the prefix before the last tokens, the key of the state after all of them, and the prefix's tokens."""
        prefix = self._keys.prefixes(tokens, namespace)[-1]
        start = len(tokens) // self._keys.chunk_size * self._keys.chunk_size
        return prefix, self._keys.state(prefix, tokens[start:]), start

    def all_of(self, tokens: Array, namespace: bytes) -> list[int]:
        """Return the positions of all states of a prompt, the longest first."""
        found = list(self._listed(tokens, namespace, len(tokens)))
        there = self._tiers.locate([key for _, key in found])
        return [position for (position, _), at in zip(found, there, strict=True) if at is not None]

    def longest(self, tokens: Array, namespace: bytes, most: int) -> int:
        """Return the longest position with a state and all chunks before it; 0 for none.

        Args:
            tokens: The prompt.
            namespace: Of the tokens.
            most: The longest position to return.
        """
        reach = min(self.num_chunk_tokens(tokens[:most], namespace) + self._keys.chunk_size - 1, most)
        found = self._listed(tokens[:reach], namespace, most)
        return next((position for position, key in found if self._is_there(tokens[:position], key, namespace)), 0)

    def num_chunk_tokens(self, tokens: Array, namespace: bytes) -> int:
        """Return how many leading tokens are in chunks that are there. All, for a model without K and V."""
        if self._kinds is None:
            return len(tokens)
        return min(num_leading(self._there(self._kinds, tokens, namespace)) * self._keys.chunk_size, len(tokens))

    def reach_of_chunks(self, tokens: Array, namespace: bytes) -> GroupReach | None:
        """Return how far chunks reach, and why not further; None for a model without K and V."""
        if self._kinds is None:
            return None
        return explain_chunks(self._there(self._kinds, tokens, namespace), self._keys.chunk_size, len(tokens))

    def _there(self, kinds: RecordKinds, tokens: Array, namespace: bytes) -> list[bool]:
        return [at is not None for at in self._tiers.locate(kinds.keys.of(tokens, namespace))]

    def _is_there(self, tokens: Array, key: Key, namespace: bytes) -> bool:
        """Return whether the state is there, and the chunk after the last whole one, if there is any."""
        keys = [key]
        if self._kinds is not None and len(tokens) % self._keys.chunk_size:
            keys.append(self._kinds.keys.of(tokens, namespace)[-1])
        return None not in self._tiers.locate(keys)

    def _listed(self, tokens: Array, namespace: bytes, most: int) -> Iterator[tuple[int, Key]]:
        """Yield the positions of a prompt that an index has, and the keys of their states, the longest first."""
        prefixes = self._keys.prefixes(tokens, namespace)
        there = self._index.there(prefixes)
        for at in np.flatnonzero(there)[::-1].tolist():
            start = at * self._keys.chunk_size
            entries = self._index.read(prefixes[at], start, namespace)
            for rest in sorted(set(entries.values()), reverse=True):
                position = start + rest
                if 0 < position <= min(most, len(tokens)):
                    key = self._keys.state(prefixes[at], tokens[start:position])
                    if entries.get(key) == rest:
                        yield position, key
