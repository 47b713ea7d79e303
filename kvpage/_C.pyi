"""The native core: it takes addresses, sizes and stream handles, and knows nothing of torch."""

from collections.abc import Hashable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from kvpage.checks.errors import OutOfBlocks as OutOfBlocks

def build_info() -> dict[str, Any]:
    """Return the build's facts.

    Returns:
        "version", "sources" (a digest), "compiler", "cuda" (a version, or None) and "cuda_archs" (or None).
    """

# Tokens: addresses and strides of what the caller owns. A call raises ValueError for a number or an id that is out of
# range, and writes nothing then. row_type: 0 fp32, 1 bf16, 2 fp16. kernel: of an instruction set; "" takes the best.

_Rows = tuple[int, int, int]  # address, strides of token and head in bytes
_Tables = tuple[int, int, int, int, int, int]
# address, row stride in elements, num_seqs, max_blocks, num_blocks, block_size

@final
class KVPart:
    """K's or V's blocks of one layer, as the operations on tokens reach them. It owns no memory of theirs."""
    def __init__(
        self,
        data: int,
        strides: Sequence[int],
        run_size: int,
        element_bytes: int,
        scales: int = 0,
        scale_strides: Sequence[int] = (0, 0, 0),
    ) -> None:
        """Tell where the blocks lie: nothing is read.

        Args:
            data: Address of the first element.
            strides: Of block, token, head, run and element, in elements.
            run_size: Elements of a run, which lie side by side.
            element_bytes: Bytes of an element.
            scales: Address of fp32 scales, one a token and head; 0 for none.
            scale_strides: Of block, token and head, in scales.
        """

# K or V of tokens, with the rows to go there or come from there: blocks; rows; RowType, CodeType, elements of a head;
# address and stride of the heads' scales (0s: none).
_TokenPart = tuple[KVPart, int, int, int, int, int, int, int, int]

def reshape_and_cache(
    parts: list[_TokenPart],  # K, and V where there is one
    slot_mapping: int,  # address of int64 [num_tokens]; -1 skips a row
    num_tokens: int,
    num_heads: int,
    num_blocks: int,
    block_size: int,
    max_threads: int,
    /,
) -> None:
    """Write rows of K and V to slots of one layer's blocks: see kvpage.ops.reshape_and_cache."""

def gather_cache(
    parts: list[_TokenPart],
    tables: _Tables,
    seq_starts: list[int],
    seq_lens: list[int],
    row_offsets: list[list[int]],  # bytes from each part's rows to the first row of each sequence
    num_heads: int,
    max_threads: int,
    /,
) -> None:
    """Copy tokens of sequences from one layer's blocks to rows: see kvpage.ops.gather_cache."""

# Address, strides of row and head in bytes; then of blocks the address of slots (0: rows), num_blocks, block_size, and
# the stride of blocks in bytes; row stride is then that of an offset.
_Place = tuple[int, int, int, int, int, int, int]

def mix_rows(
    rows: _Place,
    out: _Place,
    fresh: _Place,
    fresh_rows: tuple[int, int],  # address of int64 [num_rows], or 0; num_fresh
    row_type: int,
    shape: tuple[int, int, int],  # num_rows, num_heads, size
    rotated: tuple[int, int, int],  # first, num_pairs, is_interleaved
    cos: int,  # address of fp32 [num_rows, num_pairs]
    sin: int,
    max_threads: int,
    /,
    kernel: str = "",
) -> None:
    """Write rotated, copied or fresh rows: see kvpage.ops.mix_rows."""

def row_deviation(
    fresh: _Place,
    retrieved: _Place,
    valid: int,  # address of bool [num_rows]
    out: int,  # address of fp32 [num_rows], zeroed
    row_type: int,
    shape: tuple[int, int, int],  # num_rows, num_heads, size
    max_threads: int,
    /,
    kernel: str = "",
) -> None:
    """Compute the mean squared difference of each row: see kvpage.ops.row_deviation."""

_Matrix = tuple[int, int]  # address, row stride in bytes

def linear(
    x: _Matrix,
    weight: _Matrix,
    up: _Matrix,  # the second weight, read with an activation alone
    bias: int,  # address, 0: none
    out: _Matrix,
    sizes: tuple[int, int, int],  # num_rows, num_columns, size
    row_type: int,
    activation: int,  # 0 none, 1 SiLU, 2 GELU by tanh
    max_threads: int,
    /,
    kernel: str = "",
) -> None:
    """Compute rows times a weight: see kvpage.ops.linear and kvpage.ops.gated_linear."""

def grouped_linear(
    x: _Matrix,
    order: tuple[int, int],  # addresses: int64 the row of x for each row of out, int64 where each group's rows end
    weight: tuple[int, int, int],  # address, strides of group and row in bytes
    up: tuple[int, int, int],  # the second weight, read with an activation alone
    bias: int,  # address of [num_groups, num_columns], 0: none
    out: _Matrix,
    sizes: tuple[int, int, int, int],  # rows of x, num_groups, num_columns, size
    row_type: int,
    activation: int,  # 0 none, 1 SiLU, 2 GELU by tanh
    is_turned: bool,  # weights are [size, num_columns]
    max_threads: int,
    /,
    kernel: str = "",
) -> None:
    """Compute rows in groups times the weight of each group: see kvpage.ops.cpu.experts."""

def turned_kernels() -> list[str]:
    """Return the kernels for products with turned weights that this machine runs, the best first."""

def rms_norm(
    x: _Matrix,
    residual: _Matrix,  # zeros: none
    total: _Matrix,  # x + residual
    out: _Matrix,
    weight: int,  # address
    sizes: tuple[int, int],  # num_rows, size
    row_type: int,
    eps: float,
    offset: float,  # added to the weight
    order: int,  # 0: rounds before the product with the weight, 1: after it
    max_threads: int,
    /,
    kernel: str = "",
) -> None:
    """Compute the root mean square norm of rows: see kvpage.ops.rms_norm and kvpage.ops.add_rms_norm."""

def linear_kernels() -> list[str]:
    """Return the kernels for products that this machine runs, the best first, and models of two for tests."""

def product_tiles() -> tuple[str, str]:
    """Return the name of the bits of products by tiles, and why no tiles are taken: one of them is empty."""

def norm_kernels() -> list[str]:
    """Return the kernels for norms that this machine runs, the best first."""

def has_fast_linear(row_type: int, /) -> bool:
    """Return whether `linear` is to compute this type on this machine: see kvpage.ops.has_fast_linear."""

def recurrence(
    addresses: tuple[int, int, int, int, int, int, int],  # query, key, value, decay, rates, factor, out; 0: none
    state: tuple[int, int, int, int, int],  # address; strides of sequence, head, key and column in elements
    sizes: tuple[int, int, int, int, int, int],  # num_sequences, num_tokens, num_key_heads, num_heads, keys, columns
    decay: int,  # 0 of a head, 1 of a key, 2 of an element
    max_threads: int,
    /,
    kernel: str = "",
) -> None:
    """Pass tokens through linear recurrences, one by one: see kvpage.ops.cpu.recurrence."""

def recurrence_kernels() -> list[str]:
    """Return the kernels for recurrences that this machine runs, the best first."""

def exponent_kernels() -> list[str]:
    """Return the kernels for floats with their exponents apart that this machine runs, the best first."""

def most_payload_bytes(kind: int, raw_bytes: int) -> int:
    """Return the bytes that encode_exponents needs room for. kind: FloatKind of csrc/codec/exponent_kernel.h."""

def encode_exponents(kind: int, raw: int, raw_bytes: int, out: Any, kernel: str = "") -> int:
    """Write floats with their exponents apart into `out`, and return their bytes. raw: address of raw_bytes bytes."""

