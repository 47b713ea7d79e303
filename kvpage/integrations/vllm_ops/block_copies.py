"""vLLM's operations on blocks: copied between caches, within them, and by raw addresses."""

from collections.abc import Sequence

import numpy as np
import torch

from kvpage.checks.tensors import check_plain, tensor_list
from kvpage.checks.values import as_integer
from kvpage.integrations.vllm_ops.args import blocks_of, byte_layout, check_tensors, consecutive_blocks
from kvpage.integrations.vllm_ops.registered_memory import REGISTERED
from kvpage.ops.copies import BlockCopier


def swap_blocks(
    src: torch.Tensor,
    dst: torch.Tensor,
    block_size_in_bytes: int | torch.Tensor | None = None,
    block_mapping: torch.Tensor | None = None,
) -> None:
    """Copy block s of `src` to block d of `dst` for each row (s, d) of `block_mapping`.

    Either tensor may be on the CPU. Order, errors and lifetimes are as of kvpage.ops.copies.BlockCopier.

    Args:
        src: The cache to read.
        dst: The cache to write.
        block_size_in_bytes: Bytes of a block. Blocks then follow one another from each tensor's first element. Without
            it, as in 0.9.2 where block_mapping is the third argument, a block is src[0] and strides count.
        block_mapping: int64 [num_pairs, 2] on the CPU.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A block is not one run of memory, or an id is out of range. Nothing is copied.
    """
    check_tensors(src=src, dst=dst)
    if isinstance(block_size_in_bytes, torch.Tensor) and block_mapping is None:
        block_size_in_bytes, block_mapping = None, block_size_in_bytes
    if block_mapping is None:
        raise ValueError("block_mapping must be given")
    if block_size_in_bytes is None:
        blocks = [blocks_of("src", src), blocks_of("dst", dst)]
    else:
        size = as_integer("block_size_in_bytes", block_size_in_bytes)
        blocks = [consecutive_blocks("src", src, size), consecutive_blocks("dst", dst, size)]
    BlockCopier(blocks[:1], blocks[1:], byte_layout(blocks[0].shape[2])).run(block_mapping)


def swap_blocks_batch(
    src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
) -> None:
    """Copy sizes[i] bytes from the address src_ptrs[i] to dst_ptrs[i], for all i.

    Every extent must be in caches that `register_caches` was given.

    Args:
        src_ptrs: int64 [num_copies] on the CPU.
        dst_ptrs: int64 [num_copies] on the CPU. Destinations must overlap neither each other nor sources.
        sizes: int64 [num_copies] on the CPU, in bytes.
        is_src_access_order_any: Accepted and not needed. Sources are always read in the stream's order.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: An extent is outside of registered memory, or extents overlap. Nothing is copied.
    """
    arrays: list[np.ndarray] = []
    for name, tensor in (("src_ptrs", src_ptrs), ("dst_ptrs", dst_ptrs), ("sizes", sizes)):
        check_plain(name, tensor)
        if tensor.dtype not in (torch.int64, torch.uint64) or tensor.device.type != "cpu" or tensor.dim() != 1:
            raise ValueError(
                f"{name} must be one row of int64 on the CPU, got {tensor.dtype} {tuple(tensor.shape)} "
                f"on {tensor.device}"
            )
        arrays.append(tensor.view(torch.int64).numpy())
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"src_ptrs, dst_ptrs and sizes must be as many, got {', '.join(str(len(a)) for a in arrays)}")
    REGISTERED.copy(*arrays)


def copy_blocks(
    key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor
) -> None:
    """Copy block s to block d for each row (s, d) of `block_mapping`, within each cache, in all layers at once.

    Args:
        key_caches: One tensor a layer, [num_blocks, ...], each block dense.
        value_caches: The same for values.
        block_mapping: int64 [num_pairs, 2]. The call waits for one on a device.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There are not as many value caches, a block is not dense, or an id is out of range.
    """
    key_caches, value_caches = tensor_list("key_caches", key_caches), tensor_list("value_caches", value_caches)
    if len(key_caches) != len(value_caches):
        raise ValueError(f"key_caches and value_caches must be as many, got {len(key_caches)} and {len(value_caches)}")
    copy_blocks_mla([*key_caches, *value_caches], block_mapping)


def copy_blocks_mla(kv_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor) -> None:
    """Do the same as `copy_blocks` for caches without a value part.

    Args:
        kv_caches: One tensor a layer, [num_blocks, ...], each block dense.
        block_mapping: int64 [num_pairs, 2]. The call waits for one on a device.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A block is not dense, or an id is out of range.
    """
    kv_caches = tensor_list("kv_caches", kv_caches)
    check_tensors(block_mapping=block_mapping)
    if not kv_caches:
        return
    blocks = [blocks_of("kv_caches", cache) for cache in kv_caches]
    BlockCopier(blocks, blocks, byte_layout(blocks[0].shape[2])).run(block_mapping.cpu())
