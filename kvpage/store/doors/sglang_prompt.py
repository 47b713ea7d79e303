"""SGLangPrompt: the keys under which the backend keeps a prompt's pages, made without SGLang.

    hash 0 = a digest of adapter and salt, if there are any    hash n = SHA-256(hash n-1 | tokens n, 4 bytes each)
    key of a page = the scope of its pool and rank | hash n in hexadecimal digits

A rank keeps its scopes in a record of their own. Read in SGLang 0.5.23.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.store.bytes.header import Value
from kvpage.store.doors.weight_files import is_named
from kvpage.store.prompt_reach import DoorPart

FIRST_RANK = "dp0-pp0-cp0-tp0"


@dataclass(frozen=True, slots=True)
class SGLangPrompt:
    """A prompt as SGLang asks for it. It checks itself.

    Attributes:
        tokens: of the prompt.
        salt: the request's cache_salt.
        adapter: name and path of the request's LoRA, as --lora-paths has them.
        rank: the rank's own name; None for the first one.
        model: tells of these weights alone: their folder, or the name in the settings. None for all.

    Raises:
        ValueError, TypeError: the tokens are not tokens, or none.
    """

    tokens: Tokens
    salt: str | None = None
    adapter: tuple[str, str] | None = None
    rank: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", as_tokens(self.tokens))
        if not len(self.tokens):
            raise ValueError("tokens must be at least one, got none")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)

    def is_mine(self, facts: Mapping[str, Value]) -> bool:
        """Return whether a header is of SGLang's storage, and of the model."""
        return facts.get("engine") == "sglang" and is_named(self.model, facts)

    def parts(self, facts: Mapping[str, Value], read: Callable[[bytes], bytes | None]) -> list[DoorPart]:
        """Return the pages of each pool of the rank.

        Args:
            facts: the header of the storage's records.
            read: returns the rank's record of its scopes.

        Raises:
            ValueError: the record of the scopes is not as the backend writes it.
        """
        rank = self.rank or FIRST_RANK
        data = read(scopes_key(rank))
        model = f"sglang {facts.get('version')!s}, model {facts.get('model')!s}, weights {facts.get('weights')!s}"
        if data is None:
            obstacle = "nothing can be told: the rank has no record of its pools here"
            return [DoorPart(f"{model}, rank {rank}", (), (), obstacle=obstacle)]
        parts = []
        for scope in unpacked(data):
            pool, page_size = pool_of(scope)
            hashes = self.hashes(page_size)
            ends = [(number + 1) * page_size for number in range(len(hashes))]
            name = f"{model}, rank {rank}, pool {pool} (pages of {page_size})"
            parts.append(DoorPart(name, ends, [page_key(scope, page) for page in hashes]))
        return parts

    def hashes(self, page_size: int) -> list[str]:
        """Return SGLang's hash of each whole page, and of all before it.

        Args:
            page_size: tokens of a page.
        """
        lora = uuid.uuid5(uuid.NAMESPACE_URL, "\0".join(self.adapter)).hex if self.adapter else None
        before, hashes, tokens = _seed(lora, self.salt or None), [], as_tokens(self.tokens)
        for begin in range(0, len(tokens) - page_size + 1, page_size):
            before = hashlib.sha256(before + tokens[begin : begin + page_size].astype("<u4").tobytes()).digest()
            hashes.append(before.hex())
        return hashes


def page_key(scope: bytes, page_hash: str) -> bytes:
    """Return the key of a page's record. scope: of its pool and rank. page_hash: SGLang's."""
    return scope + page_hash.encode()


def scopes_key(rank: str) -> bytes:
    """Return the key of the record that has the scopes of a rank's pools."""
    return b"scopes of " + rank.encode()


def packed(scopes: list[bytes]) -> bytes:
    """Return the record of the scopes of a rank's pools."""
    return json.dumps([scope.decode() for scope in scopes]).encode()


def unpacked(data: bytes) -> list[bytes]:
    """Return the scopes in a record. Raises ValueError for another record."""
    scopes = _json(data)
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        raise ValueError("a record of scopes must be a list of texts")
    return [scope.encode() for scope in scopes]


def pool_of(scope: bytes) -> tuple[str, int]:
    """Return the name and the page size of a scope's pool. Raises ValueError for another scope."""
    parts = _json(scope.rstrip(b"\0"))
    try:
        facts = parts[3]
        text = facts["page_size"] if facts["logical_page_size"] in ("None", "0") else facts["logical_page_size"]
        page_size = int(text)
    except (LookupError, TypeError) as error:
        raise ValueError("a scope must have its pool's page size") from error
    if not 0 < page_size < 1 << 31:
        raise ValueError(f"a page must have tokens, got {page_size}")
    return str(parts[0]), page_size


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("a record of scopes must not be nested deeply") from error


def _seed(extra: str | None, salt: str | None) -> bytes:
    """Return the hash before the first page; empty without adapter and salt."""
    if extra is None and salt is None:
        return b""
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra, salt):
        encoded = b"" if part is None else part.encode()
        digest.update(b"\0" if part is None else b"\1" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