def decode_exponents(kind: int, payload: int, num_bytes: int, out: Any, kernel: str = "") -> None:
    """Fill `out` with the floats of a payload at an address. ValueError for a payload that no encoding writes."""

def store_chunk(
    parts: list[_TokenPart],  # of each layer
    block_ids: int,  # address of int32 [num_block_ids]
    num_block_ids: int,
    num_blocks: int,
    block_size: int,
    start: int,
    num_tokens: int,
    num_heads: int,
    max_threads: int,
    /,
) -> None:
    """Copy tokens from the blocks of all layers to a chunk: see kvpage.ops.store_chunk."""

def load_chunk(
    parts: list[_TokenPart],
    block_ids: int,  # address of int32 [num_block_ids]
    num_block_ids: int,
    num_blocks: int,
    block_size: int,
    start: int,
    num_tokens: int,
    num_heads: int,
    max_threads: int,
    /,
) -> None:
    """Copy a chunk to tokens of the blocks of all layers: see kvpage.ops.load_chunk."""

def xxh3_128_of_stretches(data: int, num_bytes: int, stretch_bytes: int, max_threads: int, /) -> bytes:
    """Return the xxh3-128 digests of stretches of memory: see kvpage.store.tiers.stretches."""

def copy_and_xxh3_128(data: int, to: int, num_bytes: int, streaming: bool, /) -> bytes:
    """Copy bytes, and return their xxh3-128 digest: see kvpage.store.tiers.stretches."""

def write_stretches(
    fd: int,
    offset: int,
    lead: memoryview,
    runs: npt.NDArray[np.int64],  # [num_runs, 2]: address and bytes, here and below; address 0: hashed alone
    stretch_bytes: int,
    tail: memoryview,
    max_threads: int,
    /,
) -> bytes:
    """Write runs of memory to a file, and hash each stretch: see kvpage.store.tiers.stretches."""

def read_stretches(
    fd: int,
    offset: int,
    runs: npt.NDArray[np.int64],
    stretch_bytes: int,
    room: memoryview,
    max_threads: int,
    /,
) -> bytes:
    """Read a file into runs of memory, and hash each stretch: see kvpage.store.tiers.stretches."""

def gather_stretches(
    runs: npt.NDArray[np.int64],
    payload: int,
    num_bytes: int,
    stretch_bytes: int,
    max_threads: int,
    streaming: bool,
    /,
) -> bytes:
    """Copy runs of memory to one, and hash each stretch: see kvpage.store.tiers.stretches."""

def scatter_stretches(
    payload: int,
    num_bytes: int,
    runs: npt.NDArray[np.int64],
    stretch_bytes: int,
    max_threads: int,
    streaming: bool,
    /,
) -> bytes:
    """Copy memory to runs, and hash each stretch: see kvpage.store.tiers.stretches."""

def prefault(data: int, num_bytes: int, max_threads: int, /) -> None:
    """Have the operating system give memory its pages. The bytes stay as they are.

    Args:
        data: Address of the memory, which no thread may write meanwhile.

    Raises:
        OSError: The system has no more memory.
        ValueError: `num_bytes` is negative.
    """

_ChunkPlace = tuple[int, int, int, int, bool]  # address and number of block ids, start, max_threads, streaming

@final
class ChunkPlan:
    """Moves bytes between the blocks of a sequence and the payload of a record, and hashes them on the way.

    A layer is a stretch of the payload, or several, each with a digest of its own. So layers can be moved in any order,
    and by threads.
    A plan serves all chunks of as many tokens. It reads each byte once, moves bytes as they are, and owns no memory of
    theirs.
    """
    def __init__(
        self,
        parts: list[_TokenPart],  # of each layer; the rows' addresses count from the payload's beginning
        # num_layers, moves_per_part, num_tokens, num_heads, num_blocks, block_size, layer_bytes, stretch_bytes
        shape: tuple[int, int, int, int, int, int, int, int],
        /,
    ) -> None:
        """Make a plan.

        Args:
            parts: The moves of all layers, equally many a layer. The rows' addresses count from the payload's
                beginning.
            shape: (num_layers, moves_per_part, num_tokens, num_heads, num_blocks, block_size, layer_bytes,
                stretch_bytes). A layer is whole stretches.

        Raises:
            ValueError: Sizes are not positive or do not fit each other, or a move changes bits.
        """
    def store(self, place: _ChunkPlace, first: int, payload: int, num_bytes: int, /) -> bytes:
        """Copy whole layers from blocks to the payload.

        Args:
            place: The chunk's tokens in the sequence.
            first: First layer.
            payload: Address of that layer in the payload.
            num_bytes: Bytes of the layers.

        Returns:
            The xxh3-128 digests of the layers' stretches, 16 bytes each.

        Raises:
            ValueError: A needed id, a layer or a number is out of range, or layers are not whole. Nothing is written
                then.
        """
    def runs(self, place: _ChunkPlace, /) -> npt.NDArray[np.int64]:
        """Return the payload as runs of the cache's memory, in the payload's order: one for each block's tokens in
        each part.

        Args:
            place: The chunk's tokens in the sequence.

        Returns:
            int64 [num_runs, 2]: address and bytes. Without rows where the tokens are in smaller runs.

        Raises:
            ValueError: A needed id or a number is out of range.
        """
    def load(
        self, place: _ChunkPlace, first: int, payload: int, num_bytes: int, first_token: int, last_token: int, /
    ) -> bytes:
        """Copy tokens of whole layers from the payload to blocks. The caller compares the digests afterwards.

        Args:
            place: The chunk's tokens in the sequence, wanted or not. Only wanted tokens need blocks.
            first: First layer.
            payload: Address of that layer in the payload.
            num_bytes: Bytes of the layers.
            first_token: First wanted token, counted from the chunk's beginning.
            last_token: The token after the last wanted one.

        Returns:
            The digests of the whole layers' stretches, 16 bytes each.

        Raises:
            ValueError: As in `store`.
        """

@final
class _Xxh3:
    def __init__(self, kernel: str, /) -> None: ...
    def update(self, data: bytes, /) -> None: ...
    def update_and_copy(self, data: int, num_bytes: int, to: int, streaming: bool, /) -> None: ...
    def digest(self) -> bytes: ...

def paged_attention(
    query: _Rows,
    out: _Rows,
    key_cache: KVPart,
    value_cache: KVPart,
    types: tuple[int, int, int],  # row_type of query and out, of the cache; Codec
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
) -> None:
    """Attend over the blocks of one layer: see kvpage.ops.paged_attention."""

def share_prefixes(
    tables: _Tables,
    lengths: int,  # address of int64 [num_seqs]
    rules: tuple[int, int, int],  # granule, least_saved, max_groups
    plan: int,  # address of int64 [9, num_rows]
    num_rows: int,
    /,
) -> int:
    """Plan which keys of several sequences are read once, and return the number of groups: see ops.shared_prefixes."""

def _transpose(
    name: str, element_bytes: int, to: int, to_stride: int, source: int, source_stride: int, rows: int, columns: int, /
) -> None: ...
def _transpose_past_cache(
    name: str, element_bytes: int, to: int, to_stride: int, source: int, source_stride: int, rows: int, columns: int, /
) -> bool: ...
def _multiply_adds(num_rounds: int, /) -> int: ...
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
def attention_kernels() -> list[str]:
    """Return the names of the attention kernels that this machine runs, the best first."""

# --- sampling ---

