"""RemoteOptions: the limits of a remote tier, from code or from a URL."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpage.store.records.record import CHECKSUM_BYTES, HEADER

MAC_BYTES = 32
MIN_RECORD_BYTES = HEADER.size + CHECKSUM_BYTES
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "": 1}


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """The limits of a remote tier.

    Attributes:
        max_record_bytes: bytes of one record; a longer value is not a record.
        max_batch_bytes: bytes of all records that one `open` returns; others are misses.
        mac_key: 32 secret bytes, for a server that others can write to; values without the right MAC are misses.
        timeout: seconds of calls that name none; None for no limit.
        max_calls: calls at once, late ones included.
        max_failures: failures in a row after which the server is left alone.
        cooldown: seconds for which it is left alone.

    Raises:
        ValueError: a field breaks a rule.
    """

    max_record_bytes: int = 256 << 20
    max_batch_bytes: int = 4 << 30
    mac_key: bytes | None = field(default=None, repr=False)
    timeout: float | None = 60.0
    max_calls: int = 8
    max_failures: int = 3
    cooldown: float = 5.0

    def __post_init__(self) -> None:
        if self.max_record_bytes < MIN_RECORD_BYTES:
            raise ValueError(f"max_record_bytes must be at least {MIN_RECORD_BYTES}, got {self.max_record_bytes}")
        if self.max_batch_bytes < self.max_record_bytes:
            raise ValueError(
                f"max_batch_bytes must be at least max_record_bytes, {self.max_record_bytes}, "
                f"got {self.max_batch_bytes}"
            )
        if self.mac_key is not None and len(self.mac_key) != 32:
            raise ValueError(f"mac_key must be 32 bytes, got {len(self.mac_key)}")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout must be positive, got {self.timeout}")
        if self.max_calls < 1:
            raise ValueError(f"max_calls must be positive, got {self.max_calls}")
        if self.max_failures < 1:
            raise ValueError(f"max_failures must be positive, got {self.max_failures}")
        if not 0 <= self.cooldown < math.inf:
            raise ValueError(f"cooldown must be at least 0, got {self.cooldown}")

    @property
    def mac_bytes(self) -> int:
        return 0 if self.mac_key is None else MAC_BYTES

    @property
    def max_value_bytes(self) -> int:
        """Return the largest length of a record with its MAC."""
        return self.max_record_bytes + self.mac_bytes

    @classmethod
    def take(cls, parameters: Mapping[str, str]) -> tuple["RemoteOptions", dict[str, str]]:
        """Return the options of a URL, and its other parameters.

        Lengths are bytes, or have KiB, MiB or GiB. The MAC's key is in a file (mac_key_file, 32 bytes), not in the URL.
        """
        rest = dict(parameters)
        limits: dict[str, Any] = {name: parse(name, rest.pop(name)) for name, parse in _PARSERS.items() if name in rest}
        if "mac_key_file" in rest:
            limits["mac_key"] = Path(rest.pop("mac_key_file")).read_bytes()
        return cls(**limits), rest


def num_bytes(name: str, text: str) -> int:
    digits = text.rstrip("KMGiB")
    unit = _UNITS.get(text[len(digits) :])
    if unit is None or not digits.isascii() or not digits.isdigit():
        raise ValueError(f"{name} must be a number of bytes such as 1048576, 64MiB or 2GiB, got {text!r}")
    return int(digits) * unit


def integer(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} must be an integer, got {text!r}")
    return int(text)


def seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number of seconds, got {text!r}") from None


_PARSERS = {
    "max_record_bytes": num_bytes,
    "max_batch_bytes": num_bytes,
    "timeout": seconds,
    "max_calls": integer,
    "max_failures": integer,
    "cooldown": seconds,
}
