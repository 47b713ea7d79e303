"""What a cached block is known by besides its tokens: a tenant, an adapter, the content behind placeholder tokens.

    tokens    [ 17 | 5 | IMG IMG IMG IMG ... IMG | 8 ]      IMG: the same id for every image
    keyed     [ 17 | 5 | -a  -b  -c  -d  ... -x  | 8 ]      31 bits of the image's digest each: nine hold all of it

Keyed tokens are for BlockManager and PrefixTree, which compare them like any others; the model gets the real ones. The
digest is SHA-256 of the content, computed here: who could name it could read what another's image has left.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpage.blocks.table import Ids
from kvpage.checks.tokens import Tokens, as_tokens

__all__ = ["Content", "keyed_tokens", "namespace_of"]

ID_BITS = 31
WHOLE_DIGEST = 9  # placeholders that hold 256 bits


@dataclass(frozen=True, slots=True)
class Content:
    """What the placeholders [start, start + num_tokens) of a prompt stand for: the bytes of an image, of audio, ..."""

    start: int
    num_tokens: int
    data: bytes

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("num_tokens", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not isinstance(self.data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data must be bytes, got {type(self.data).__name__}")

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def namespace_of(salt: bytes = b"", lora: str = "", contents: Sequence[bytes] = ()) -> bytes:
    """A namespace for BlockManager: different for any two different (salt, lora, contents), b"" for none of them.

    salt: a tenant's secret. lora: the adapter's name. contents: digests, in order.
    """
    if not isinstance(salt, bytes):
        raise TypeError(f"salt must be bytes, got {type(salt).__name__}")
    if not isinstance(lora, str):
        raise TypeError(f"lora must be a str, got {type(lora).__name__}")
    contents = list(contents)
    if not all(isinstance(content, bytes) for content in contents):
        raise TypeError(f"contents must be digests as bytes, got {contents!r}")
    if not salt and not lora and not contents:
        return b""
    parts = [salt, lora.encode(), *contents]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def keyed_tokens(tokens: Tokens, contents: Sequence[Content], salt: bytes = b"", lora: str = "") -> tuple[Ids, bytes]:
    """The tokens and the namespace that a prompt with such contents is cached under; int32 [num_tokens].

    The placeholders of a content carry its digest. Fewer than nine cannot hold all of it, so the digest becomes part of
    the namespace, too: then nothing is shared with prompts that have other contents, not even what comes before.

    ValueError for contents that overlap, are out of order or lie outside of the tokens, and for negative tokens.
    """
    keyed, contents = as_tokens(tokens).copy(), list(contents)
    if not all(isinstance(content, Content) for content in contents):
        raise TypeError(f"contents must be of Content, got {', '.join(type(one).__name__ for one in contents)}")
    if len(keyed) and int(keyed.min()) < 0:
        raise ValueError(f"tokens must not be negative, got {int(keyed.min())}")
    end, short = 0, []
    for content in contents:
        if content.start < end or content.end > len(keyed):
            raise ValueError(
                f"contents must lie in order within [{end}, {len(keyed)}], got [{content.start}, {content.end}]"
            )
        end = content.end
        digest = hashlib.sha256(content.data).digest()
        keyed[content.start : content.end] = _placeholder_ids(digest, content.num_tokens)
        if content.num_tokens < WHOLE_DIGEST:
            short.append(digest)
    return keyed, namespace_of(salt, lora, short)


def _placeholder_ids(digest: bytes, num_tokens: int) -> Ids:
    """Negative ids: the digest's bits 31 by 31, again from the start behind the ninth."""
    number = int.from_bytes(digest, "little")
    pieces = [number >> (ID_BITS * i) & (2**ID_BITS - 1) for i in range(WHOLE_DIGEST)]
    ids = -1 - np.array(pieces, np.int64)
    return np.resize(ids, num_tokens).astype(np.int32)