@final
class TokenRules:
    """The rules of one sequence that name tokens, and the tokens that the sequence has. One call at a time uses it.

    An id outside of the vocabulary is passed over.
    """

    def __init__(
        self,
        *,
        biased_ids: Sequence[int] | npt.NDArray[np.int64],
        biases: Sequence[float] | npt.NDArray[np.float32],
        stop_ids: Sequence[int] | npt.NDArray[np.int64],
        shortest: int,
        suppressed_ids: Sequence[int] | npt.NDArray[np.int64],
        first_ids: Sequence[int] | npt.NDArray[np.int64],
        first_at: int,
        penalties: tuple[float, float, float],
        num_prompt_tokens: int,
    ) -> None:
        """Make the rules of a sequence that has only its prompt.

        Args:
            biased_ids: Tokens whose logits are raised.
            biases: One for each of them.
            stop_ids: Tokens that cannot come before the sequence has `shortest` tokens.
            shortest: Number of tokens of prompt and answer.
            suppressed_ids: Tokens that cannot come.
            first_ids: Tokens that cannot come where the sequence has exactly `first_at` tokens.
            first_at: Number of tokens of prompt and answer.
            penalties: Those of repetition, presence and frequency. (1, 0, 0) change nothing.
            num_prompt_tokens: Tokens of the prompt, which the last two penalties leave alone.

        Raises:
            ValueError: Not one bias for each id, or num_prompt_tokens is negative.
        """

    def allow(self, mask: npt.NDArray[np.uint32]) -> None:
        """Let only some tokens come from now on.

        Args:
            mask: Contiguous words; token i may come if bit i % 32 of mask[i // 32] is set. Tokens after them may not.

        Raises:
            ValueError: A call uses the rules.
            TypeError: The mask is of another type.
        """

    @property
    def needs_tokens(self) -> bool:
        """Whether a penalty applies, so that the tokens of the sequence are needed."""

ROW_RULES: np.dtype[np.void]  # of the `rows` of sample_rows; see kvpage.layout.sampling_record

def sample_rows(
    logits: tuple[int, int, int, int, int],  # address, row stride in bytes, row_type, num_rows, vocab_size
    rows: npt.NDArray[np.void],  # contiguous ROW_RULES
    rules: Sequence[TokenRules | None],
    tokens: Sequence[npt.NDArray[np.int32] | None],
    out: npt.NDArray[np.int32],
    max_threads: int,
    /,
    kernel: str = "",
) -> None:
    """Choose a token for each row of logits: see kvpage.serving.sampling.native_rows."""

def sampling_kernels() -> list[str]:
    """Return the names of the sampling kernels that this machine runs, the best first."""

# --- blocks: moving them ---

Layer = tuple[int, Sequence[int]]  # address, strides in bytes

@final
class BlockCopier:
    """Moves blocks between two caches of one shape: see kvpage.ops.BlockCopier. It owns no memory of theirs.

    pairs: address of int64 [num_pairs, 2], (source, destination). stream: a handle; 0 for the default one and the host.
    """
    def __init__(
        self,
        *,
        sizes: Sequence[int],  # of a cache with one block
        block_dim: int,  # of the sizes, counts blocks
        element_bytes: int,
        srcs: Sequence[Layer],
        dsts: Sequence[Layer],
        num_src_blocks: int,
        num_dst_blocks: int,
        src_device: int,  # index of a CUDA device; -1: the host
        dst_device: int,
        pinned: bool,
        kernel_max_bytes: int,  # extents from and to pinned memory up to which the SM kernel copies; 0: never
        max_groups: int,  # of threads, that it may take for that
        shapes: Sequence[tuple[Sequence[int], int]] = (),  # sizes and block_dim of each layer, where layers are unlike
    ) -> None:
        """Make a copier."""
    @property
    def num_fragments(self) -> int:
        """Number of runs of memory that make up a block in all layers."""
    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
    def run(self, pairs: int, num_pairs: int, stream: int, max_threads: int) -> None:
        """Copy pairs of blocks. On the host it waits for the copy; on a device it enqueues the copy. Threads may share
        a copier."""
    def check(self, pairs: int, num_pairs: int) -> None:
        """Check pairs as `run` does, and copy nothing."""
    def executor(self, pairs: int, num_pairs: int) -> str:
        """Return the executor that `run` would take, as choose_executor names it."""
    def extents(self, pairs: int, num_pairs: int, begin: int = 0, end: int = ...) -> list[tuple[int, int, int]]:
        """Return the extents of the bytes [begin, end) of a copy, for tests."""

def _copy_kernel_on_host(
    copier: BlockCopier, pairs: int, num_pairs: int, vector_bytes: int = 0, max_threads: int = ..., capacity: int = ...
) -> None: ...
def choose_executor(
    *, src_device: int, dst_device: int, pinned: bool, extent_bytes: int, num_extents: int, kernel_max_bytes: int
) -> str:
    """Return the executor for copies between two places: "host", "engine" or "kernel".

    Args:
        src_device: Index of the sources' CUDA device; -1 is the host.
        dst_device: Index of the destinations' CUDA device; -1 is the host.
        pinned: Whether the host side is pinned.
        extent_bytes: Bytes of an extent, on average.
        num_extents: Number of extents.
        kernel_max_bytes: As for BlockCopier.
    """

def _split_for_launches(
    num_fragments: int, num_pairs: int, capacity: int
) -> list[tuple[int, int, int, int]]: ...  # (first_fragment, num_fragments, first_pair, num_pairs) of each launch
def cuda_error() -> str | None:
    """Return the reason why the native part cannot use CUDA here; None if it can."""

def cuda_machine() -> dict[str, Any] | None:
    """Return the driver and the devices; None in a build without CUDA.

    Returns:
        "driver_version", "devices" (name, compute_capability and num_copy_engines of each) and "batched_copy".
    """

# Blocks. Integers: a contiguous one-dimensional int32 or int64 array, a buffer of such (array.array, memoryview), or a
# torch CPU tensor, all read in place; or a list. Every ValueError leaves all as it was.
_Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64] | Sequence[int] | Any

@final
class BlockPool:
    """The block ids of one tier: a reference count for each, and a stack of the free ones.

    A fresh pool hands out ascending ids. Blocks that are released together are handed out in the same order again.
    A block that a PrefixTree has cached has one reference, which belongs to the tree. No other caller can share or
    release it. Safe to use from several threads.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make a pool whose blocks are all free.

        Args:
            num_blocks: Blocks of the tier.

        Raises:
            ValueError: Unless 0 <= num_blocks < 2**31.
        """
    def allocate(self, n: int) -> npt.NDArray[np.int32]:
        """Take `n` free blocks, with one reference each.

        Args:
            n: How many blocks to take.

        Returns:
            The ids, int32 [n], in a new array. The references belong to the caller.

        Raises:
            OutOfBlocks: Fewer than `n` blocks are free.
            ValueError: `n` is negative.
        """
    def allocate_one(self) -> int:
        """Take one free block, with one reference. It is faster than allocate(1).

        Returns:
            The block's id.

        Raises:
            OutOfBlocks: No block is free.
        """
    def share(self, ids: _Integers) -> None:
        """Add one reference to each block.

        Args:
            ids: Block ids.

        Raises:
            ValueError: An id is out of range, free, or cached by a tree.
        """
    def release(self, ids: _Integers) -> None:
        """Take one reference from a block for each time that its id is named. A block without references becomes free.

        Args:
            ids: Block ids.

        Raises:
            ValueError: An id is out of range, free, cached by a tree, or named more often than it has references.
        """
    def release_one(self, block_id: int, /) -> None:
        """Do the same as release([block_id]), faster.

        Raises:
            ValueError: As in `release`.
        """
    def ref_count(self, block_id: int) -> int:
        """Return the block's number of references: 0 if it is free, 1 if it is cached.

        Raises:
            ValueError: The id is out of range.
        """
    @property
    def num_free(self) -> int:
        """Number of blocks without a reference, which `allocate` can hand out."""
    @property
    def num_blocks(self) -> int:
        """Number of blocks of the tier. Their ids are 0 to num_blocks - 1."""
    def check(self) -> None:
        """Check the pool's invariants, for tests. It takes time in proportion to the blocks.

        Raises:
            RuntimeError: An invariant is broken; the message names it.
        """

