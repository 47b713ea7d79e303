"""VllmPrompt: the keys under which vLLM's tier keeps a prompt's chunks, made without vLLM.

    hash 0 = h(seed)    hash n = h((hash n-1, tokens n, extras))        for each tokens_per_hash tokens
    key of a chunk = the hash of its last tokens | the number of its group of layers, 4 bytes

h is SHA-256 or xxh3-128, over pickle or canonical CBOR. Read in vLLM 0.32 and 0.33.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from kvpage.checks.tokens import Tokens, as_tokens
from kvpage.store.bytes.header import Value
from kvpage.store.doors.value_bytes import canonical_cbor, pickled
from kvpage.store.doors.weight_files import is_named
from kvpage.store.prompt_reach import DoorPart

PERSISTENT = bytes(16)
"""The prefix of keys that every process finds."""
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SEED = "vllm-none-hash"
"""That of SHA-256 where PYTHONHASHSEED is not set. The others have a random one then."""
MAX_GROUPS = 64


@dataclass(frozen=True, slots=True)
class VllmPrompt:
    """A prompt as vLLM asks for it. It checks itself.

    Attributes:
        tokens: of the prompt.
        hash_algo: vLLM's --prefix-caching-hash-algo.
        hash_seed: vLLM's PYTHONHASHSEED; None if it is not set.
        salt: the request's cache_salt.
        adapter: name and path of the request's LoRA.
        block_size: tokens of a block, where a hybrid model's groups have longer ones than its hashes; None for theirs.
        model: tells of these weights alone: their folder, or the name in the settings. None for all.

    Raises:
        ValueError: a field breaks a rule, such as no seed for a hash whose own is random.
        TypeError: the tokens are not tokens.
    """

    tokens: Tokens
    hash_algo: str = "sha256"
    hash_seed: str | None = None
    salt: str | None = None
    adapter: tuple[str, str] | None = None
    block_size: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", as_tokens(self.tokens).tolist())
        if not self.tokens:
            raise ValueError("tokens must be at least one, got none")
        if self.hash_algo not in ALGORITHMS:
            raise ValueError(f"hash_algo must be one of {', '.join(ALGORITHMS)}, got {self.hash_algo!r}")
        if self.hash_seed is None and self.hash_algo.startswith("xxhash"):
            raise ValueError(f"hash_seed must be vLLM's PYTHONHASHSEED for {self.hash_algo}, got None")
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size must be positive, got {self.block_size}")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)

    def is_mine(self, facts: Mapping[str, Value]) -> bool:
        """Return whether a header is of vLLM's tier, and of the model."""
        return str(facts.get("engine")).startswith("vllm ") and is_named(self.model, facts)

    def parts(self, facts: Mapping[str, Value], read: Callable[[bytes], bytes | None]) -> list[DoorPart]:
        """Return the chunks of each group of layers. Groups without any chunk there are not told of, but for the first.

        Args:
            facts: the header of the tier's records.
            read: not used.

        Raises:
            ValueError: a fact is not as the tier writes it.
        """
        per_hash, per_chunk = (_positive(facts, name) for name in ("tokens_per_hash", "blocks_per_chunk"))
        block_size = self.block_size or per_hash
        model = f"{facts['engine']!s}, weights {facts.get('weights')!s}"
        if block_size % per_hash:
            obstacle = f"nothing can be told: block_size must be a multiple of {per_hash}, got {block_size}"
            return [DoorPart(model, (), (), obstacle=obstacle)]
        step = block_size // per_hash * per_chunk
        hashes = self._hashes(per_hash)[step - 1 :: step]
        ends = [(number + 1) * step * per_hash for number in range(len(hashes))]
        name = f"{model} ({facts.get('cache_dtype')!s}, chunks of {step * per_hash})"
        return [
            DoorPart(f"{name}, group {group}", ends, _keys(hashes, group), not group) for group in range(MAX_GROUPS)
        ]

    def _hashes(self, per_hash: int) -> list[bytes]:
        """Return vLLM's hash of each `per_hash` tokens, and of all before them."""
        digest = _digest_of(self.hash_algo)
        before, hashes = digest(SEED if self.hash_seed is None else self.hash_seed), []
        for begin in range(0, len(self.tokens) - per_hash + 1, per_hash):
            extras: list[tuple[str, ...]] = [("lora", *self.adapter)] if self.adapter else []
            extras += [("cache_salt", self.salt)] if self.salt and not begin else []
            before = digest((before, tuple(self.tokens[begin : begin + per_hash]), tuple(extras) or None))
            hashes.append(before)
        return hashes


def _keys(hashes: list[bytes], group: int) -> list[bytes]:
    """Return the keys of a group's chunks in the tier."""
    return [PERSISTENT + last + group.to_bytes(4, "big") for last in hashes]


def _positive(facts: Mapping[str, Value], name: str) -> int:
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ValueError(f"{name} of a header must be positive, got {value!r}")
    return value


def _digest_of(algorithm: str) -> Callable[[Any], bytes]:
    """Return vLLM's hash of a value."""
    digest = xxhash.xxh3_128_digest if algorithm.startswith("xxhash") else lambda data: hashlib.sha256(data).digest()
    encode = canonical_cbor if algorithm.endswith("cbor") else pickled
    return lambda value: digest(encode(value))
