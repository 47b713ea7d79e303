"""ByteStoreConfig: the tiers of a store of bytes, and how its calls use them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpage.checks.values import check_at_least
from kvpage.store.config import check_deadline, check_keys, checked_tiers


@dataclass(frozen=True, slots=True)
class ByteStoreConfig:
    """The configuration of a ByteStore.

    Attributes:
        tiers: URLs as in `KVStoreConfig`, the fastest first; reading asks them in this order. A single text is one.
        num_threads: threads for the records of one call; None for torch's number.
        deadline: seconds of a call on a tier whose URL names none; None for no limit.

    Raises:
        ValueError: a field breaks a rule.
        TypeError: a tier is not text.
    """

    tiers: tuple[str, ...] = ("memory://?size=1GiB",)
    num_threads: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", checked_tiers(self.tiers))
        if self.num_threads is not None:
            check_at_least("num_threads", self.num_threads, 1)
        check_deadline(self.deadline)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ByteStoreConfig":
        """Return a configuration of `values` by the names of the fields, as an engine's JSON has them.

        Raises:
            ValueError: a key is not a field, or a field breaks a rule.
            TypeError: values is not a mapping, or a tier is not text.
        """
        check_keys(values, cls)
        return cls(**values)
