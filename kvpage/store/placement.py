"""Placement: the tiers of a configuration, each made from its URL by the factory of the URL's scheme."""

import re
from collections.abc import Callable, Sequence

from kvpage.store.config import TierChoice, TierURL, parse_size
from kvpage.store.stack.placed import Placed
from kvpage.store.tiers.tier import Tier

Factory = Callable[[TierURL], Tier]
FOREIGN_PATH = re.compile(r"/?[A-Za-z]:|/?~|.*\\")
COMMON_OPTIONS = ("write", "promote", "deadline", "seal_key_file", "codec")
CODECS = ("auto", "raw", "zstd", "split")


def _memory(url: TierURL) -> Tier:
    from kvpage.store.tiers.memory_tier import MemoryTier

    check_options(url, "size", "policy", "prefault")
    size, policy = parse_size(url.option("size", "1GiB") or ""), url.option("policy", "lru") or ""
    return MemoryTier(size, policy, prefault=_choice(url, "prefault", {"yes": True, "no": False}, "yes"))


def _disk(url: TierURL) -> Tier:
    from kvpage.store.disk.disk_tier import SEGMENT_BYTES, DiskTier

    check_options(url, "size", "policy", "segment")
    segment_bytes = parse_size(url.option("segment", str(SEGMENT_BYTES)) or "")
    size, policy = parse_size(url.option("size", "10GiB") or ""), url.option("policy", "lru") or ""
    return DiskTier(paths_of(url), size, policy, segment_bytes)


def _disk_view(url: TierURL) -> Tier:
    from kvpage.store.disk.shared_disk import SharedDisk

    check_options(url)
    return SharedDisk(paths_of(url))


def paths_of(url: TierURL) -> list[str]:
    """Return the paths of disk:///ssd0/kv,/ssd1/kv, or of disk:kv, in the working directory.

    Raises ValueError for a URL without a path, and for a path that would not lead where it seems to.
    """
    paths, after_scheme = url.place.split(","), url.url.partition(":")[2]
    for path in paths:
        if not path.strip("/") or FOREIGN_PATH.match(path):
            raise ValueError(
                "paths of a disk tier must each name a directory of this system, none empty, without ~ or a drive's "
                f"letter, such as disk:///var/kv, got {path!r} in {url.text}"
            )
    if after_scheme.startswith("//") and not all(path.startswith("/") for path in paths):
        bare = [path.lstrip("/") for path in paths]
        raise ValueError(
            f"paths of a disk tier must begin with / after disk://, such as disk:///{',/'.join(bare)}, or follow "
            f"disk: alone to begin in the working directory, such as disk:{','.join(bare)}, got {url.text}"
        )
    if "#" in after_scheme:
        raise ValueError(f"paths of a disk tier must have %23 for #, got {url.text}#...")
    return paths


def _redis(url: TierURL) -> Tier:
    from kvpage.store.remote.redis import from_url

    return from_url(url.without(*COMMON_OPTIONS))


def _s3(url: TierURL) -> Tier:
    from kvpage.store.remote.s3 import from_url

    return from_url(url.without(*COMMON_OPTIONS))


def _mooncake(url: TierURL) -> Tier:
    from kvpage.store.remote.mooncake import from_url

    return from_url(url.without(*COMMON_OPTIONS))


REDIS = [f"{scheme}{kind}" for scheme in ("redis", "rediss") for kind in ("", "+cluster", "+sentinel")] + ["unix"]


class TierFactories:
    """Factories of tiers by scheme."""

    def __init__(self) -> None:
        self._factories: dict[str, Factory] = {
            "memory": _memory,
            "disk": _disk,
            "disk-view": _disk_view,
            "s3": _s3,
            "mooncake": _mooncake,
            **dict.fromkeys(REDIS, _redis),
        }

    def register(self, scheme: str, factory: Factory) -> None:
        """Add a factory for tiers of your own.

        Args:
            scheme: of the URLs, such as "mine" of mine://place.
            factory: makes a tier of a URL.

        Raises:
            ValueError: another factory has the scheme.
        """
        if self._factories.get(scheme, factory) is not factory:
            raise ValueError(f"scheme must be a new one, {scheme!r} is taken")
        self._factories[scheme] = factory

    def make(self, url: TierURL) -> Tier:
        """Return the URL's tier. Raises ValueError for an unknown scheme, and the factory's errors."""
        self.check(url)
        return self._factories[url.scheme](url)

    def check(self, url: TierURL) -> None:
        """Raise ValueError for an unknown scheme. Nothing is opened."""
        if url.scheme not in self._factories:
            raise ValueError(f"scheme must be one of {', '.join(sorted(self._factories))}, got {url.scheme!r}")


FACTORIES = TierFactories()
"""The factories of this process."""

register_tier = FACTORIES.register


def check_options(url: TierURL, *known: str) -> None:
    """Raise ValueError for an option that is neither common to all tiers nor among `known`."""
    for name, _ in url.options:
        if name not in (*known, *COMMON_OPTIONS):
            raise ValueError(
                f"options of {url.scheme}:// must be among {', '.join((*known, *COMMON_OPTIONS))}, got {name!r}"
            )


def placed_tiers(config: TierChoice, tiers: Sequence[Tier | Placed] | None) -> list[Placed]:
    """Return the tiers with their parts; None for the configuration's tiers, as `place_tiers` makes them."""
    return place_tiers(config) if tiers is None else [Placed.of(tier, config.deadline) for tier in tiers]


def place_tiers(config: TierChoice) -> list[Placed]:
    """Return the tiers of a configuration. If one cannot be made, the others are closed, and its error is raised."""
    placements: list[Placed] = []
    try:
        for text in config.tiers:
            placements.append(_place(TierURL.parse(text), config))
    except BaseException:
        for placed in placements:
            placed.tier.close()
        raise
    return placements


def _place(url: TierURL, config: TierChoice) -> Placed:
    write = _choice(url, "write", {"through": False, "back": True}, "through")
    promotes = _choice(url, "promote", {"yes": True, "no": False}, "yes")
    deadline = url.option("deadline")
    seconds = config.deadline if deadline is None else _seconds(deadline)
    codec = url.option("codec")
    if codec not in (None, *CODECS):
        raise ValueError(f"codec of a tier must be one of {', '.join(CODECS)}, got {codec!r}")
    tier = make_tier(url)
    return Placed(tier, write, promotes, seconds, codec if codec or tier.is_in_memory else "auto")


def make_tier(url: TierURL) -> Tier:
    """Return the URL's tier, sealed if it names a file of keys.

    Raises ValueError, OSError or ImportError if it cannot be made.
    """
    return sealed(url, lambda: FACTORIES.make(url))


def sealed(url: TierURL, make: Callable[[], Tier]) -> Tier:
    """Return the tier that `make` returns, sealed if the URL names a file of keys. The file is read first."""
    path = url.option("seal_key_file")
    if path is None:
        return make()
    from kvpage.store.sealed.seal_keys import SealKeys
    from kvpage.store.sealed.sealed_tier import SealedTier

    keys, tier = SealKeys.from_file(path), make()
    try:
        return SealedTier(tier, keys)
    except BaseException:
        tier.close()
        raise


def _choice(url: TierURL, name: str, choices: dict[str, bool], default: str) -> bool:
    value = url.option(name, default) or ""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return choices[value]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"deadline must be positive seconds, got {text!r}")
    return seconds
