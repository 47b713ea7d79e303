"""The native core: addresses, sizes and stream handles in; no torch."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from kvpage.checks.errors import OutOfBlocks as OutOfBlocks

def build_info() -> dict[str, Any]: ...

# Tokens. Rows: address, strides of token and head in bytes. Blocks: address, strides of block, token, head and run in
# bytes, elements of a run, bytes of an element; of the scales address and three strides (0s: none). A part: blocks;
# rows; RowType, Codec, elements of a head; address and stride of the heads' scales (0s: none).
# tables: (address, row stride in elements, num_seqs, max_blocks, num_blocks, block_size).
_Rows = tuple[int, int, int]
_Numbers = tuple[int, ...]
_Tables = tuple[int, int, int, int, int, int]

def reshape_and_cache(
    parts: list[_Numbers],  # K, and V where there is one
    slot_mapping: int,
    num_tokens: int,
    num_heads: int,
    num_blocks: int,
    block_size: int,
    max_threads: int,
    /,
) -> None: ...
def gather_cache(
    parts: list[_Numbers],
    tables: _Tables,
    seq_starts: list[int],
    seq_lens: list[int],
    row_offsets: list[list[int]],  # of each part
    num_heads: int,
    max_threads: int,
    /,
) -> None: ...

# Address, strides of row and head in bytes; then of blocks the address of slots (0: rows), num_blocks, block_size, and
# the stride of blocks in bytes; row stride is then that of an offset.
_Place = tuple[int, int, int, int, int, int, int]

def mix_rows(
    rows: _Place,
    out: _Place,
    fresh: _Place,
    fresh_rows: tuple[int, int],  # address or 0, num_fresh
    row_type: int,
    shape: tuple[int, int, int],  # num_rows, num_heads, size
    turn: tuple[int, int, int],  # first, num_pairs, is_interleaved
    cos: int,
    sin: int,
    max_threads: int,
    /,
    kernel: str = "",
) -> None: ...
def row_deviation(
    fresh: _Place,
    retrieved: _Place,
    valid: int,
    out: int,
    row_type: int,
    shape: tuple[int, int, int],
    max_threads: int,
    /,
    kernel: str = "",
) -> None: ...
def store_chunk(
    parts: list[_Numbers],  # of each layer
    block_ids: int,
    num_block_ids: int,
    num_blocks: int,
    block_size: int,
    start: int,
    num_tokens: int,
    num_heads: int,
    max_threads: int,
    /,
) -> None: ...
def load_chunk(
    parts: list[_Numbers],
    block_ids: int,
    num_block_ids: int,
    num_blocks: int,
    block_size: int,
    start: int,
    num_tokens: int,
    num_heads: int,
    max_threads: int,
    /,
) -> None: ...
def xxh3_128_of_stretches(data: int, num_bytes: int, stretch_bytes: int, max_threads: int, /) -> bytes: ...
def copy_and_xxh3_128(data: int, to: int, num_bytes: int, streaming: bool, /) -> bytes: ...
def write_stretches(
    fd: int,
    offset: int,
    lead: memoryview,
    runs: npt.NDArray[np.int64],
    stretch_bytes: int,
    tail: memoryview,
    max_threads: int,
    /,
) -> bytes: ...

_ChunkPlace = tuple[int, int, int, int, bool]  # address and number of block ids, start, max_threads, streaming

@final
class ChunkPlan:
    def __init__(
        self,
        parts: list[_Numbers],  # of each layer; the rows' addresses count from the payload's beginning
        # num_layers, moves_per_part, num_tokens, num_heads, num_blocks, block_size, layer_bytes
        shape: tuple[int, int, int, int, int, int, int],
        /,
    ) -> None: ...
    def store(self, place: _ChunkPlace, first: int, payload: int, num_bytes: int, /) -> bytes: ...
    def runs(self, place: _ChunkPlace, /) -> npt.NDArray[np.int64]: ...
    def load(
        self, place: _ChunkPlace, first: int, payload: int, num_bytes: int, first_token: int, last_token: int, /
    ) -> bytes: ...

@final
class _Xxh3:
    def __init__(self, kernel: str, /) -> None: ...
    def update(self, data: bytes, /) -> None: ...
    def update_and_copy(self, data: int, num_bytes: int, to: int, streaming: bool, /) -> None: ...
    def digest(self) -> bytes: ...

def paged_attention(
    query: _Rows,
    out: _Rows,
    key_cache: _Numbers,
    value_cache: _Numbers,
    types: tuple[int, int, int],  # of query and out, of the cache: 0 fp32, 1 bf16, 2 fp16; Codec
    scales: tuple[int, int, int, int],  # address and stride of K's heads' scales, and of V's
    tables: _Tables,
    seq_lens: list[int],
    query_lens: list[int],
    positions: int,  # address, 0: none
    sizes: tuple[int, int, int, int, int],  # num_tokens, num_kv_heads, group_size, key_size, value_size
    window: int,
    scale: float,
    softcap: float,  # 0: none
    sinks: int,  # address, 0: none
    max_threads: int,
    /,
    kernel: str = "",  # one of attention_kernels(); "": the best
) -> None: ...
def _transpose(
    name: str, element_bytes: int, to: int, to_stride: int, source: int, source_stride: int, rows: int, columns: int, /
) -> None: ...
def _transpose_past_cache(
    name: str, element_bytes: int, to: int, to_stride: int, source: int, source_stride: int, rows: int, columns: int, /
) -> bool: ...
def _codecs() -> list[str]: ...
def _codec_row(
    name: str, encodes: bool, codec: int, type: int, row: int, size: int, scale: float, codes: int, streaming: bool, /
) -> float: ...
def _codec_row_by_table(
    name: str, encodes: bool, codec: int, type: int, row: int, size: int, scale: float, codes: int, streaming: bool, /
) -> bool: ...  # False: the instruction set or the scale has no table, nothing was written
def _codec_int8_rows(
    name: str, rows: int, row_stride: int, codes: int, code_stride: int, num_rows: int, size: int, scales: int, /
) -> None: ...
def attention_kernels() -> list[str]: ...

# --- blocks: moving them ---

Layer = tuple[int, Sequence[int]]  # address, strides in bytes

@final
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
        kernel_max_bytes: int,  # extents from and to pinned memory up to which the SM kernel copies; 0: never
        max_groups: int,  # of threads, that it may take for that
    ) -> None: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def run(self, pairs: int, num_pairs: int, stream: int, max_threads: int) -> None: ...
    def check(self, pairs: int, num_pairs: int) -> None: ...
    def executor(self, pairs: int, num_pairs: int) -> str: ...  # that run would take, as choose_executor's
    def extents(self, pairs: int, num_pairs: int, begin: int = 0, end: int = ...) -> list[tuple[int, int, int]]: ...

def _copy_kernel_on_host(
    copier: BlockCopier, pairs: int, num_pairs: int, vector_bytes: int = 0, max_threads: int = ..., capacity: int = ...
) -> None: ...
def choose_executor(
    *, src_device: int, dst_device: int, pinned: bool, extent_bytes: int, num_extents: int, kernel_max_bytes: int
) -> str: ...  # "host", "engine" or "kernel"; device -1 is the host
def _split_for_launches(
    num_pieces: int, num_pairs: int, capacity: int
) -> list[tuple[int, int, int, int]]: ...  # (first_piece, num_pieces, first_pair, num_pairs) of each launch
def cuda_error() -> str | None: ...
def cuda_machine() -> dict[str, Any] | None: ...

# Blocks. Integers: a contiguous one-dimensional int32 or int64 array, a buffer of such (array.array, memoryview), or a
# torch CPU tensor, all read in place; or a list. Every ValueError leaves all as it was.
_Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64] | Sequence[int] | Any

@final
class BlockPool:
    """The block ids of one tier: a reference count each, and a stack of the free ones.

    A fresh pool hands out ascending ids; what is released together is handed out in the same order again. A block that
    a PrefixTree has cached has one reference, the tree's; nobody else can share or release it. Safe to use from several
    threads.
    """

    def __init__(self, num_blocks: int) -> None:
        """ValueError unless 0 <= num_blocks < 2**31."""
    def allocate(self, n: int) -> npt.NDArray[np.int32]:
        """`n` blocks with one reference each, the caller's: int32 ids [n] in a new array.

        OutOfBlocks if fewer are free; ValueError if `n` is negative.
        """
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
    def num_free(self) -> int:
        """Blocks without a reference, which allocate can hand out."""
    @property
    def num_blocks(self) -> int:
        """Blocks of the tier; their ids are 0 to num_blocks - 1."""
    def check(self) -> None:
        """RuntimeError that names what is broken, if anything is: for tests. O(num_blocks)."""

@final
class Match:
    """A pinned path in a PrefixTree, from the start of a prompt to a block's end.

    It has to be given back by PrefixTree.release, or passed on as insert's `after`. One that is merely forgotten stays
    pinned as long as the tree lives. It keeps the tree alive.
    """

    @property
    def num_blocks(self) -> int:
        """Whole blocks of the path, in whichever tier."""
    @property
    def num_tokens(self) -> int:
        """num_blocks * block_size."""
    @property
    def num_device_blocks(self) -> int:
        """How many of the path's blocks are on the device: the first ones. ValueError if the match is released."""
    @property
    def priority(self) -> int:
        """The one that it was made with, 0 to 7."""
    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The device ids of the whole path: int32 [num_blocks], a new array. They are the tree's, and stay in the path
        until the match is released. ValueError if it is released, or not wholly on the device.
        """
    def block_ids_from(self, start_block: int) -> npt.NDArray[np.int32]:
        """The ids from that block of the path on, int32, without walking what comes before.

        ValueError if it is not between 0 and num_blocks, or if the match is released or not wholly on the device.
        """
    @property
    def is_released(self) -> bool:
        """Whether it was released or consumed by insert; num_blocks and num_tokens remain."""

@final
class PartMatch:
    """The first tokens of a block of another path, which a prompt shares beyond its whole cached blocks.

    What they have in common is copied; the block stays the tree's.
    """

    @property
    def match(self) -> Match:
        """Pins the other path; to be given to PrefixTree.release once the block is copied."""
    @property
    def num_tokens(self) -> int:
        """At least 1, fewer than a block's."""
    @property
    def block_id(self) -> int:
        """Of the device tier if is_on_device, otherwise of the host tier."""
    @property
    def is_on_device(self) -> bool:
        """Whether the block is on the device."""

