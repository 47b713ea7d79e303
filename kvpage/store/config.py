"""KVStoreConfig: chunk size, tiers as URLs, and how they work together; from code, YAML or the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
ENV_PREFIX = "KVPAGE_"


def parse_size(text: str | int) -> int:
    """Bytes, of "8GiB", "512 MiB", "1.5TiB" or plain numbers. ValueError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    number = str(text).strip().upper()
    unit = next((name for name in UNITS if name and number.endswith(name)), "")
    try:
        size = float(number.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise ValueError(f"a size must be like 8GiB, 512MiB or a number of bytes, got {text!r}")
    return int(size)


@dataclass(frozen=True, slots=True)
class TierURL:
    """A tier's URL, taken apart. Those of paths may name several, with commas between: disk:///ssd0/kv,/ssd1/kv?size=1TiB

    text: what may be shown: no user, no password, no options. url: as given. options: after the question mark, text by
        name.
    """

    text: str
    scheme: str
    place: str
    options: tuple[tuple[str, str], ...] = ()
    url: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> "TierURL":
        """ValueError for what is no URL, and for an option that is given twice."""
        if not isinstance(url, str):
            raise TypeError(f"a tier must be a URL as text, got {type(url).__name__}")
        parts = urlsplit(url)
        if not parts.scheme:
            raise ValueError(f"a tier must be a URL such as memory://?size=8GiB, got {url!r}")
        options = parse_qsl(parts.query, keep_blank_values=True)
        names = [name for name, _ in options]
        if len(set(names)) != len(names):
            raise ValueError(f"options of a tier must be given once, got {url!r}")
        slashes = "//" if url.partition(":")[2].startswith("//") else ""
        shown = f"{parts.scheme}:{slashes}{parts.netloc.rpartition('@')[2]}{parts.path}"
        return cls(shown, parts.scheme, unquote(parts.netloc.rpartition("@")[2] + parts.path), tuple(options), url)

    def without(self, *names: str) -> str:
        """The URL as given, but for these options."""
        kept = urlencode([pair for pair in self.options if pair[0] not in names])
        return urlunsplit(urlsplit(self.url)._replace(query=kept))

    def option(self, name: str, default: str | None = None) -> str | None:
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True)
class KVStoreConfig:
    """chunk_size: tokens of a chunk. tiers: URLs, the fastest first; reading asks them in this order.

    Options that every tier takes: `write=through` (the default: `store` returns when the record is there) or `back`
    (written in the background), `promote=yes` or `no` (whether what slower tiers have found is copied here),
    `deadline=0.5` (seconds of one call).

    codec: "raw", or what `kvpage.store.records.codec` knows. save_decode_cache: an engine stores what was generated, too.
    deadline: seconds of a call on a tier that names none; None for no limit. num_threads: for one call; 0 for torch's.
    """

    chunk_size: int = 256
    tiers: tuple[str, ...] = ("memory://?size=1GiB",)
    codec: str = "raw"
    save_decode_cache: bool = False
    deadline: float | None = None
    num_threads: int = 0

    def __post_init__(self) -> None:
        for name, least in (("chunk_size", 1), ("num_threads", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        tiers = (self.tiers,) if isinstance(self.tiers, str) else tuple(self.tiers)
        if not tiers:
            raise ValueError("tiers must name at least one, got none")
        for url in tiers:
            TierURL.parse(url)
        object.__setattr__(self, "tiers", tiers)
        if not isinstance(self.save_decode_cache, bool):
            raise ValueError(f"save_decode_cache must be True or False, got {self.save_decode_cache!r}")
        if self.deadline is not None and not isinstance(self.deadline, (int, float)):
            raise ValueError(f"deadline must be positive seconds or None, got {type(self.deadline).__name__}")
        if self.deadline is not None and not 0 < self.deadline < float("inf"):
            raise ValueError(f"deadline must be positive seconds or None, got {self.deadline!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "KVStoreConfig":
        """ValueError for a key that is none of the fields."""
        if not isinstance(values, Mapping):
            raise TypeError(f"values must be a mapping, got {type(values).__name__}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"keys must be among {', '.join(sorted(known))}, got {', '.join(map(str, unknown))}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "KVStoreConfig":
        """From a file of keys and values. It needs the extra `store` (PyYAML). ValueError for any other file."""
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be YAML of plain keys and values: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold keys and values, got {type(values).__name__}")
        return cls.from_dict(values)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "KVStoreConfig":
        """From KVPAGE_CHUNK_SIZE, KVPAGE_TIERS (URLs with spaces between) and so on. KVPAGE_STORE_... and others that
        are no field's name raise ValueError, but for KVPAGE_CUDA, which is the build's.
        """
        environ = os.environ if environ is None else environ
        if not isinstance(environ, Mapping):
            raise TypeError(f"environ must be a mapping, got {type(environ).__name__}")
        for name, value in environ.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"environ must be of text, got {type(value).__name__} for {name!r}")
        given = {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(ENV_PREFIX) and name not in ("KVPAGE_CUDA",)
        }
        return cls.from_dict({name: _from_text(name, value) for name, value in given.items()})


def _from_text(name: str, text: str) -> Any:
    if name == "tiers":
        return tuple(text.split())
    if name in ("chunk_size", "num_threads"):
        return _number(name, text, int)
    if name == "deadline":
        return None if text.lower() in ("", "none") else _number(name, text, float)
    if name == "save_decode_cache":
        flags = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in flags:
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return flags[text.lower()]
    return text


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
