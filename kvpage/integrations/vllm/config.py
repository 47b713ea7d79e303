"""StoreTierConfig: the settings of a tier in vLLM's JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvpage.checks.fields import flag
from kvpage.checks.values import check_at_least
from kvpage.store.config import ByteStoreConfig, parse_size

LOCALITIES = ("LOCAL", "REMOTE")
ON_RESET = ("forget", "keep")
PATIENCES = ("lookup_patience", "load_patience", "store_patience")
LEAST_PENDING = 256 << 20
OF_VLLM = ("backpressure", "module_path", "type")  # vLLM reads these itself


@dataclass(frozen=True, slots=True)
class StoreTierConfig:
    """The settings of a tier. It checks itself.

    Attributes:
        tiers: URLs of the store's tiers, the fastest first, as ByteStoreConfig takes them. "{rank}" becomes the name of
            the replica, such as "dp0".
        weights: A name for the weights and for all that changes their results, such as "model@revision". None for a
            digest of the model's folder.
        persistent: Whether other processes find chunks that this one has stored. If not, `weights` has no effect.
        on_reset: "forget" if nothing is found any more once vLLM resets its caches and its connector, as it does when
            weights are updated or put to sleep. "keep" for weights that never change.
        num_threads: Threads for the records of one job; None for torch's number.
        deadline: Seconds of a call on a tier whose URL names none; None for no limit.
        lookup_patience: Seconds after which a look-up without an answer is a miss.
        load_patience: Seconds after which the rest of a load is a miss.
        store_patience: Seconds after which the rest of a store is given up.
        max_pending: Bytes that wait to be stored at most; chunks beyond them are not stored. A text such as "256MiB"
            becomes a number. None for half of vLLM's host memory, and for LEAST_PENDING at least.
        locality: "LOCAL" or "REMOTE", for vLLM's filters of tiers; None for neither.
        enable_kv_events: Whether chunks that come and go are among vLLM's events. vLLM's own switch must be on, too.
        log_requests: Whether a line of the log tells for each request what the store had of it.

    Raises:
        ValueError: A field breaks a rule.
        TypeError: A field is of another type.
    """

    tiers: tuple[str, ...]
    weights: str | None = None
    persistent: bool = True
    on_reset: str = "forget"
    num_threads: int | None = None
    deadline: float | None = None
    lookup_patience: float = 1.0
    load_patience: float = 10.0
    store_patience: float = 30.0
    max_pending: int | None = None
    locality: str | None = None
    enable_kv_events: bool = False
    log_requests: bool = False

    def __post_init__(self) -> None:
        any_dtype = "bfloat16"  # vLLM tells its own later
        store = ByteStoreConfig(self.tiers, self.num_threads, self.deadline, any_dtype)
        object.__setattr__(self, "tiers", store.tiers)
        if self.max_pending is not None:
            object.__setattr__(self, "max_pending", parse_size(self.max_pending))
            check_at_least("max_pending", self.max_pending, 1)
        flag("enable_kv_events", self.enable_kv_events)
        flag("persistent", self.persistent)
        flag("log_requests", self.log_requests)
        if self.on_reset not in ON_RESET:
            raise ValueError(f"on_reset must be one of {', '.join(ON_RESET)}, got {self.on_reset!r}")
        if self.weights is not None and not isinstance(self.weights, str):
            raise TypeError(f"weights must be text or None, got {type(self.weights).__name__}")
        if self.weights == "":
            raise ValueError("weights must name the weights, got ''")
        for name in PATIENCES:
            _check_seconds(name, getattr(self, name))
        if self.locality not in (None, *LOCALITIES):
            raise ValueError(f"locality must be one of {', '.join(LOCALITIES)} or None, got {self.locality!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StoreTierConfig":
        """Return the settings in one entry of vLLM's `secondary_tiers`, less the settings that vLLM reads itself.

        Args:
            values: By the names of the fields.

        Returns:
            The settings.

        Raises:
            ValueError: A key is not a field, `tiers` is missing, or a field breaks a rule.
            TypeError: A field is of another type.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            names = ", ".join(sorted([*known, *OF_VLLM]))
            raise ValueError(f"keys of a KVPageTier must be among {names}, got {', '.join(unknown)}")
        if "tiers" not in values:
            raise ValueError('tiers must be given, such as ["disk:///var/kv?size=100GiB"], got none')
        return cls(**values)

    def pending_bytes(self, host_bytes: int) -> int:
        """Return how many bytes may wait to be stored.

        A step's chunks wait together, and the next step's come while they are written: one limit for all sizes of steps
        would drop every second step of a long prompt.

        Args:
            host_bytes: Of vLLM's host memory. What waits cannot leave it.

        Returns:
            The bytes.
        """
        return max(LEAST_PENDING, host_bytes // 2) if self.max_pending is None else self.max_pending

    def of_store(self, rank: str, dtype: str | None = None) -> ByteStoreConfig:
        """Return the configuration of a replica's store.

        Args:
            rank: The replica's name.
            dtype: Of K and V, for tiers with a codec; None for one that no codec knows.

        Returns:
            The configuration.
        """
        tiers = tuple(url.replace("{rank}", rank) for url in self.tiers)
        return ByteStoreConfig(tiers, self.num_threads, self.deadline, dtype)


def _check_seconds(name: str, seconds: float) -> None:
    """Raise TypeError unless it is a number, ValueError unless it is positive and finite."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name} must be seconds, got {type(seconds).__name__}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {seconds!r}")
