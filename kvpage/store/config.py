"""KVStoreConfig: chunk size, tiers as URLs, and how they work together; from code, YAML or the environment."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from kvpage.checks.values import check_at_least

UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
ENV_PREFIX = "KVPAGE_"


def parse_size(text: str | int) -> int:
    """Return the bytes of "8GiB", "512 MiB", "1.5TiB" or a plain number. Raises ValueError for other text."""
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
    """A tier's URL, taken apart. One of paths may name several: disk:///ssd0/kv,/ssd1/kv?size=1TiB.

    text: for messages, without user, password and options. url: as given. options: pairs of name and text.
    """

    text: str
    scheme: str
    place: str
    options: tuple[tuple[str, str], ...] = ()
    url: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> "TierURL":
        """Take a URL apart. Raises ValueError for text that is not a URL, and for an option that is given twice."""
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
        """Return the URL without these options."""
        query = urlencode([pair for pair in self.options if pair[0] not in names])
        return urlunsplit(urlsplit(self.url)._replace(query=query))

    def option(self, name: str, default: str | None = None) -> str | None:
        """Return the text of an option."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True)
class KVStoreConfig:
    """The configuration of a store.

    Every tier's URL takes five options. `write=through`, the default: `store` returns when the record is there;
    `write=back`: it is written in the background. `promote=yes` or `no`: whether records that slower tiers have are
    copied here. `deadline=0.5`: seconds of one call. `seal_key_file=PATH`: records are encrypted there, see `SealKeys`.
    `codec=raw`, `split` or `zstd`: how records are written there; `auto`, the default but for memory: `split` where
    reads turn out so slow that it gains, else `codec` below.

    Attributes:
        chunk_size: tokens of a chunk.
        tiers: URLs, the fastest first; reading asks them in this order.
        codec: "raw", "zstd", "split" or "fp8".
        save_decode_cache: whether an engine stores generated tokens, too.
        deadline: seconds of a call on a tier that names none; None for no limit.
        num_threads: threads for one call; 0 for torch's number.
        kept_result_bytes: bytes of memory of results that are gone, which later ones are given; 0 for none. A text such
            as "1GiB" becomes a number.

    Raises:
        ValueError: a field breaks a rule.
        TypeError: a tier is not text.
    """

    chunk_size: int = 256
    tiers: tuple[str, ...] = ("memory://?size=1GiB",)
    codec: str = "raw"
    save_decode_cache: bool = False
    deadline: float | None = None
    num_threads: int = 0
    kept_result_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if isinstance(self.kept_result_bytes, str):
            object.__setattr__(self, "kept_result_bytes", parse_size(self.kept_result_bytes))
        for name, least in (("chunk_size", 1), ("num_threads", 0), ("kept_result_bytes", 0)):
            check_at_least(name, getattr(self, name), least)
        object.__setattr__(self, "tiers", checked_tiers(self.tiers))
        if not isinstance(self.save_decode_cache, bool):
            raise ValueError(f"save_decode_cache must be True or False, got {self.save_decode_cache!r}")
        check_deadline(self.deadline)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "KVStoreConfig":
        """Return a configuration of `values` by the names of the fields.

        Raises:
            ValueError: a key is not a field.
            TypeError: values is not a mapping.
        """
        check_keys(values, cls)
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "KVStoreConfig":
        """Return the configuration in a YAML file at `path`. It needs the extra `store` (PyYAML).

        Raises:
            ValueError: the file does not hold the fields' names and values.
            OSError: it cannot be read.
        """
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
        """Return the configuration in variables such as KVPAGE_CHUNK_SIZE and KVPAGE_TIERS (URLs with spaces between).

        KVPAGE_CUDA belongs to the build and is left alone.

        Args:
            environ: names and values; None for the process's environment.

        Raises:
            ValueError: a name that begins with KVPAGE_ is not a field, or a value is wrong.
            TypeError: environ is not a mapping of text.
        """
        environ = os.environ if environ is None else environ
        if not isinstance(environ, Mapping):
            raise TypeError(f"environ must be a mapping, got {type(environ).__name__}")
        for name, value in environ.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"environ must be of text, got {type(value).__name__} for {name!r}")
        settings = {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(ENV_PREFIX) and name not in ("KVPAGE_CUDA",)
        }
        return cls.from_dict({name: _from_text(name, value) for name, value in settings.items()})


@dataclass(frozen=True, slots=True)
class ByteStoreConfig:
    """The configuration of a ByteStore.

    Attributes:
        tiers: URLs as in `KVStoreConfig`, the fastest first; reading asks them in this order. A single text is one.
        num_threads: threads for the records of one call; None for torch's number.
        deadline: seconds of a call on a tier whose URL names none; None for no limit.
        dtype: of the numbers in the records, such as "bfloat16", for tiers with a codec; None for other bytes. Records
            that were coded are read by stores with the same dtype.

    Raises:
        ValueError: a field breaks a rule.
        TypeError: a tier is not text.
    """

    tiers: tuple[str, ...] = ("memory://?size=1GiB",)
    num_threads: int | None = None
    deadline: float | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", checked_tiers(self.tiers))
        if self.num_threads is not None:
            check_at_least("num_threads", self.num_threads, 1)
        check_deadline(self.deadline)
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise TypeError(f"dtype must be the name of one, such as bfloat16, got {type(self.dtype).__name__}")
        codecs = [TierURL.parse(tier).option("codec") for tier in self.tiers]
        if "zstd" in codecs:
            raise ValueError("codec of a tier must be raw, split or auto for records of bytes, got 'zstd'")
        if "split" in codecs and self.dtype is None:
            raise ValueError("dtype must be given for the codec split: it codes numbers, not bytes")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ByteStoreConfig":
        """Return a configuration of `values` by the names of the fields, as an engine's JSON has them.

        Raises:
            ValueError: a key is not a field, or a field breaks a rule.
            TypeError: values is not a mapping, or a tier is not text.
        """
        check_keys(values, cls)
        return cls(**values)


TierChoice = KVStoreConfig | ByteStoreConfig
"""A configuration that names tiers."""


def checked_tiers(tiers: str | Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of one or several tiers. Raises ValueError for none and wrong ones, TypeError for no text."""
    urls = (tiers,) if isinstance(tiers, str) else tuple(tiers)
    if not urls:
        raise ValueError("tiers must name at least one, got none")
    for url in urls:
        TierURL.parse(url)
    return urls


def check_deadline(deadline: float | None) -> None:
    """Raise ValueError unless it is None, or positive and finite seconds."""
    if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, (int, float))):
        raise ValueError(f"deadline must be positive seconds or None, got {type(deadline).__name__}")
    if deadline is not None and not 0 < deadline < float("inf"):
        raise ValueError(f"deadline must be positive seconds or None, got {deadline!r}")


def check_keys(values: Mapping[str, Any], config: type) -> None:
    """Raise TypeError unless it is a mapping, ValueError for a key that is no field of the configuration class."""
    if not isinstance(values, Mapping):
        raise TypeError(f"values must be a mapping, got {type(values).__name__}")
    known = {field.name for field in fields(config)}
    unknown = sorted(map(str, set(values) - known))
    if unknown:
        raise ValueError(f"keys must be among {', '.join(sorted(known))}, got {', '.join(unknown)}")


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
