"""ReadOnlyTier: the part of a tier that only reads: every change is refused."""

from collections.abc import Sequence

from kvpage.store.tiers.tier import Key, Tier, TierError, Writer


class ReadOnlyTier(Tier):
    """A tier that others write. Calls that would change a record raise TierError."""

    is_read_only = True

    def create(self, key: Key, num_bytes: int) -> Writer | None:
        raise self._refusal()

    def commit(self, writers: Sequence[Writer], timeout: float | None = None) -> list[bool]:
        raise self._refusal()

    def remove(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        raise self._refusal()

    def clear(self) -> None:
        raise self._refusal()

    def flush(self, sync: bool = False) -> None:
        """Do nothing: nothing is written."""

    def _refusal(self) -> TierError:
        return TierError(f"{self.name} is open for reading only, nothing can be changed")
