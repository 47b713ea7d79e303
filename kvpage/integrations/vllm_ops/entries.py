"""vLLM's gather of fp8_ds_mla entries, as floats; kvpage.integrations.vllm_ops serves it."""

import itertools

import numpy as np
import numpy.typing as npt
import torch

from kvpage.checks.tensors import check_plain, check_writable, readable
from kvpage.checks.values import as_integer
from kvpage.integrations.vllm_ops import ds_mla
from kvpage.integrations.vllm_ops.args import check_kind, check_reachable, check_shape, check_tensors, overwrite

_Integers = npt.NDArray[np.int64]
_BYTES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    workspace_starts: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None = None,
    host_cache: torch.Tensor | None = None,
    host_row_ids: torch.Tensor | None = None,
    device_row_ids: torch.Tensor | None = None,
) -> None:
    """Gather entries of the first `batch_size` sequences, and write their latents and rotary parts into `dst`.

    The call waits for the device. Every id is checked before anything is written.

    The last three arguments come together. Then a token's place (block id * block_size + offset) is looked up: its
    entry is row device_row_ids[place] of src_cache or, where that is negative, row host_row_ids[place] of host_cache.

    Args:
        src_cache: Bytes [num_blocks, block_size, 656], entries that kvpage.integrations.vllm_ops.ds_mla shows.
        dst: bf16 [num_rows, 576]. Rows before the first sequence stay.
        block_table: int32 [num_seqs, max_blocks].
        workspace_starts: int32 [num_seqs], the first row of each sequence in `dst`. A sequence ends where the next
            begins, and the last one where `dst` ends.
        batch_size: How many sequences to gather.
        seq_starts: int32 [num_seqs], the first token of each sequence to gather; None for 0.
        host_cache: uint8 [num_host_rows, 656] on the CPU.
        host_row_ids: int32, of any shape.
        device_row_ids: int32, of any shape, with as many elements.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, dtype, length or id is wrong, or only some of the last three are given.
    """
    check_tensors(src_cache=src_cache, dst=dst, block_table=block_table, workspace_starts=workspace_starts)
    check_tensors(seq_starts=seq_starts)
    num_seqs = as_integer("batch_size", batch_size)
    _check_gather(src_cache, dst, block_table, workspace_starts, num_seqs, seq_starts)
    rows = _row_ranges(workspace_starts[:num_seqs].tolist(), len(dst))
    starts = [0] * num_seqs if seq_starts is None else seq_starts[:num_seqs].tolist()
    lengths = [end - begin for begin, end in rows]
    table = readable("block_table", block_table)[:num_seqs].cpu().numpy()
    places = _places(table, starts, lengths, src_cache.shape[1])
    entries = _entries(src_cache, places, host_cache, host_row_ids, device_row_ids)
    if len(entries):
        overwrite(dst[rows[0][0] :], ds_mla.unpack_entries(entries))


def _check_gather(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    workspace_starts: torch.Tensor,
    num_seqs: int,
    seq_starts: torch.Tensor | None,
) -> None:
    device = src_cache.device
    check_plain("src_cache", src_cache)
    check_writable("dst", dst)
    check_kind("src_cache", src_cache, _BYTES, device)
    check_shape("src_cache", src_cache, "num_blocks block_size bytes", (None, None, ds_mla.ENTRY_BYTES))
    check_kind("dst", dst, (torch.bfloat16,), device)
    check_shape("dst", dst, "num_rows size", (None, ds_mla.RANK + ds_mla.ROPE_SIZE))
    check_kind("block_table", block_table, (torch.int32,), device)
    check_shape("block_table", block_table, "num_seqs max_blocks", (None, None))
    for name, row in (("workspace_starts", workspace_starts), ("seq_starts", seq_starts)):
        if row is not None:
            check_kind(name, row, (torch.int32,), device)
            check_shape(name, row, "num_seqs", (None,))
            if not 0 <= num_seqs <= min(len(row), len(block_table)):
                raise ValueError(
                    f"batch_size must be at most the sequences of block_table and of {name}, got {num_seqs} for "
                    f"{len(block_table)} and {len(row)}"
                )