@final
class TreeEntry:
    """A run of blocks that a PrefixTree has cached, as PrefixTree.entries found it: a copy, which keeps nothing.

    Where paths part, or a match ended, one entry ends and others go on from it.
    """

    @property
    def namespace(self) -> bytes:
        """The namespace that the entry is in."""
    @property
    def parent(self) -> int | None:
        """The index, in the list that entries() returned, of the entry that it goes on from; None: of none."""
    @property
    def start(self) -> int:
        """Tokens of the path before its own."""
    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Its own tokens, whole blocks of them, as a new array."""
    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Its device blocks, as a new array: of all its blocks, or of the first where the rest is on the host."""
    @property
    def host_block_ids(self) -> npt.NDArray[np.int32]:
        """Its host blocks, as a new array: an id for each of its blocks, or -1; empty without a host tier."""
    @property
    def num_pins(self) -> int:
        """Live matches that pass through it, or end at it."""
    @property
    def priority(self) -> int:
        """0 to 7; lower ones are evicted first."""
    @property
    def last_used(self) -> int | None:
        """When the last match of it was released, on a clock of the tree: larger is later. None while it is pinned.

        Of one priority the smallest is evicted first; of equal ones, which share a path, the one that ends it.
        """

@final
class PrefixTree:
    """Which tokens have their K and V in which blocks: a radix tree of whole blocks, compared token by token.

    The tree holds the only reference on every block that it caches. What no Match pins is evicted in order of last use,
    a prefix never before what continues it. Namespaces (bytes: a tenant's salt, a LoRA's name) share nothing. Safe to
    use from several threads. When the tree goes, its blocks become free.

    With a host pool there are two tiers: a block is on the device, on the host, or in both, and on every path those on
    the device come first. The tree moves no bytes. What has to be copied comes back as int64 [num_pairs, 2]; the caller
    does these copies in the order of the calls, before anything else is written.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, host_pool: BlockPool | None = None, *, _hash_mask: int = ...
    ) -> None:
        """ValueError unless block_size is positive and under 2**31, and if the two pools are one."""
    @property
    def has_host_tier(self) -> bool:
        """Whether there is a host pool."""
    @property
    def block_size(self) -> int:
        """Tokens of a block."""
    @property
    def num_cached(self) -> int:
        """Device blocks in the tree."""
    @property
    def num_evictable(self) -> int:
        """Device blocks that evict() would free, exactly."""
    @property
    def num_host_cached(self) -> int:
        """Host blocks in the tree."""
    @property
    def num_host_evictable(self) -> int:
        """Host blocks that evict_host() would free, exactly."""
    @property
    def num_nodes(self) -> int:
        """Edges: what a path's cost grows with. A conversation that grew block by block is one."""
    @property
    def num_matches(self) -> int:
        """Matches that are neither released nor consumed: what does not go back to 0 has been forgotten."""
    def match(self, tokens: _Integers, namespace: bytes = b"", priority: int = 0, num_left_over: int = 1) -> Match:
        """Pins the longest run of cached whole blocks, in whichever tier, that `tokens` begin with.

        priority: 0 to 7. The path's becomes at least that; lower ones are evicted first.
        num_left_over: as many of the tokens at least are left to compute. 1: a model needs one for the next token's
            logits. 0 finds tokens that are cached to their last one.

        The Match is the caller's to release. ValueError if a number is out of range, or if the first block that is not
        cached holds an id outside of 32 bits. Later tokens are not read (a list is converted as a whole, to 64 bits).
        """
    def match_part(self, match: Match, tokens: _Integers, num_left_over: int = 1) -> PartMatch | None:
        """The longest part of the block after `match` that a path below it shares with `tokens`, the whole prompt's.

        num_left_over: as for `match`. None if not even one token is shared. O(log of the paths that part there).
        ValueError if it is negative, or if `match` is released or another tree's.
        """
    def num_pinned_only_by(self, matches: Sequence[Match]) -> int:
        """How many device blocks no other match pins: what releasing these, each given once, would make evictable.

        ValueError if one is released or another tree's.
        """
    def pin(self, match: Match) -> Match:
        """A second Match of the same path. ValueError if `match` is released or another tree's."""
    def release(self, match: Match) -> None:
        """Unpins the path; blocks that nobody pins any more become the most recently used ones.

        ValueError if `match` is released already or another tree's.
        """
    def insert(
        self,
        tokens: _Integers,
        block_ids: _Integers,
        namespace: bytes = b"",
        after: Match | None = None,
        priority: int = 0,
    ) -> Match:
        """Caches `tokens`, block_size a block, and pins the path to their end.

        They start at the namespace's beginning, or go on where `after` ends; then `after` is consumed, its pins pass to
        the returned Match, and the cost is that of the new tokens. The caller's reference on every new block passes to
        the tree. Where the tokens are on the device already, the path has the tree's block, and the caller's is
        released; the tree's own id may be named there, too, and then nothing is. Where they are on the host only, the
        caller's block becomes their device block.

        ValueError if there are not exactly block_size tokens a block; if an id does not fit into 32 bits; if `after` is
        released, another tree's, not wholly on the device, or given with a namespace or a priority; if a new block is
        not the caller's alone (its count is not 1, it is cached elsewhere, or named twice); if a duplicate cannot be
        released.
        """
    def trim(self, match: Match) -> None:
        """Shortens the match to what of it is on the device; the rest becomes the most recently used.

        ValueError if it is released or another tree's.
        """
    def promote(self, match: Match, block_ids: _Integers) -> npt.NDArray[np.int64]:
        """Gives device blocks, the caller's own, to the first host-only blocks of the path: the (host, device) pairs.

        ValueError for more ids than such blocks, and for one that is not the caller's alone.
        """
    def write_out(self, match: Match, min_hits: int = 0) -> npt.NDArray[np.int64]:
        """Gives host blocks to the path's device blocks that have none, from its start on, as far as there is room or
        can be made: the (device, host) pairs. Only to blocks on edges that `min_hits` matches have found.
        """
    def evict(self, num_blocks: int) -> int:
        """Frees up to that many unpinned device blocks: of the lowest priority, least recently used, a path's last
        block first. What is not on the host as well is forgotten, with the host-only blocks behind it.

        Returns how many. ValueError if negative.
        """
    def demote(self, num_blocks: int) -> tuple[int, npt.NDArray[np.int64]]:
        """As evict, but what has no host block gets one, and host blocks are evicted for it: how many device blocks are
        free, and the (device, host) pairs to copy. What finds no room on the host is forgotten.
        """
    def evict_host(self, num_blocks: int) -> int:
        """Frees up to that many unpinned host blocks, in the order of evict. What is not on the device is forgotten."""
    def drop(self, tokens: _Integers, namespace: bytes = b"") -> int:
        """Forgets the blocks of `tokens`, from the last cached one up to the first that is pinned or that another path
        goes on from; how many tokens they held.
        """
    def clear(self) -> int:
        """Frees every unpinned block, in both tiers; returns how many on the device."""
    def entries(self, limit: int, namespace: bytes | None = None) -> list[TreeEntry]:
        """What is cached now, pinned or not, as a copy: at most `limit` entries, of all namespaces or of one.

        They come in the order of namespaces and tokens, each after the one that it goes on from. Nothing is pinned or
        counts as used by it. Other calls wait meanwhile, some 0.1 ms for a million tokens. ValueError if the limit is
        negative.
        """
    def check(self, owned_ids: _Integers | None = None, owned_host_ids: _Integers | None = None) -> None:
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

