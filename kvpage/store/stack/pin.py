"""Pin: keeps chunks in their tiers until it is released."""

from collections.abc import Sequence

from kvpage.checks.interrupts import uninterrupted
from kvpage.store.tiers.tier import Reader


class Pin:
    """Chunks that stay until `release`; a context manager that releases.

    Args:
        num_tokens: the number of leading tokens whose chunks are kept.
        readers: an open reader of each chunk. The pin owns and closes them.
    """

    def __init__(self, num_tokens: int, readers: Sequence[Reader]) -> None:
        self.num_tokens = num_tokens
        self._readers = list(readers)

    @uninterrupted
    def release(self) -> None:
        """Let the chunks be evicted again. A second call does nothing."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.release()
        finally:  # Ctrl-C may have come before it began
            self.release()