def _row_ranges(begins: list[int], num_rows: int) -> list[tuple[int, int]]:
    """Return the rows of each sequence. Raise ValueError unless the sequences follow each other within num_rows."""
    bounds = [0, *begins, num_rows]
    if bounds != sorted(bounds):
        raise ValueError(f"workspace_starts must ascend within the {num_rows} rows of dst, got {begins}")
    return list(itertools.pairwise([*begins, num_rows]))


def _places(table: npt.NDArray[np.int32], starts: list[int], lengths: list[int], block_size: int) -> _Integers:
    """Return block id * block_size + offset of each token, one sequence after the other."""
    places = [np.empty(0, np.int64)]
    for row, start, length in zip(table, starts, lengths, strict=True):
        if start < 0 or start + length > len(row) * block_size:
            raise ValueError(f"seq_starts must leave {length} tokens within the block table, got {start}")
        positions = np.arange(start, start + length)
        places.append(row.astype(np.int64)[positions // block_size] * block_size + positions % block_size)
    return np.concatenate(places)


def _entries(
    src_cache: torch.Tensor,
    places: _Integers,
    host_cache: torch.Tensor | None,
    host_row_ids: torch.Tensor | None,
    device_row_ids: torch.Tensor | None,
) -> torch.Tensor:
    """Return the entries at these places: uint8 [num_places, 656] on the cache's device."""
    num_blocks, block_size, _ = src_cache.shape
    presence = host_cache is not None, host_row_ids is not None, device_row_ids is not None
    if any(presence) and not all(presence):
        raise ValueError("host_cache, host_row_ids and device_row_ids must be given together")
    if host_cache is None or host_row_ids is None or device_row_ids is None:
        _check_ids("block_table", places, num_blocks * block_size, "places")
        return _cached(src_cache, places)
    _check_host_rows(host_cache, host_row_ids, device_row_ids, src_cache.device)
    in_host, in_device = (
        readable("row ids", ids).reshape(-1).cpu().numpy().astype(np.int64) for ids in (host_row_ids, device_row_ids)
    )
    _check_ids("block_table", places, len(in_device), "places that device_row_ids names")
    is_cached = in_device[places] >= 0
    cached, hosted = in_device[places[is_cached]], in_host[places[~is_cached]]
    _check_ids("device_row_ids", cached, num_blocks * block_size, "rows of src_cache")
    _check_ids("host_row_ids", hosted, len(host_cache), "rows of host_cache")
    entries = torch.empty(len(places), ds_mla.ENTRY_BYTES, dtype=torch.uint8, device=src_cache.device)
    where = torch.from_numpy(is_cached).to(src_cache.device)
    entries[where] = _cached(src_cache, cached)
    entries[~where] = host_cache[torch.from_numpy(hosted)].to(src_cache.device)
    return entries


def _check_host_rows(
    host_cache: torch.Tensor, host_row_ids: torch.Tensor, device_row_ids: torch.Tensor, device: torch.device
) -> None:
    check_plain("host_cache", host_cache)
    check_kind("host_cache", host_cache, (torch.uint8,), torch.device("cpu"))
    check_shape("host_cache", host_cache, "num_host_rows bytes", (None, ds_mla.ENTRY_BYTES))
    for name, ids in (("host_row_ids", host_row_ids), ("device_row_ids", device_row_ids)):
        check_reachable(name, ids)
        check_kind(name, ids, (torch.int32,), device)
    if host_row_ids.numel() != device_row_ids.numel():
        raise ValueError(
            f"host_row_ids and device_row_ids must be as many, got {host_row_ids.numel()} and {device_row_ids.numel()}"
        )


def _check_ids(name: str, ids: _Integers, count: int, rows: str) -> None:
    bad = ids[(ids < 0) | (ids >= count)]
    if len(bad):
        raise ValueError(f"{name} must name {count} {rows}, got {bad[0]}")


def _cached(src_cache: torch.Tensor, places: _Integers) -> torch.Tensor:
    ids = torch.from_numpy(places).to(src_cache.device)
    block_size = src_cache.shape[1]
    return src_cache.view(torch.uint8)[ids // block_size, ids % block_size]