# Eviction: the policies, and the order of the records of a store's tier.

def eviction_policies() -> tuple[str, ...]:
    """Return the names of all policies of eviction, which trees and tiers of a store take. The first is the default."""

@final
class RecordWalk:
    """A walk over the records of a RecordOrder, the first to go first. RecordOrder.walk begins one."""
    def take(self, count: int) -> list[int]:
        """Return the next places.

        Args:
            count: How many; there are fewer at the end.

        Raises:
            ValueError: `count` is negative, or the order has changed since the walk began.
        """

@final
class RecordOrder:
    """Which record of a tier goes next, by a policy. Records are places: small numbers, used again once they are free.

    Not safe to use from several threads at once.
    """
    def __init__(self, policy: str) -> None:
        """Make an empty order.

        Args:
            policy: One of eviction_policies().

        Raises:
            ValueError: It is none of them.
        """
    def add(self, age: float = 0.0, /) -> int:
        """Add a record, and return its place. O(1) but for `cost`, as far as the record is the newest.

        Args:
            age: Seconds since its last use, below 1e9, for a policy that heeds time. For others it is the newest.

        Raises:
            ValueError: `age` is out of range.
        """
    def use(self, place: int, /) -> None:
        """Note that a record was read. O(1) but for `lfu`, which takes O(log n).

        Args:
            place: The record's.

        Raises:
            ValueError: No record has this place.
        """
    def remove(self, place: int, is_evicted: bool = False, /) -> None:
        """Take a record out; its place is free.

        Args:
            place: The record's.
            is_evicted: Whether it went to make room, which `cost` learns from.

        Raises:
            ValueError: No record has this place.
        """
    def walk(self) -> RecordWalk:
        """Begin a walk over all records, the first to go first, as of now."""
    def set_time(self, seconds: float) -> None:
        """Let the order's clock stand still, for simulations, until the next call.

        Args:
            seconds: What it shows, below 1e9.

        Raises:
            ValueError: `seconds` is out of range.
        """
    def check(self) -> None:
        """Raise RuntimeError that names a broken invariant."""
    def __len__(self) -> int:
        """Return the number of records."""
    @property
    def policy(self) -> str:
        """The policy's name."""

@final
class Match:
    """A pinned path in a PrefixTree, from the start of a prompt to the end of a block.

    Give it back by PrefixTree.release, or pass it on as `after` of insert. A match that is merely dropped stays
    pinned as long as the tree lives. It keeps the tree alive.
    """

    @property
    def num_blocks(self) -> int:
        """Number of whole blocks in the path, in either tier."""
    @property
    def num_tokens(self) -> int:
        """Number of tokens in the path: num_blocks * block_size."""
    @property
    def num_device_blocks(self) -> int:
        """Number of the path's blocks that are on the device: the first ones.

        Raises:
            ValueError: The match is released.
        """
    @property
    def priority(self) -> int:
        """The priority that the match was made with, 0 to 7."""
    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Device ids of the whole path, int32 [num_blocks], in a new array.

        The blocks belong to the tree, and stay in the path until the match is released.

        Raises:
            ValueError: The match is released, or not wholly on the device.
        """
    def block_ids_from(self, start_block: int) -> npt.NDArray[np.int32]:
        """Return the device ids from one block of the path on, without a walk over the blocks before it.

        Args:
            start_block: Index of the first block in the path, 0 to num_blocks.

        Returns:
            The ids, int32 [num_blocks - start_block].

        Raises:
            ValueError: `start_block` is out of range, or the match is released or not wholly on the device.
        """
    def tier_block_ids(self, start_block: int = 0) -> npt.NDArray[np.int32]:
        """Return the ids of the path's blocks in both tiers, and their companions, from one block on.

        Args:
            start_block: Index of the first block in the path, 0 to num_blocks.

        Returns:
            int32 [3, num_blocks - start_block]: device ids, host ids, companions. -1 stands where a tier lacks the
            block, or it was given no companion.

        Raises:
            ValueError: `start_block` is out of range, or the match is released.
        """
    @property
    def is_released(self) -> bool:
        """Whether the match was released or consumed by insert. Its num_blocks and num_tokens remain."""

@final
class PartMatch:
    """The first tokens of a block of another path, which a prompt shares after its whole cached blocks.

    The shared tokens are copied. The block stays the tree's.
    """

    @property
    def match(self) -> Match:
        """A match that pins the other path. Give it to PrefixTree.release once the block is copied."""
    @property
    def num_tokens(self) -> int:
        """Number of shared tokens: at least 1, and fewer than a block holds."""
    @property
    def block_id(self) -> int:
        """The block's id, in the device tier if is_on_device, otherwise in the host tier."""
    @property
    def is_on_device(self) -> bool:
        """Whether the block is on the device."""

@final
class TreeEntry:
    """A run of blocks that a PrefixTree has cached, as PrefixTree.entries found it. It is a copy and pins nothing.

    Where paths part, or where a match ended, one entry ends and others go on from it.
    """

    @property
    def namespace(self) -> bytes:
        """The namespace that the entry is in."""
    @property
    def parent(self) -> int | None:
        """Index, in the list that `entries` returned, of the entry that this one goes on from.

        None at a path's start.
        """
    @property
    def start(self) -> int:
        """Number of tokens in the path before the entry's own."""
    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The entry's own tokens, int32, whole blocks of them, in a new array."""
    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Ids of the entry's device blocks, int32, in a new array.

        Blocks at its end that are only on the host have none.
        """
    @property
    def host_block_ids(self) -> npt.NDArray[np.int32]:
        """Ids of the entry's host blocks, int32, in a new array: one for each block, or -1.

        Empty without a host tier.
        """
    @property
    def num_pins(self) -> int:
        """Number of live matches that pass through the entry or end at it."""
    @property
    def priority(self) -> int:
        """The entry's priority, 0 to 7, or -1 if it was put first. Entries of lower priority are evicted first."""
    @property
    def last_used(self) -> int | None:
        """When the entry's last match was released, on a clock of the tree: larger is later. None while it is pinned.

        One that was put first has the time of that. Of one priority, the entry with the smallest value is evicted
        first. Entries with equal values share a path; then the one at the path's end goes first.
        """

@final
class HotPrefix:
    """A run of cached blocks that matches have found often, as PrefixTree.hottest describes it. It pins nothing."""

    @property
    def namespace(self) -> bytes:
        """The namespace that the run is in."""
    @property
    def parent(self) -> int | None:
        """Index, in the list that `hottest` returned, of the run that this one goes on from.

        None at a path's start.
        """
    @property
    def start(self) -> int:
        """Number of tokens in the path before the run's own."""
    @property
    def num_tokens(self) -> int:
        """Number of the run's own tokens."""
    @property
    def first_tokens(self) -> npt.NDArray[np.int32]:
        """The first of the run's own tokens, int32, in a new array."""
    @property
    def num_hits(self) -> int:
        """How many matches have found the run, or its first blocks before it grew."""
    @property
    def num_pins(self) -> int:
        """Number of live matches that pass through the run or end at it."""
    @property
    def num_blocks(self) -> int:
        """Number of the run's blocks that are on the device."""
    @property
    def num_host_blocks(self) -> int:
        """Number of the run's blocks that are on the host."""

