"""vLLM's cache operations under its names: code written for `vllm._custom_ops` runs by changing one import.

    from vllm import _custom_ops as ops      ->      from kvpage.integrations import vllm_ops as ops

Names, arguments and their order are as in vLLM 0.33. Operations that were deleted since are as in 0.9.2:
copy_blocks, copy_blocks_mla, and swap_blocks without a block size. A cache's shape and strides say its layout:

    reshape_and_cache_flash   key_cache, value_cache [num_blocks, block_size, num_heads, head_size], any strides with
                              the last dimension contiguous: NHD or HND, K and V of one tensor or of two
    reshape_and_cache         key_cache [num_blocks, num_heads, head_size / x, block_size, x],
                              value_cache [num_blocks, num_heads, head_size, block_size]
    *_mla, *gather*           kv_cache [num_blocks, block_size, entry_size]

kv_cache_dtype says how a cache holds its rows:

    "auto", "float16", "bfloat16"      as they are; the cache is of that dtype
    "fp8", "fp8_e4m3", "fp8_e5m2"      divided by a scale, and times it when read; the cache is uint8 or that float
    "fp8_ds_mla"                       entries of bytes, for some operations on latents

A scale is fp32, one for the tensor or one a head. Some things differ from vLLM's operations:

- Every operation works on the CPU, too.
- Shapes, dtypes and ids are checked. A wrong one is a ValueError before anything is written. Ids on a CUDA device are
  checked there: bad ones are skipped, and kvpage.ops.check_device reports them.
- A slot of -1 is padding.
- Raw addresses must be in caches that `register_caches` was given.
- Errors of CUDA are raised.

REFUSED names vLLM's operations on caches that are not served here, and why.
"""

from typing import NoReturn

from kvpage.integrations.vllm_ops.block_copies import copy_blocks, copy_blocks_mla, swap_blocks, swap_blocks_batch
from kvpage.integrations.vllm_ops.entries import cp_gather_and_upconvert_fp8_kv_cache
from kvpage.integrations.vllm_ops.grouped_latents import concat_and_cache_mla_grouped
from kvpage.integrations.vllm_ops.indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from kvpage.integrations.vllm_ops.latents import concat_and_cache_mla, concat_and_cache_mla_rope_fused, concat_mla_q
from kvpage.integrations.vllm_ops.refused import REFUSED as REFUSED
from kvpage.integrations.vllm_ops.refused import missing
from kvpage.integrations.vllm_ops.registered_memory import REGISTERED
from kvpage.integrations.vllm_ops.tokens import (
    convert_fp8,
    cp_gather_cache,
    gather_and_maybe_dequant_cache,
    reshape_and_cache,
    reshape_and_cache_flash,
)

__all__ = [
    "concat_and_cache_mla",
    "concat_and_cache_mla_grouped",
    "concat_and_cache_mla_rope_fused",
    "concat_mla_q",
    "convert_fp8",
    "copy_blocks",
    "copy_blocks_mla",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache",
    "gather_and_maybe_dequant_cache",
    "indexer_k_quant_and_cache",
    "register_caches",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "swap_blocks_batch",
    "unregister_caches",
]

register_caches = REGISTERED.register
unregister_caches = REGISTERED.unregister


def __getattr__(name: str) -> NoReturn:
    """Raise AttributeError, with the reason for an operation of vLLM's that is refused."""
    raise missing(__name__, name)
