"""Hashes of blocks that mean the same in every process. See BlockEvents for the formula."""

import hashlib
from itertools import accumulate

from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.checks.values import check_at_least, check_namespace


def block_hashes(tokens: Tokens, block_size: int, namespace: bytes = b"") -> list[int]:
    """Return the hash of each whole block of a prompt, as events name it.

    Args:
        tokens: Token ids from the first one on.
        block_size: Tokens of a block.
        namespace: The one that the prompt belongs to.

    Returns:
        A number of 64 bits for each block.

    Raises:
        ValueError, TypeError: An argument is wrong.
    """
    check_at_least("block_size", block_size, 1)
    check_namespace(namespace)
    wide = as_tokens(tokens).astype("<i8").tobytes()
    size = 8 * block_size
    blocks = [wide[end - size : end] for end in range(size, len(wide) + 1, size)]
    digests = accumulate(blocks, next_digest, initial=root_digest(block_size, namespace))
    return [shown(digest) for digest in digests][1:]


def root_digest(block_size: int, namespace: bytes) -> bytes:
    """Return the digest before a sequence's first block."""
    numbers = block_size.to_bytes(8, "little") + len(namespace).to_bytes(8, "little")
    return hashlib.sha256(numbers + namespace).digest()


def next_digest(digest: bytes, block: bytes) -> bytes:
    """Return the digest of a block. digest: of the block before it. block: its tokens as int64, little-endian."""
    return hashlib.sha256(digest + block).digest()


def shown(digest: bytes) -> int:
    """Return the number that is sent for a digest."""
    return int.from_bytes(digest[-8:], "big")