@final
class PrefixTree:
    """A radix tree of whole blocks that maps tokens to the blocks with their K and V. It compares token by token.

    The tree holds the only reference to every block that it caches. Blocks that no Match pins are evicted in order
    of last use; a prefix is never evicted before its continuation. Namespaces (bytes, such as a tenant's salt or a
    LoRA's name) share nothing. Safe to use from several threads. When the tree is deleted, its blocks become free.

    With a host pool there are two tiers. A block is on the device, on the host, or in both. On every path the device
    blocks come first. The tree moves no bytes. It returns the copies to make, int64 [num_pairs, 2]. The caller makes
    them in the order of the calls, before anything else is written.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        host_pool: BlockPool | None = None,
        *,
        _hash_mask: int = ...,
        eviction: str = "lru",
    ) -> None:
        """Make an empty tree.

        Args:
            pool: The device tier.
            block_size: Tokens of a block.
            host_pool: The host tier; None for a tree without one.
            eviction: Which blocks go first, within a priority. "lru": the least recently used. "slru": the same, and
                those that were found again go later. "lfu": those that were found least often. "fifo": those that
                came first. "cost": those that cost least to compute, for the time until they are expected to be
                found again; see set_next_use.

        Raises:
            ValueError: Unless 0 < block_size < 2**31, if the two pools are the same, or for another eviction.
        """
    @property
    def eviction(self) -> str:
        """The policy of eviction, one of eviction_policies()."""
    @property
    def has_host_tier(self) -> bool:
        """Whether there is a host pool."""
    @property
    def block_size(self) -> int:
        """Number of tokens in a block."""
    @property
    def num_cached(self) -> int:
        """Number of device blocks in the tree."""
    @property
    def num_evictable(self) -> int:
        """Number of device blocks that `evict` could free, exactly."""
    @property
    def num_host_cached(self) -> int:
        """Number of host blocks in the tree."""
    @property
    def num_host_evictable(self) -> int:
        """Number of host blocks that `evict_host` could free, exactly."""
    @property
    def num_nodes(self) -> int:
        """Number of edges, with which a path's cost grows. A conversation that grew block by block is one edge."""
    @property
    def num_matches(self) -> int:
        """Number of matches that are neither released nor consumed.

        If it does not return to 0, a caller has dropped some.
        """
    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Blocks since the tree was made: evicted from the device; demoted, which are evicted ones that were copied to
        the host for it; written to the host before their eviction; promoted from the host; evicted from the host.
        """
    def match(
        self,
        tokens: _Integers,
        namespace: bytes = b"",
        priority: int = 0,
        num_left_over: int = 1,
        is_hit: bool = True,
    ) -> Match:
        """Pin the longest run of cached whole blocks, in either tier, with which `tokens` begin.

        Args:
            tokens: Token ids of the prompt. Tokens after the first block that is not cached are not read. A list is
                converted as a whole, to 64 bits.
            namespace: Where to search.
            priority: 0 to 7. The path's priority becomes at least this.
            num_left_over: How many tokens, at least, are left to compute. A model needs 1 for the next token's logits.
                0 also finds a prompt that is cached to its last token.
            is_hit: Whether it counts as a hit of the blocks that it finds.

        Returns:
            The match. The caller releases it.

        Raises:
            ValueError: A number is out of range, or the first block that is not cached has an id outside of 32 bits.
        """
    def count_hit(self, match: Match) -> None:
        """Count a hit of the blocks of a match, which was found with `is_hit` False.

        Args:
            match: The match.

        Raises:
            ValueError: `match` is released or belongs to another tree.
        """
    def match_part(self, match: Match, tokens: _Integers, num_left_over: int = 1) -> PartMatch | None:
        """Find the longest part of the next block that a path below `match` shares with the prompt.

        It takes time in proportion to the logarithm of the paths that part there.

        Args:
            match: The prompt's whole cached blocks.
            tokens: Token ids of the whole prompt.
            num_left_over: As in `match`.

        Returns:
            The part, or None if not even one token is shared.

        Raises:
            ValueError: `num_left_over` is negative, or `match` is released or belongs to another tree.
        """
    def num_pinned_only_by(self, matches: Sequence[Match]) -> int:
        """Return how many device blocks these matches alone pin: those that become evictable when they are released.

        Args:
            matches: Live matches, each named once.

        Raises:
            ValueError: A match is released or belongs to another tree.
        """
    def pin(self, match: Match) -> Match:
        """Return a second match of the same path.

        Args:
            match: The match whose path is pinned again.

        Raises:
            ValueError: `match` is released or belongs to another tree.
        """
    def release(self, match: Match) -> None:
        """Unpin the path. Blocks that no other match pins become the most recently used ones.

        Args:
            match: The match, which is released after this.

        Raises:
            ValueError: `match` is released already or belongs to another tree.
        """
    def insert(
        self,
        tokens: _Integers,
        block_ids: _Integers,
        namespace: bytes = b"",
        after: Match | None = None,
        priority: int = 0,
    ) -> Match:
        """Cache `tokens`, block_size a block, and pin the path to their end.

        The tokens start at the namespace's beginning, or go on where `after` ends. Then `after` is consumed, its pins
        pass to the returned match, and the cost is that of the new tokens alone.

        The caller's reference to every new block passes to the tree. Where the tokens are on the device already, the
        path keeps the tree's block and the caller's block is released. The caller may also name the tree's own id
        there; then no block is released. Where the tokens are on the host only, the caller's block becomes their device
        block.

        Args:
            tokens: Token ids, a whole number of blocks.
            block_ids: Device blocks, one for each block of tokens.
            namespace: Where to insert. Not given together with `after`.
            after: The path to go on from.
            priority: 0 to 7. Not given together with `after`.

        Returns:
            The match of the whole path. The caller releases it.

        Raises:
            ValueError: There are not exactly block_size tokens a block, or an id does not fit into 32 bits. `after` is
                released, belongs to another tree, is not wholly on the device, or came with a namespace or a priority.
                A new block is not the caller's alone: its count is not 1, it is cached elsewhere, or it is named twice.
                A duplicate cannot be released.
        """
    def trim(self, match: Match) -> None:
        """Shorten the match to its device blocks. The rest becomes the most recently used.

        Args:
            match: The match to shorten.

        Raises:
            ValueError: `match` is released or belongs to another tree.
        """
    def shorten(self, match: Match, num_blocks: int) -> None:
        """Shorten a match to its first blocks. The blocks that it gives up become the most recently used ones.

        Args:
            match: A live match of this tree.
            num_blocks: How many blocks it keeps, 0 to match.num_blocks.

        Raises:
            ValueError: The match is released, another tree's, or has fewer blocks.
        """
    def promote(self, match: Match, block_ids: _Integers) -> npt.NDArray[np.int64]:
        """Give device blocks to the first host-only blocks of the path.

        Args:
            match: The path.
            block_ids: Device blocks that are the caller's alone. They pass to the tree.

        Returns:
            The copies to make, int64 [num_pairs, 2]: (host block, device block).

        Raises:
            ValueError: There are more ids than host-only blocks, or a block is not the caller's alone.
        """
    def write_out(self, match: Match, min_hits: int = 0) -> npt.NDArray[np.int64]:
        """Give host blocks to the path's device blocks that have none, from its start on, as far as there is room.

        Host blocks are evicted for it where that makes room.

        Args:
            match: The path.
            min_hits: Only blocks on edges that so many matches have found get a host block.

        Returns:
            The copies to make, int64 [num_pairs, 2]: (device block, host block).
        """
    def send_out(self, match: Match) -> npt.NDArray[np.int64]:
        """Take the path's blocks off the device that this match alone pins, and give host blocks to those without.

        From its end back to the first block that another path goes on from, as far as there is room on the host, or
        unpinned blocks there make some. The path stays pinned.

        Args:
            match: The path.

        Returns:
            The copies to make, int64 [num_pairs, 2]: (device block, host block).

        Raises:
            ValueError: `match` is released or belongs to another tree.
        """
    def evict(self, num_blocks: int) -> int:
        """Free up to `num_blocks` unpinned device blocks.

        Blocks of the lowest priority go first, among them the least recently used, and a path's last block before the
        others. A block without a host copy is forgotten, together with the host-only blocks after it.

        Args:
            num_blocks: How many blocks to free at most.

        Returns:
            How many blocks were freed.

        Raises:
            ValueError: `num_blocks` is negative.
        """
    def demote(self, num_blocks: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Free up to `num_blocks` unpinned device blocks as `evict` does, and give host blocks to those that have none.

        Host blocks are evicted for it. A block that finds no room on the host is forgotten.

        Args:
            num_blocks: How many blocks to free at most.

        Returns:
            How many device blocks were freed, and the copies to make, int64 [num_pairs, 2]: (device block, host block).

        Raises:
            ValueError: `num_blocks` is negative.
        """
    def evict_host(self, num_blocks: int) -> int:
        """Free up to `num_blocks` unpinned host blocks.

        Copies of blocks that are on the device go first, the most recently used first: the device will keep these
        longest. The others go in the order of `evict`, and are forgotten.

        Args:
            num_blocks: How many blocks to free at most.

        Returns:
            How many blocks were freed.

        Raises:
            ValueError: `num_blocks` is negative.
        """
    def drop(self, tokens: _Integers, namespace: bytes = b"") -> int:
        """Forget the blocks of `tokens`, from the last cached one back to the first that is still in use.

        A block is in use if it is pinned, or if another path goes on from it.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to search.

        Returns:
            How many tokens the forgotten blocks held.
        """
    def put_first(self, tokens: _Integers, namespace: bytes = b"", num_kept: int = 0) -> int:
        """Put blocks of `tokens` first in line: they are evicted before all others, in both tiers.

        They are those after the first `num_kept` tokens, from the last cached one back to the first that others need.
        Others need a block that is pinned, that another path goes on from, or that was used after the last one was. A
        later match of a block ends it. Its former priority is forgotten.

        Args:
            tokens: Token ids of a path that nobody comes back to.
            namespace: Where to search.
            num_kept: So many tokens of it are another path's. A block that has one of them stays where it is.

        Returns:
            How many tokens these blocks hold.

        Raises:
            ValueError: `num_kept` is negative.
        """
    def set_next_use(self, tokens: _Integers, namespace: bytes = b"", *, seconds: float) -> int:
        """Tell when a path is expected to be found again. Only the eviction "cost" heeds it.

        Of several times that are told for a block, the earliest that is not over counts. A block whose descendants are
        evicted takes over their time.

        Args:
            tokens: Token ids of a path, as far as it is cached.
            namespace: Where to search.
            seconds: From now; at least 0, and less than 1e9.

        Returns:
            How many tokens of it are in whole entries, which have the time now.

        Raises:
            ValueError: `seconds` is out of range.
        """
    def set_time(self, seconds: float) -> None:
        """Stop the clock that evictions go by, for a simulation. It stands there until the next call.

        Args:
            seconds: The time now; at least 0, and less than 1e9.

        Raises:
            ValueError: `seconds` is out of range.
        """
    def drop_namespace(self, namespace: bytes) -> int:
        """Forget all blocks of a namespace that are not pinned, in both tiers.

        Args:
            namespace: The namespace.

        Returns:
            How many device blocks were freed.
        """
    def clear(self) -> int:
        """Free every unpinned block, in both tiers, and forget which blocks were evicted.

        Returns:
            How many device blocks were freed.
        """
    def entries(self, limit: int, namespace: bytes | None = None) -> list[TreeEntry]:
        """Return a copy of the cached entries, pinned or not.

        They come in the order of namespaces and tokens, each after the entry that it goes on from. The call pins
        nothing and does not count as a use. Other calls wait meanwhile, about 0.1 ms for a million tokens.

        Args:
            limit: The largest number of entries to return.
            namespace: The namespace to list; None lists all.

        Returns:
            The entries.

        Raises:
            ValueError: `limit` is negative.
        """
    def look(self, tokens: _Integers, namespace: bytes = b"") -> tuple[npt.NDArray[np.int32], int, int | None, bool]:
        """Return how far tokens are cached. Nothing is pinned, and nothing counts as used.

        Args:
            tokens: Token ids of a prompt.
            namespace: Where to look.

        Returns:
            The ids of the cached whole blocks, int32 [3, num_blocks], as Match.tier_block_ids. How many tokens a cached
            path shares. The path's next token, where it goes on after them; otherwise None. Whether the prompt's next
            whole block is known to have been evicted: of the last 4,096 runs of blocks, those before which nothing was
            evicted since, nor added in another way.
        """
    def num_held(self, tokens: _Integers, namespace: bytes = b"") -> int:
        """Return the device blocks, of those not in use, that a match of a prompt would pin, with a part of a block.

        Nothing is pinned, and nothing counts as used.

        Args:
            tokens: Token ids of a prompt, of which one is left to compute.
            namespace: Where to look.
        """
    def names(self, limit: int, begin: bytes = b"") -> list[bytes]:
        """Return the namespaces that have cached blocks, in the order of their bytes.

        Args:
            limit: How many of them at most.
            begin: The first one, or those after it where it has none.

        Raises:
            ValueError: The limit is negative.
        """
    def hottest(self, limit: int, max_tokens: int = 16, namespace: bytes | None = None) -> list[HotPrefix]:
        """Return the runs of blocks that most matches have found.

        The call pins nothing and does not count as a use. Of a tree of more than 4,096 entries it looks at those near
        the paths' starts, and at those used last: some thousands, however large the tree is. Other calls wait
        meanwhile, about a millisecond at most.

        Args:
            limit: The largest number of runs to return.
            max_tokens: How many of each run's own tokens to copy at most.
            namespace: The namespace to look at; None looks at all.

        Returns:
            The runs, the hottest first. Each comes after the run that it goes on from.

        Raises:
            ValueError: A number is negative.
        """
    def check(self, owned_ids: _Integers | None = None, owned_host_ids: _Integers | None = None) -> None:
        """Check the tree's invariants, for tests. It takes time in proportion to the tree.

        Args:
            owned_ids: References to device blocks outside of the tree; an id is named once for each. If given, every
                count must agree with them, and free, cached and owned blocks must add up to the pool.
            owned_host_ids: The same for host blocks.

        Raises:
            RuntimeError: An invariant is broken; the message names it.
        """

    # The log of changes, which TreeWatch reads.
    def give_companions(self, match: Match, start: int, end: int) -> None:
        """Give a number to each of the path's blocks in [start, end) that has none: what others keep beside it has it.

        A block keeps its number, in whichever tier it is, until it is forgotten. Numbers begin at 0. There are never
        more than blocks that have one, and dead ones.

        Args:
            match: The path.
            start: Index of the first block in the path.
            end: Index after the last.

        Raises:
            ValueError: The blocks are not in order within the match, or it is released or belongs to another tree.
        """
    def dead_companions(self) -> list[int]:
        """Return the companions of blocks that were forgotten, in the order in which they were."""
    def free_companions(self, num_dead: int) -> None:
        """Let other blocks have the first of the dead companions.

        Args:
            num_dead: How many. What was kept under them is gone.

        Raises:
            ValueError: They are fewer.
        """
    def log_changes(self, max_bytes: int) -> None:
        """Keep a log of changes from now on.

        Args:
            max_bytes: The log's limit in bytes; 0 ends it.

        Raises:
            ValueError: `max_bytes` is negative.
        """
    def take_changes(
        self,
    ) -> tuple[bool, int, npt.NDArray[np.int64], npt.NDArray[np.int32], list[bytes]]:
        """Return the changes since the last call. At first, and where the log overflowed, return all that is cached.

        Returns:
            (is_restart, now, changes, tokens, namespaces); see TreeChanges in kvpage/observe/tree_watch.py.

        Raises:
            ValueError: The tree keeps no log.
        """
    def lose_changes(self) -> None:
        """Drop the log, so that the next take_changes returns all that is cached."""

