"""The native core: addresses, sizes and stream handles in; no torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpage.errors import OutOfBlocks as OutOfBlocks

def build_info() -> dict[str, Any]: ...

# Tokens. A view is an address and strides in bytes: rows (address, token, head), blocks (address, block, token, head).
# tables: (address, row stride in elements, num_seqs, max_blocks, num_blocks, block_size). num_bytes: of a head of K, V.
_Rows = tuple[int, int, int]
_Blocks = tuple[int, int, int, int]
_Tables = tuple[int, int, int, int, int, int]

def reshape_and_cache(
    key: _Rows,
    value: _Rows,
    key_cache: _Blocks,
    value_cache: _Blocks,
    num_bytes: tuple[int, int],
    slot_mapping: int,
    num_tokens: int,
    num_heads: int,
    num_blocks: int,
    block_size: int,
    max_threads: int,
    /,
) -> None: ...
def gather_cache(
    key_cache: _Blocks,
    value_cache: _Blocks,
    key: _Rows,
    value: _Rows,
    num_bytes: tuple[int, int],
    tables: _Tables,
    seq_starts: list[int],
    seq_lens: list[int],
    key_offsets: list[int],
    value_offsets: list[int],
    num_heads: int,
    max_threads: int,
    /,
) -> None: ...
def paged_attention(
    query: _Rows,
    out: _Rows,
    key_cache: _Blocks,
    value_cache: _Blocks,
    types: tuple[int, int],  # of query and out, of the cache: 0 fp32, 1 bf16, 2 fp16
    tables: _Tables,
    seq_lens: list[int],
    query_lens: list[int],
    sizes: tuple[int, int, int, int, int],  # num_tokens, num_kv_heads, group_size, key_size, value_size
    window: int,
    scale: float,
    softcap: float,  # 0: none
    sinks: int,  # address, 0: none
    max_threads: int,
    /,
    kernel: str = "",  # one of attention_kernels(); "": the best
) -> None: ...
def attention_kernels() -> list[str]: ...

# --- blocks: moving them ---

Layer = tuple[int, Sequence[int]]  # address, strides in bytes

class BlockCopier:
    def __init__(
        self,
        *,
        sizes: Sequence[int],
        block_dim: int,
        element_bytes: int,
        srcs: Sequence[Layer],
        dsts: Sequence[Layer],
        num_src_blocks: int,
        num_dst_blocks: int,
        src_device: int,
        dst_device: int,
        pinned: bool,
    ) -> None: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def run(self, pairs: int, num_pairs: int, stream: int, max_threads: int) -> None: ...
    def check(self, pairs: int, num_pairs: int) -> None: ...
    def extents(self, pairs: int, num_pairs: int, begin: int = 0, end: int = ...) -> list[tuple[int, int, int]]: ...

def _copy_kernel_on_host(
    copier: BlockCopier, pairs: int, num_pairs: int, vector_bytes: int = 0, max_threads: int = ...
) -> None: ...
def cuda_error() -> str | None: ...
def cuda_machine() -> dict[str, Any] | None: ...

# Blocks. Integers: a contiguous one-dimensional int32 or int64 array, a buffer of such (array.array, memoryview), or a
# torch CPU tensor, all read in place; or a list. Every ValueError leaves all as it was.
_Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64] | Sequence[int] | Any

class BlockPool:
    """The block ids of one tier: a reference count each, and a stack of the free ones.

    A fresh pool hands out ascending ids; what is released together is handed out in the same order again. A block that
    a PrefixTree has cached has one reference, the tree's; nobody else can share or release it. Safe to use from several
    threads.
    """

    def __init__(self, num_blocks: int) -> None:
        """ValueError unless 0 <= num_blocks < 2**31."""
    def allocate(self, n: int) -> npt.NDArray[np.int32]:
        """`n` blocks with one reference each. OutOfBlocks if fewer are free; ValueError if `n` is negative."""
    def allocate_one(self) -> int:
        """One block with one reference, faster than allocate(1). OutOfBlocks if none is free."""
    def share(self, ids: _Integers) -> None:
        """One more reference on each. ValueError for an id that is out of range, free, or cached by a tree."""
    def release(self, ids: _Integers) -> None:
        """One reference less, for every time that an id is named; a block without references becomes free.

        ValueError for an id that is out of range, free, named more often than it has references, or cached by a tree.
        """
    def release_one(self, block_id: int, /) -> None:
        """As release([block_id]), faster."""
    def ref_count(self, block_id: int) -> int:
        """References on the block: 0 if it is free, 1 if it is cached. ValueError if out of range."""
    @property
    def num_free(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def check(self) -> None:
        """RuntimeError that names what is broken, if anything is: for tests. O(num_blocks)."""

class Match:
    """A pinned path in a PrefixTree, from the start of a prompt to a block's end.

    It has to be given back by PrefixTree.release, or passed on as insert's `after`. One that is merely forgotten stays
    pinned as long as the tree lives. It keeps the tree alive.
    """

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """num_blocks * block_size."""
    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The ids of the whole path, as a new array. ValueError if the match is released."""
    def block_ids_from(self, start_block: int) -> npt.NDArray[np.int32]:
        """The ids from that block of the path on, without walking what comes before.

        ValueError if it is not between 0 and num_blocks, or if the match is released.
        """
    @property
    def is_released(self) -> bool:
        """Whether it was released or consumed by insert; num_blocks and num_tokens remain."""

