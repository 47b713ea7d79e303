"""HiCacheSettings: this backend's part of SGLang's --hicache-storage-backend-extra-config."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvpage.checks.fields import flag, texts
from kvpage.store import ByteStoreConfig

OF_SGLANG = ("backend_name", "module_path", "class_name")
LOCAL_SCHEMES = ("memory", "disk")
"""Schemes of tiers that one process alone has."""


@dataclass(frozen=True, slots=True)
class HiCacheSettings:
    """The settings of a backend. It checks itself.

    Attributes:
        tiers: URLs of tiers, the fastest first, as `ByteStoreConfig` takes them. "{rank}" becomes the rank's own name,
            such as "dp0-pp0-cp0-tp0": a disk tier belongs to one process.
        model: A name of the weights, with their revision. None for one by their files, or by their commit on the hub.
            Weights of another name share nothing.
        kv_cache_dtype: The dtype of K and V, as SGLang's --kv-cache-dtype names it. None for SGLang's own. Where SGLang
            keeps bytes, one must be chosen, since bytes do not tell e4m3 from e5m2.
        interface_v1: Whether SGLang gives the pages' addresses. Otherwise it gives copies of them.
        num_threads: Threads of a call. None means torch's number.
        log_requests: Whether a line of the log tells for each look-up and load what the store had of its pages.
        deadline: Seconds of a call, and of each tier whose URL names none. A page that is not there by then is a miss.

    Raises:
        ValueError: A setting breaks a rule.
        TypeError: A tier is not text.
    """

    tiers: tuple[str, ...]
    model: str | None = None
    kv_cache_dtype: str | None = None
    interface_v1: bool = False
    num_threads: int | None = None
    deadline: float = 5.0
    log_requests: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", texts("tiers", self.tiers))
        for name in ("model", "kv_cache_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{name} must be text that is not empty, got {value!r}")
        for name in ("interface_v1", "log_requests"):
            object.__setattr__(self, name, _truth(name, getattr(self, name)))
        if isinstance(self.deadline, bool) or not isinstance(self.deadline, int | float):
            raise ValueError(f"deadline must be positive seconds, got {self.deadline!r}")
        self.store_config("rank")

    @classmethod
    def from_extra_config(cls, values: Mapping[str, Any] | None) -> "HiCacheSettings":
        """Read SGLang's extra config.

        Args:
            values: Its keys that SGLang leaves to the backend.

        Returns:
            The settings.

        Raises:
            ValueError: A key is unknown, `tiers` is missing, or a value breaks a rule.
            TypeError: A tier is not text.
        """
        settings = {name: value for name, value in (values or {}).items() if name not in OF_SGLANG}
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ValueError(f"the extra config must have only {', '.join([*OF_SGLANG, *known])}, got {unknown}")
        if "tiers" not in settings:
            raise ValueError(f"the extra config must name tiers, got only {sorted(values or {})}")
        return cls(**settings)

    def store_config(self, rank: str) -> ByteStoreConfig:
        """Return the settings of a rank's store.

        Args:
            rank: The rank's name.

        Returns:
            The settings.
        """
        tiers = tuple(url.replace("{rank}", rank) for url in self.tiers)
        return ByteStoreConfig(tiers, self.num_threads, self.deadline)

    @property
    def all_local(self) -> bool:
        """Whether no other process reaches any of the tiers."""
        return all(url.partition(":")[0] in LOCAL_SCHEMES for url in self.tiers)


def _truth(name: str, value: Any) -> bool:
    """Return True or False; SGLang's pages write 1 and 0."""
    return flag(name, bool(value) if value in (0, 1) else value)