# Sequences on the device. Rows: numbers that `begin`, `resume` and `fork` have given, each named once a call.

# Whether blocks that leave the device are copied to the host; the fewest host blocks of a prompt that are loaded; after
# how many hits a block is copied to the host early, 0: never.
_HostUse = tuple[bool, int, int]

@final
class SequenceRows:
    """Block tables and lengths of the sequences on the device of one BlockManager, by row.

    A row names its sequence until `remove`. Afterwards its number is refused, and names no other sequence. Every method
    raises KeyError for a row that is not in use. Every other error leaves all as it was.
    """

    def __init__(self, tree: PrefixTree, is_caching: bool) -> None:
        """Make an empty set of rows.

        Args:
            tree: The tree that has the cached blocks. Its device pool has the sequences' own.
            is_caching: Whether full blocks pass to the tree.
        """
    @property
    def num_rows(self) -> int:
        """Number of rows in use."""
    def begin(
        self,
        names: dict[Hashable, int],
        seq_id: Hashable,
        tokens: _Integers,
        namespace: bytes,
        priority: int,
        num_left_over: int,
        share_parts: bool,
        num_spare: int,
        is_hit: bool,
        moves: list[list[Any]],
        host: _HostUse | None,
        /,
    ) -> tuple[int, int, int, int, int, int, npt.NDArray[np.int32]]:
        """Begin a sequence: its longest cached prefix, and free blocks, for which others are evicted.

        Args:
            names: Takes its row.
            seq_id: Its key there, which is not in use.
            tokens: The prompt.
            namespace: Where to search.
            priority: As in PrefixTree.match.
            num_left_over: As in PrefixTree.match.
            share_parts: Whether a part of the next block is shared, too.
            num_spare: How many more blocks, free or evictable, are to be left.
            is_hit: Whether it counts as a hit of the blocks that it finds.
            moves: Takes the moves that are due, also where this raises: [kind, pairs] as in kvpage.blocks.moves.
            host: How the host is used; None for no use.

        Returns:
            The number of cached tokens, the number of blocks that come from the host for them, the number of blocks
            that were left there, the pair of blocks to copy after all moves (-1: none), whether the first of the pair
            is on the device, and all block ids.

        Raises:
            OutOfBlocks: There is no room. Nothing is changed.
            ValueError: As in PrefixTree.match, or there are no tokens, or num_spare is negative.
        """
    def resume(
        self,
        names: dict[Hashable, int],
        seq_id: Hashable,
        match: Match,
        pending: _Integers,
        host_ids: _Integers,
        num_left: int,
        num_spare: int,
        num_tokens: int,
        num_written: int,
        namespace: bytes,
        is_private: bool,
        is_hit: bool,
        moves: list[list[Any]],
        host: _HostUse | None,
        /,
    ) -> npt.NDArray[np.int32]:
        """Begin a sequence with the blocks of a match, and free ones, for which others are evicted.

        Args:
            names: Takes its row.
            seq_id: Its key there, which is not in use.
            match: The cached blocks. It passes to the sequence.
            pending: Written tokens after the match that others are to find.
            host_ids: Host blocks of the caller's, whose contents go to the own blocks, from the first one on.
            num_left: Own blocks before these that are given back already.
            num_spare: As in `begin`.
            num_tokens: Tokens that there is to be room for.
            num_written: Tokens that are written.
            namespace: The namespace.
            is_private: Whether no other sequence finds its blocks.
            is_hit: As in `begin`.
            moves: As in `begin`.
            host: As in `begin`.

        Returns:
            All block ids.

        Raises:
            OutOfBlocks: There is no room. Nothing is changed.
            ValueError: A number is out of range.
        """
    def fork(self, names: dict[Hashable, int], seq_id: Hashable, row: int, num_tokens: int) -> int:
        """Return the row of a new sequence with the first tokens of another, in the same blocks.

        Args:
            names: Takes its row.
            seq_id: Its key there, which is not in use.
            row: A sequence whose tokens are all written.
            num_tokens: How many tokens the new one has. At least those of the blocks that are cached or given back.

        Raises:
            ValueError: num_tokens is out of range.
        """
    def remove(self, names: dict[Hashable, int], seq_id: Hashable, /) -> None:
        """End a sequence. Its own blocks and its match are released.

        Args:
            names: Has its row, and loses it.
            seq_id: Its key there.
        """
    def give_back_room(self, row: int) -> None:
        """Release the blocks after the written tokens."""
    def release_before(self, row: int, num_tokens: int) -> int:
        """Release own blocks that hold only tokens before the `num_tokens`th, where no other sequence finds them.

        Args:
            num_tokens: At most the written tokens.

        Returns:
            How many blocks were released.

        Raises:
            ValueError: num_tokens is out of range.
        """
    def make_private(self, row: int) -> None:
        """Hide all further tokens of the sequence from others."""
    def pin(self, row: int) -> Match:
        """Return a match of the sequence's cached blocks. The caller releases it."""
    def ids(self, row: int) -> npt.NDArray[np.int32]:
        """Return the sequence's block ids, int32 [num_blocks], in a new array."""
    def num_written(self, row: int, /) -> int:
        """Return how many tokens of a sequence are written."""
    def state(self, row: int) -> tuple[int, int, int, int, int, npt.NDArray[np.int32], bytes, bool]:
        """Return the fields of kvpage.blocks.sequence_state.SequenceState."""
    def num_blocks_to_append(self, rows: _Integers, num_new_tokens: int | _Integers, /) -> int:
        """Return how many free blocks `append` takes.

        Args:
            num_new_tokens: One number for each, or one for all.

        Raises:
            ValueError: A row is named twice, or a number is negative or does not fit.
        """
    def append_if_free(self, rows: _Integers, num_new_tokens: int | _Integers, /) -> bool:
        """Make room for more tokens as `append` does, where that copies nothing and enough blocks are free.

        Args:
            num_new_tokens: One number for each, or one for all.

        Returns:
            Whether there is room now. Else nothing is changed.

        Raises:
            ValueError: As in num_blocks_to_append.
        """
    def append(
        self, rows: _Integers, num_new_tokens: int | _Integers, moves: list[list[Any]], host: _HostUse | None, /
    ) -> None:
        """Make room for more tokens in each sequence, for which cached blocks are evicted.

        Shared blocks that would be written are replaced by copies.

        Args:
            num_new_tokens: One number for each, or one for all.
            moves: As in `begin`.
            host: As in `begin`.

        Raises:
            OutOfBlocks: There is no room. Nothing is changed.
            ValueError: A row is named twice, or a number is negative or does not fit.
        """
    def commit(self, row: int, tokens: _Integers, /) -> int:
        """Record that K and V of `tokens` are written. Blocks that are full pass to the tree.

        Args:
            tokens: Token ids, as many as there is room for at most.

        Returns:
            How many blocks have passed to the tree.

        Raises:
            ValueError: There is no room for so many tokens.
        """
    def commit_each(self, rows: _Integers, tokens: _Integers, /) -> int:
        """Do the same with one token for each row.

        Args:
            tokens: One token id for each. A block for which the tree finds no memory passes to it with the next commit.

        Returns:
            How many blocks have passed to the tree.

        Raises:
            ValueError: There is no room, a row is named twice, or there are not as many tokens as rows.
        """
    def tables(self, rows: _Integers, /) -> npt.NDArray[np.int32]:
        """Return the block tables, int32 [num_rows, max_blocks], with 0 after a sequence's last block."""
    def last(self, rows: _Integers, /) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the slots of the last tokens, the block tables, and the numbers of tokens.

        Raises:
            ValueError: A sequence has no token.
        """
    def slots(self, rows: _Integers, starts: _Integers, ends: _Integers, /) -> npt.NDArray[np.int64]:
        """Return the slots of the positions [starts[i], ends[i]), one sequence after the other.

        Args:
            starts: First position of each.
            ends: The position after the last one of each.

        Raises:
            ValueError: A position is out of range.
        """

def small_ints(numbers: list[Any], /) -> npt.NDArray[np.int32] | None:
    """Return a list of plain ints of at most 30 bits as an array; None if it holds anything else.

    Args:
        numbers: The list.
    """

def ids_below(tokens: object, limit: int, /) -> npt.NDArray[np.int32] | None:
    """Return token ids in the usual form if all are in [0, limit), and None otherwise.

    Args:
        tokens: A list of plain ints, of which an array is made, or a contiguous int32 array [num_tokens], which is
            returned itself. Anything else gives None.
        limit: More than any id.
    """

# State slots of models with recurrent states, and the cached blocks that checkpoints stand on.

@final
class SlotPool:
    """The state slots of one tier: a reference count for each, a stack of the free ones, and the order of eviction.

    A fresh pool hands out ascending slots. A slot with a rank is one that can be evicted, while it has one reference.
    Safe to use from several threads.
    """

    def __init__(self, num_slots: int) -> None:
        """Make a pool whose slots are all free.

        Args:
            num_slots: Slots of the tier.

        Raises:
            ValueError: Unless 0 <= num_slots < 2**30.
        """
    def allocate(self) -> int:
        """Take a free slot, with one reference and without a rank.

        Returns:
            The slot that was released last.

        Raises:
            OutOfSlots: No slot is free.
        """
    def occupy(self, slot: int) -> None:
        """Take one free slot out of all, as `allocate` does.

        Raises:
            ValueError: The slot is out of range or not free.
        """
    def share(self, slot: int) -> None:
        """Add one reference to a slot.

        Raises:
            ValueError: The slot is out of range or free.
        """
    def release(self, slot: int) -> None:
        """Take one reference from a slot. A slot without references becomes free.

        Raises:
            ValueError: The slot is out of range or free, or it has a rank and this is its last reference.
        """
    def ref_count(self, slot: int) -> int:
        """Return the slot's number of references: 0 if it is free.

        Raises:
            ValueError: The slot is out of range.
        """
    def rank(self, slot: int, rank: int) -> None:
        """Give a slot its place in the order of eviction, or another one.

        Args:
            rank: 64 bits. The smallest one goes first.

        Raises:
            ValueError: The slot is out of range or free.
        """
    def unrank(self, slot: int) -> None:
        """Take a slot out of the order of eviction.

        Raises:
            ValueError: The slot is out of range, or has no rank.
        """
    def victim(self, besides: int = -1, kept: Sequence[int] = ()) -> int:
        """Return the slot to evict first: the lowest one with the smallest rank, among those with one reference.

        Args:
            besides: A slot that is not meant; -1 for none.
            kept: Slots that are meant only where there is no other.

        Returns:
            The slot; -1 if there is none.

        Raises:
            ValueError: A slot is out of range.
        """
    @property
    def num_slots(self) -> int:
        """Number of slots of the tier: 0 to num_slots - 1."""
    @property
    def num_free(self) -> int:
        """Number of slots without a reference."""
    @property
    def num_ranked(self) -> int:
        """Number of slots with a rank."""
    @property
    def free_slots(self) -> list[int]:
        """The slots without a reference. The next one to hand out stands last."""
    def check(self, owned: _Integers | None = None) -> None:
        """Check the pool's invariants, for tests. It takes time in proportion to the slots.

        Args:
            owned: All references, a slot once for each; None: unknown.

        Raises:
            RuntimeError: An invariant is broken; the message names it.
        """

@final
# Whole-sequence slots.

@final
class SlotAllocator:
    """Slots of a cache with one slot a sequence: which are free, and how often each has been handed out.

    Every call takes constant time. The slots are a bitmap of two levels for 4,096 slots, and one level more for 64
    times as many. A slot's version is the number of times that `alloc` has handed it out. While the version stays the
    same, no new owner has written the slot. Safe to use from several threads.
    """

    def __init__(self, max_slots: int) -> None:
        """Make an allocator whose slots are all free, with version 0.

        Args:
            max_slots: How many slots there are.

        Raises:
            ValueError: Unless 0 <= max_slots < 2**31.
        """
    def alloc(self) -> int:
        """Take the lowest free slot and give it a new version.

        Returns:
            The slot, or -1 if none is free.
        """
    def free(self, slot: int, /) -> None:
        """Free a slot. Its version and its contents stay until it is handed out again.

        Raises:
            ValueError: The slot is out of range or free already.
            OverflowError: The number does not fit into 64 bits.
        """
    def occupy(self, slot: int) -> None:
        """Take a free slot as it is, without a new version, to go on with its contents.

        Raises:
            ValueError: The slot is out of range or taken.
        """
    def is_free(self, slot: int) -> bool:
        """Return whether `alloc` may hand the slot out.

        Raises:
            ValueError: The slot is out of range.
        """
    def version(self, slot: int) -> int:
        """Return how often `alloc` has handed the slot out.

        Raises:
            ValueError: The slot is out of range.
        """
    @property
    def free_count(self) -> int:
        """Number of free slots."""
    @property
    def max_slots(self) -> int:
        """Number of slots."""

_SlotMatch = tuple[int, int, int] | tuple[int, None, None]  # prefix_len, slot, slot_ver

class SlotTree:
    """The tree inside kvpage.extras.slots.PrefixCacheManager, which documents it. Safe to use from several threads."""

    def __init__(self, max_capacity: int) -> None:
        """Make an empty tree."""
    def insert(self, token_ids: _Integers, slot: int, slot_ver: int, /) -> int:
        """Record that a slot holds these tokens and nothing else. Pin their path, and evict down to the capacity."""
    def find(self, token_ids: _Integers, allocator: SlotAllocator | None, /) -> _SlotMatch:
        """Return the longest prefix that a slot holds, without a pin."""
    def pin(self, token_ids: _Integers, allocator: SlotAllocator | None, /) -> _SlotMatch:
        """Find a prefix as `find` does, and pin it. Release it by its tokens."""
    def release(self, token_ids: _Integers, /) -> None:
        """Give back one pin that ends at the end of these tokens."""
    def withdraw(self, slot: int, /) -> bool:
        """Record that a slot holds nothing any more."""
    @property
    def max_capacity(self) -> int:
        """The most tokens in the tree, as far as they are not pinned."""
    @property
    def num_tokens(self) -> int:
        """Number of tokens in the tree."""
    @property
    def num_over(self) -> int:
        """Number of tokens above `max_capacity`, all of them pinned."""
    @property
    def num_slots(self) -> int:
        """Number of slots that hold something."""
    @property
    def num_nodes(self) -> int:
        """Number of edges, with which a path's cost grows."""
    @property
    def num_pins(self) -> int:
        """Number of pins that are not released."""
    def check(self) -> None:
        """Check the tree's invariants, for tests. It takes time in proportion to the tree."""