# Whole-sequence slots.

@final
class SlotAllocator:
    """Which slots of a cache with one slot a sequence are free, and how often each has been handed out.

    All calls take constant time: a bitmap of two levels for 4,096 slots, and one level more for 64 times as many. A
    slot's version is the number of times that `alloc` has given it out; while it is the same, nobody was given the slot
    to write something else. Safe to use from several threads.
    """

    def __init__(self, max_slots: int) -> None:
        """All slots are free, with version 0. ValueError unless 0 <= max_slots < 2**31."""
    def alloc(self) -> int:
        """The lowest free slot, with a new version; -1 if none is free."""
    def free(self, slot: int, /) -> None:
        """Its version stays, and so does what it holds, until it is handed out again.

        ValueError if it is out of range or free; OverflowError beyond 64 bits.
        """
    def occupy(self, slot: int) -> None:
        """Takes a free slot as it is, without a new version: to go on with what it holds.

        ValueError if it is out of range or taken.
        """
    def is_free(self, slot: int) -> bool:
        """Whether `alloc` may hand it out. ValueError if out of range."""
    def version(self, slot: int) -> int:
        """How often `alloc` has given it out. ValueError if out of range."""
    @property
    def free_count(self) -> int:
        """How many slots are free."""
    @property
    def max_slots(self) -> int:
        """How many slots there are."""

_SlotMatch = tuple[int, int, int] | tuple[int, None, None]  # prefix_len, slot, slot_ver

class SlotTree:
    """What kvpage.extras.slots.PrefixCacheManager documents. Safe to use from several threads."""

    def __init__(self, max_capacity: int) -> None: ...
    def insert(self, token_ids: _Integers, slot: int, slot_ver: int, /) -> int: ...
    def find(self, token_ids: _Integers, allocator: SlotAllocator | None, /) -> _SlotMatch: ...
    def pin(self, token_ids: _Integers, allocator: SlotAllocator | None, /) -> _SlotMatch: ...
    def release(self, token_ids: _Integers, /) -> None: ...
    def withdraw(self, slot: int, /) -> bool: ...
    @property
    def max_capacity(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_over(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_pins(self) -> int: ...
    def check(self) -> None: ...
