"""EngineWeights: the names of what one engine computes with: the version of the model's weights, and adapters.

caller's namespace, adapter ─► EngineWeights.namespace ─► namespace of K and V in blocks, segments and stores
                               version, adapter's digest
"""

import secrets
from dataclasses import dataclass

from kvpage.blocks.namespaces import WeightsName
from kvpage.checks.values import MAX_CALLER_NAMESPACE_BYTES, check_namespace
from kvpage.serving.weights.adapters.adapter import Adapter

MAX_VERSION_BYTES = 128


@dataclass(frozen=True, slots=True)
class WeightStats:
    """The weights of an engine.

    Attributes:
        version: The current version; "" for the weights that the model came with.
        adapters: The names of the adapters that are loaded, in order.
        num_updates: Versions that were begun so far.
        num_noticed: Of these, those that began because weights had changed in place without a word.
        num_restarted: Requests that have begun again at an update.
        num_stale: Requests that went on with K and V of an older version.
    """

    version: str = ""
    adapters: tuple[str, ...] = ()
    num_updates: int = 0
    num_noticed: int = 0
    num_restarted: int = 0
    num_stale: int = 0


class EngineWeights:
    """Any thread may ask it at any time. The engine's own changes it, between two steps."""

    def __init__(self) -> None:
        self._stats = WeightStats()
        self._adapters: dict[str, Adapter] = {}

    @property
    def version(self) -> str:
        """The current version."""
        return self._stats.version

    def namespace(self, namespace: bytes, adapter: Adapter | None = None, version: str | None = None) -> bytes:
        """Return where K and V of a caller's namespace are kept that a version computes; None for the current one.

        adapter: that computes them; None for the base model. ValueError if the caller's is too long: then alone.
        """
        return self.namespace_by(namespace, self.digest(adapter), version)

    def namespace_by(self, namespace: bytes, digest: str, version: str | None = None) -> bytes:
        """Return `namespace` of an adapter by what it adds, loaded or not."""
        version = self._stats.version if version is None else version
        if isinstance(namespace, bytes) and not (namespace or version or digest):
            return namespace  # at once: of most requests
        check_namespace(namespace, MAX_CALLER_NAMESPACE_BYTES)
        return WeightsName(version, digest).within(namespace)

    @staticmethod
    def digest(adapter: Adapter | None) -> str:
        """Return what an adapter adds to namespaces of K and V; "" for nothing."""
        return "" if adapter is None or adapter.keeps_kv else adapter.digest

    def entry(self, namespace: bytes, name: str | None, version: str | None = None) -> tuple[bytes, Adapter | None]:
        """Return `namespace` of an adapter's name, and the adapter. ValueError for one that is not loaded."""
        adapter = None if name is None else self.adapter(name)
        return self.namespace_by(namespace, "" if adapter is None else self.digest(adapter), version), adapter

    def adapter(self, name: str | None) -> Adapter | None:
        """Return the adapter of a name; None for None. ValueError for one that is not loaded."""
        if name is None:
            return None
        adapter = self._adapters.get(name)
        if adapter is None:
            raise ValueError(f"adapter must be one that is loaded, got {name!r}, loaded are {list(self._adapters)}")
        return adapter

    def adapters(self) -> tuple[Adapter, ...]:
        """Return the adapters that are loaded."""
        return tuple(self._adapters.values())

    def check_new(self, name: str) -> None:
        """Raise ValueError for the name of an adapter that is loaded."""
        if name in self._adapters:
            raise ValueError(f"name must not be that of a loaded adapter, {name!r} is")

    def add_adapter(self, adapter: Adapter) -> None:
        """Let requests name an adapter from now on."""
        self._adapters = {**self._adapters, adapter.name: adapter}

    def remove_adapter(self, name: str) -> None:
        """Let no request name it any more."""
        self._adapters = {other: adapter for other, adapter in self._adapters.items() if other != name}

    def begin(self, version: str, *, is_noticed: bool, num_restarted: int, num_stale: int) -> None:
        """Begin a version."""
        before = self._stats
        self._stats = WeightStats(
            version,
            num_updates=before.num_updates + 1,
            num_noticed=before.num_noticed + is_noticed,
            num_restarted=before.num_restarted + num_restarted,
            num_stale=before.num_stale + num_stale,
        )

    def unused_version(self) -> str:
        """Return a version that no process has, so that no store has records of it."""
        return f"changed-{secrets.token_hex(8)}"

    def stats(self) -> WeightStats:
        """Return the numbers and names now."""
        of_versions = self._stats
        return WeightStats(
            of_versions.version,
            tuple(self._adapters),
            of_versions.num_updates,
            of_versions.num_noticed,
            of_versions.num_restarted,
            of_versions.num_stale,
        )


def check_version(version: str) -> None:
    """Raise TypeError unless a version is a str, and ValueError for one that is empty, long or not UTF-8."""
    if not isinstance(version, str):
        raise TypeError(f"version must be a str, got {type(version).__name__}")
    try:
        num_bytes = len(version.encode())
    except UnicodeEncodeError:
        raise ValueError(f"version must have an encoding in UTF-8, {version!r} has none") from None
    if not 0 < num_bytes <= MAX_VERSION_BYTES:
        raise ValueError(f"version must have 1 to {MAX_VERSION_BYTES} bytes in UTF-8, got {num_bytes}")
