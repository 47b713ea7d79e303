"""Names of a cached block besides its tokens: a tenant, an adapter, a version of the weights, contents of placeholders.

    tokens    [ 17 | 5 | IMG IMG IMG IMG ... IMG | 8 ]      IMG: the same id for every image
    keyed     [ 17 | 5 | -a  -b  -c  -d  ... -x  | 8 ]      31 bits of the image's digest each: nine hold all of it

Keyed tokens are for BlockManager and PrefixTree, which compare them like any others. The model gets the real ones. The
digest is SHA-256 of the content, computed here. A caller who could choose the digest could read another image's blocks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpage.blocks.sequence_state import Ids
from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import check_at_least

__all__ = ["Content", "WeightsName", "keyed_tokens", "namespace_of"]

ID_BITS = 31
WHOLE_DIGEST = 9  # placeholders that hold 256 bits
OF_WEIGHTS = b"\xffkvpage weights\xff"
"""How the namespaces of named weights begin."""
LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class WeightsName:
    """The weights that compute K and V, as a part of the namespace of these: no two of them share a block.

    Attributes:
        version: The version of the model's weights; "" for those that it came with.
        adapter: The digest of an adapter that changes K and V; "" for none.
    """

    version: str = ""
    adapter: str = ""

    def within(self, namespace: bytes) -> bytes:
        """Return the namespace of K and V that these weights compute for a caller's namespace.

        It is the caller's own for weights without a name. Two different pairs never have the same one.

        Args:
            namespace: Of a caller: a tenant's salt, for example.
        """
        if not self.version and not self.adapter and not namespace.startswith(OF_WEIGHTS):
            return namespace
        parts = [self.version.encode(), self.adapter.encode()]
        return OF_WEIGHTS + b"".join(len(part).to_bytes(LENGTH_BYTES, "little") + part for part in parts) + namespace

    @classmethod
    def split(cls, namespace: bytes) -> "tuple[WeightsName, bytes]":
        """Return the weights, and the caller's namespace, of which `within` made one.

        Args:
            namespace: The whole one. One that `within` cannot have made belongs to weights without a name.
        """
        if not namespace.startswith(OF_WEIGHTS):
            return cls(), namespace
        parts, left = list[str](), namespace[len(OF_WEIGHTS) :]
        for _ in range(2):
            num_bytes = int.from_bytes(left[:LENGTH_BYTES], "little")
            part, left = left[LENGTH_BYTES : LENGTH_BYTES + num_bytes], left[LENGTH_BYTES + num_bytes :]
            parts.append(part.decode(errors="replace"))
        return cls(*parts), left


def past_version(namespace: bytes) -> bytes:
    """Return the first bytes after all namespaces of the same version of the weights; b"" where none can follow.

    Args:
        namespace: That `WeightsName.within` has made for weights with a name.
    """
    begin = len(OF_WEIGHTS)
    num_bytes = int.from_bytes(namespace[begin : begin + LENGTH_BYTES], "little")
    shared = namespace[: begin + LENGTH_BYTES + num_bytes].rstrip(b"\xff")
    return shared[:-1] + bytes([shared[-1] + 1]) if shared else b""


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of an image, of audio or the like, which some placeholders of a prompt represent.

    Attributes:
        start: Index of the first placeholder.
        num_tokens: Number of placeholders, at least 1.
        data: The content.

    Raises:
        ValueError: A number is out of range.
        TypeError: data is not bytes.
    """

    start: int
    num_tokens: int
    data: bytes

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("num_tokens", 1)):
            check_at_least(name, getattr(self, name), least)
        if not isinstance(self.data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data must be bytes, got {type(self.data).__name__}")

    @property
    def end(self) -> int:
        """Index after the last placeholder."""
        return self.start + self.num_tokens


def namespace_of(salt: bytes = b"", lora: str = "", contents: Sequence[bytes] = ()) -> bytes:
    """Return a namespace for BlockManager: another one for any other (salt, lora, contents), and b"" for none of them.

    Args:
        salt: A tenant's secret.
        lora: The adapter's name.
        contents: Digests, in order.

    Raises:
        TypeError: An argument is of another type.
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
    """Return the tokens and the namespace that a prompt with contents is cached under.

    The placeholders of a content carry its digest. Fewer than nine cannot hold all of it. Then the digest becomes part
    of the namespace, and the prompt shares nothing with prompts of other contents, not even the tokens before them.

    Args:
        tokens: The prompt, without negative ids.
        contents: The contents, in the order of their placeholders.
        salt: A tenant's secret.
        lora: The adapter's name.

    Returns:
        The keyed tokens, int32 [num_tokens], and the namespace.

    Raises:
        ValueError: Contents overlap, are out of order or exceed the tokens, or a token is negative.
        TypeError: An argument is of another type.
    """
    keyed, contents = as_tokens(tokens).copy(), list(contents)
    if not all(isinstance(content, Content) for content in contents):
        raise TypeError(f"contents must be of Content, got {', '.join(type(content).__name__ for content in contents)}")
    if len(keyed) and int(keyed.min()) < 0:
        raise ValueError(f"tokens must not be negative, got {int(keyed.min())}")
    end, short = 0, []
    for content in contents:
        if content.start < end or content.end > len(keyed):
            raise ValueError(
                f"contents must be in order within [{end}, {len(keyed)}], got [{content.start}, {content.end}]"
            )
        end = content.end
        digest = hashlib.sha256(content.data).digest()
        keyed[content.start : content.end] = _placeholder_ids(digest, content.num_tokens)
        if content.num_tokens < WHOLE_DIGEST:
            short.append(digest)
    return keyed, namespace_of(salt, lora, short)


def _placeholder_ids(digest: bytes, num_tokens: int) -> Ids:
    """Return negative ids: the digest's bits 31 by 31, from the start again after the ninth."""
    number = int.from_bytes(digest, "little")
    parts = [number >> (ID_BITS * i) & (2**ID_BITS - 1) for i in range(WHOLE_DIGEST)]
    ids = -1 - np.array(parts, np.int64)
    return np.resize(ids, num_tokens).astype(np.int32)
