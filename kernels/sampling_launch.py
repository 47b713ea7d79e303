"""The launches that choose a token from each row of logits, and the memory between them."""

from dataclasses import dataclass

import torch
import triton

from kvpage.kernels.arguments import _ROWS, as_bits
from kvpage.kernels.constants import Constants
from kvpage.kernels.sampling import choose_kernel, survey_kernel

BLOCK = 256
CAPACITY = 1024
SURVEY_BLOCKS = 4  # of a thread block of one warp, so that no sum leaves the warp: 32 logits a thread
GROUP = 4  # blocks that are read at once where tokens are searched for
FEW_TOKENS = 4096  # of such a vocabulary, all weights are summed up for top_p
CHOOSE_WARPS = 4


@dataclass(frozen=True, slots=True)
class SamplingShape(Constants):
    """How a row is cut: the SHAPE of the kernels.

    NUM_BLOCKS: a power of two, at least the row's blocks. ROW: the logits' type, see kvpage.kernels.quantize.
    """

    BLOCK: int
    SURVEY_BLOCKS: int
    NUM_BLOCKS: int
    GROUP: int
    CAPACITY: int
    IS_SHORT: bool
    ROW: str


@dataclass(frozen=True, slots=True)
class SamplingMemory:
    """What one launch leaves for the next. Its addresses stay, so a graph may hold them.

    tops: fp32 [num_rows, num_blocks]. shares: int64 of the same shape. lists: int32 of the same shape. held: int32
    [num_rows, 2, CAPACITY]. num_blocks: whole thread blocks of the survey.
    """

    vocab_size: int
    tops: torch.Tensor
    shares: torch.Tensor
    lists: torch.Tensor
    held: torch.Tensor

    def serves(self, num_rows: int, vocab_size: int, device: torch.device) -> bool:
        """Whether it is for such logits."""
        return len(self.tops) >= num_rows and self.vocab_size == vocab_size and self.tops.device == device


def sampling_shape(vocab_size: int, dtype: torch.dtype) -> SamplingShape:
    """Choose the constants for rows of this size and dtype."""
    num_blocks = triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK))
    return SamplingShape(
        BLOCK, SURVEY_BLOCKS, num_blocks, GROUP, CAPACITY, vocab_size <= FEW_TOKENS, _ROWS[dtype]
    )


def sampling_memory(num_rows: int, vocab_size: int, device: torch.device) -> SamplingMemory:
    """Allocate the memory for so many rows."""
    num_blocks = triton.cdiv(vocab_size, BLOCK * SURVEY_BLOCKS) * SURVEY_BLOCKS
    shape = num_rows, num_blocks
    return SamplingMemory(
        vocab_size,
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty((num_rows, 2, CAPACITY), dtype=torch.int32, device=device),
    )


def sample_rows(
    logits: torch.Tensor,
    records: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    memory: SamplingMemory,
) -> None:
    """See kvpage.ops.sample_rows, which has checked everything."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    shape, num_blocks = sampling_shape(vocab_size, logits.dtype), memory.tops.shape[1]
    rows = as_bits(logits), logits.stride(0), records, positions, memory.tops, memory.shares
    options = {"enable_fp_fusion": False}
    survey_kernel[(num_blocks // SURVEY_BLOCKS, num_rows, 1)](
        *rows, vocab_size, num_blocks, shape, num_warps=1, **options
    )
    choose_kernel[(num_rows, 1, 1)](
        *rows, memory.lists, memory.held, out, vocab_size, num_blocks, shape, num_warps=CHOOSE_WARPS, **options
    )
