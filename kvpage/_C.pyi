"""The native core: addresses, sizes and stream handles in; no torch."""

from typing import Any

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