class PrefixTree:
    """Which tokens have their K and V in which blocks: a radix tree of whole blocks, compared token by token.

    The tree holds the only reference on every block that it caches. What no Match pins is evicted in order of last use,
    a prefix never before what continues it. Namespaces (bytes: a tenant's salt, a LoRA's name) share nothing. Safe to
    use from several threads. When the tree goes, its blocks become free.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, _hash_mask: int = ...) -> None:
        """ValueError unless block_size is positive."""
    @property
    def block_size(self) -> int: ...
    @property
    def num_cached(self) -> int:
        """Blocks in the tree."""
    @property
    def num_evictable(self) -> int:
        """Blocks that evict() would free, exactly."""
    @property
    def num_nodes(self) -> int:
        """Edges: what a path's cost grows with. A conversation that grew block by block is one."""
    @property
    def num_matches(self) -> int:
        """Matches that are neither released nor consumed: what does not go back to 0 has been forgotten."""
    def match(self, tokens: _Integers, namespace: bytes = b"") -> Match:
        """Pins the longest run of cached whole blocks that leaves at least one token to compute.

        ValueError if the first block that is not cached holds an id outside of 32 bits. Later tokens are not read
        (a list is converted as a whole, to 64 bits).
        """
    def pin(self, match: Match) -> Match:
        """A second Match of the same path. ValueError if `match` is released or another tree's."""
    def release(self, match: Match) -> None:
        """Unpins the path; blocks that nobody pins any more become the most recently used ones.

        ValueError if `match` is released already or another tree's.
        """
    def insert(
        self, tokens: _Integers, block_ids: _Integers, namespace: bytes = b"", after: Match | None = None
    ) -> Match:
        """Caches `tokens`, block_size a block, and pins the path to their end.

        They start at the namespace's beginning, or go on where `after` ends; then `after` is consumed, its pins pass to
        the returned Match, and the cost is that of the new tokens. The caller's reference on every new block passes to
        the tree. Where the tokens are cached already, the path has the tree's block, and the caller's is released; the
        tree's own id may be named there, too, and then nothing is.

        ValueError if there are not exactly block_size tokens a block; if an id does not fit into 32 bits; if `after` is
        released, another tree's, or given together with a namespace; if a new block is not the caller's alone (its
        count is not 1, it is cached elsewhere, or named twice); if a duplicate cannot be released.
        """
    def evict(self, num_blocks: int) -> int:
        """Frees up to that many unpinned blocks, the least recently used first and a path's last block first.

        Returns how many. ValueError if negative.
        """
    def clear(self) -> int:
        """Frees every unpinned block; returns how many."""
    def check(self, owned_ids: _Integers | None = None) -> None:
        """RuntimeError that names the broken invariant, if one is: for tests. O(tree).

        `owned_ids`: the references held outside of the tree, an id once for each. Then also every count must agree with
        them, and free, cached and owned blocks must make up the pool.
        """

    # What happens to cached blocks, for TreeWatch: (is_restart, now, changes, tokens, namespaces), see there.
    def log_changes(self, max_bytes: int) -> None:
        """Keeps a log from now on, of at most so many bytes; 0 ends it. ValueError if negative."""
    def take_changes(
        self,
    ) -> tuple[bool, int, npt.NDArray[np.int64], npt.NDArray[np.int32], list[bytes]]:
        """What has happened since the last call, or, at first and where that was lost, all that is cached.

        ValueError if no log is kept.
        """
    def lose_changes(self) -> None:
        """Makes the next answer of take_changes all that is cached."""
