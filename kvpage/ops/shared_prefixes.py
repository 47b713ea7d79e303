"""Shared prefixes: a plan by which attention reads keys once that several sequences have in common."""

import numpy as np
import numpy.typing as npt
import torch

import kvpage._C as _C
from kvpage.checks.tensors import readable
from kvpage.checks.values import as_integer
from kvpage.layout.shared_prefixes import GRANULE, PlanRow, max_groups
from kvpage.ops.args.tokens import Lengths, host_lengths

LEAST_SAVED = 2048
"""Keys that a group must save, its keys times its members but one. A launch and a part of the merging take some 3 us. A
GPU reads the K and V of about 3,000 keys meanwhile, of 8 heads of 128 elements in 16 bits, at 4 TB/s."""


def shared_prefixes(
    block_tables: torch.Tensor, seq_lens: Lengths, block_size: int, *, least_saved: int = LEAST_SAVED
) -> torch.Tensor | None:
    """Plan which keys of sequences with one query each are read once for several of them.

    Sequences share the keys of the blocks with which their tables begin alike. A group reads them in place of its
    members. A sequence is in up to two groups, one within the other: say, of a system prompt, and of a chat. Tables of
    a prefix tree are grouped so that the most keys are saved. In other tables, a group may be missed where a block is
    the same after blocks that are not.

    The plan fits as long as each sequence keeps the blocks of its groups' keys. It may grow meanwhile.

    Args:
        block_tables: int32 [num_seqs, max_blocks] on the CPU.
        seq_lens: [num_seqs] keys of each sequence, its query's own included, on the host. That one is never shared.
        block_size: Tokens of a block.
        least_saved: Keys that a group saves at least: its keys times its members but one.

    Returns:
        The plan, int64 [9, num_seqs] on the CPU, for `shared` of `paged_attention` and of `Sequences`. None where no
        group is worth it.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, a dtype, a device or a number is wrong.
    """
    tables = readable("block_tables", block_tables)
    if tables.dtype != torch.int32 or tables.dim() != 2 or tables.device.type != "cpu":
        form = f"{tables.dtype} {tuple(tables.shape)} on {tables.device}"
        raise ValueError(f"block_tables must be int32 [num_seqs, max_blocks] on the CPU, got {form}")
    size = as_integer("block_size", block_size)
    if size < 1:
        raise ValueError(f"block_size must be positive, got {size}")
    lengths = host_lengths("seq_lens", seq_lens, len(tables), tables.shape[1] * size)
    plan = np.empty((len(PlanRow), len(tables)), np.int64)
    least = as_integer("least_saved", least_saved)
    num_groups = plan_into(plan, tables.contiguous().numpy(), np.array(lengths, np.int64), size, least)
    return torch.from_numpy(plan) if num_groups else None


def plan_into(
    plan: npt.NDArray[np.int64],
    block_tables: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int64],
    block_size: int,
    least_saved: int = LEAST_SAVED,
) -> int:
    """Write a plan, as of `shared_prefixes`, and return the number of its groups: 0 where nothing is shared.

    Args:
        plan: int64 [9, num_rows], contiguous, written whole. Rows after those of the sequences share nothing.
        block_tables: int32 [num_seqs, max_blocks], contiguous.
        seq_lens: int64 [num_seqs], contiguous, of keys. They are cut where a table ends.
        block_size: Tokens of a block.
        least_saved: As of shared_prefixes.

    Raises:
        ValueError: There are fewer rows than sequences, or a number is not positive.
    """
    num_seqs, width = block_tables.shape
    num_rows = plan.shape[1]
    tables = block_tables.ctypes.data, width, num_seqs, width, 0, block_size
    rules = GRANULE, least_saved, max_groups(num_rows)
    return _C.share_prefixes(tables, seq_lens.ctypes.data, rules, plan.ctypes.data, num_rows)
