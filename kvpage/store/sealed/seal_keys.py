"""SealKeys: the secrets that seal a tier's records, by id. One writes, all read.

2026-11 0f3c..   64 hexadecimal digits          the first line's key writes
2026-05 77ab..                                  older ones are read until their records are gone
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

KEY_BYTES = 32
ID = re.compile(r"[!-~]{1,64}")
LINE = re.compile(r"(\S+)[ \t]+([0-9A-Fa-f]{64})")


@dataclass(frozen=True, slots=True)
class SealKeys:
    """Secrets by id, which stands in clear in each record.

    Rotation: add a new key in front, and drop the old one when its records are gone.

    Attributes:
        keys: pairs of id and 32 secret bytes; the first one writes. An id has 1 to 64 printable ASCII characters.

    Raises:
        ValueError: a field breaks a rule. No message holds a secret.
        TypeError: keys are no pairs.
    """

    keys: tuple[tuple[str, bytes], ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.keys, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in self.keys
        ):
            raise TypeError("keys must be a tuple of pairs of id and secret")
        if not self.keys:
            raise ValueError("keys must be at least one, got none")
        for name, secret in self.keys:
            if not isinstance(name, str) or not ID.fullmatch(name):
                raise ValueError("the id of a key must be 1 to 64 printable ASCII characters, got another one")
            if not isinstance(secret, bytes) or len(secret) != KEY_BYTES:
                raise ValueError(f"key {name} must be {KEY_BYTES} bytes")
        if len(dict(self.keys)) < len(self.keys):
            raise ValueError("ids of keys must be given once, got one twice")

    @classmethod
    def from_file(cls, path: str | Path) -> "SealKeys":
        """Return the keys in a file at `path`: on each line an id and 64 hexadecimal digits. Empty lines are skipped.

        Raises:
            ValueError: a line is not of this form, or a field breaks a rule.
            OSError: the file cannot be read.
        """
        keys = []
        for number, line in enumerate(Path(path).read_text("ascii", "replace").splitlines(), 1):
            if line.strip():
                match = LINE.fullmatch(line.strip())
                if match is None:
                    raise ValueError(f"line {number} of {path} must be an id and 64 hexadecimal digits")
                keys.append((match[1], bytes.fromhex(match[2])))
        if not keys:
            raise ValueError(f"{path} must hold at least one key, got none")
        return cls(tuple(keys))

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids, that of the writing key first."""
        return tuple(name for name, _ in self.keys)

    def secret(self, name: str) -> bytes | None:
        """Return the secret of the id `name`; None if there is none."""
        return dict(self.keys).get(name)
