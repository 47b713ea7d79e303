"""Pin: chunks that stay in their tiers for as long as somebody holds it."""

from collections.abc import Sequence

from kvpage.checks.interrupts import uninterrupted
from kvpage.store.tiers.tier import Reader


class Pin:
    """Chunks that stay while it is held. num_tokens: how many leading tokens these are."""

    def __init__(self, num_tokens: int, readers: Sequence[Reader]) -> None:
        self.num_tokens = num_tokens
        self._readers = list(readers)

    @uninterrupted
    def release(self) -> None:
        """Twice is fine."""
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
