"""The launches that choose a token from each row of logits."""

from dataclasses import dataclass

import torch
import triton

from kvpage.kernels.arguments import _ROWS
from kvpage.kernels.constants import Constants
from kvpage.kernels.prepared import Prepared, PreparedKinds
from kvpage.kernels.sampling import choose_kernel, survey_kernel

BLOCK = 256
CAPACITY = 1024
SURVEY_BLOCKS = 4  # of a thread block of one warp, so that no sum leaves the warp: 32 logits a thread
GROUP = 4  # blocks that are read at once where tokens are searched for
FEW_TOKENS = 4096  # of such a vocabulary, all weights are summed up for top_p
SURVEY_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
CHOOSE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "maxnreg": 224}  # fewer registers would spill


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


def sampling_shape(vocab_size: int, dtype: torch.dtype) -> SamplingShape:
    """Choose the constants for rows of this size and dtype."""
    num_blocks = triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK))
    return SamplingShape(BLOCK, SURVEY_BLOCKS, num_blocks, GROUP, CAPACITY, vocab_size <= FEW_TOKENS, _ROWS[dtype])


def num_surveyed_blocks(vocab_size: int) -> int:
    """Return the columns of the memory: blocks of a row, in whole thread blocks of the survey."""
    return triton.cdiv(vocab_size, BLOCK * SURVEY_BLOCKS) * SURVEY_BLOCKS


def sample_rows(
    logits: torch.Tensor,
    records: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    tops: torch.Tensor,
    shares: torch.Tensor,
    lists: torch.Tensor,
    held: torch.Tensor,
) -> None:
    """See kvpage.ops.sample_rows, which has checked everything, and its SamplingMemory."""
    num_rows, _ = logits.shape
    if num_rows == 0:
        return
    survey, choose = _prepared(logits, tops)
    rows = logits, records, positions, tops, shares
    survey.launch((tops.shape[1] // SURVEY_BLOCKS, num_rows, 1), rows, ())
    choose.launch((num_rows, 1, 1), (*rows, lists, held, out), ())


_kinds = PreparedKinds()


def _prepared(logits: torch.Tensor, tops: torch.Tensor) -> tuple[Prepared, Prepared]:
    """Return the launches of rows like these: of one dtype, vocabulary and stride."""
    kind = logits.device, logits.dtype, logits.shape[1], logits.stride(0), tops.shape[1]
    known: tuple[Prepared, Prepared] | None = _kinds.get(kind)
    if known is None:
        fixed = logits.stride(0), logits.shape[1], tops.shape[1], sampling_shape(logits.shape[1], logits.dtype)
        known = (
            Prepared(survey_kernel, fixed, SURVEY_OPTIONS, 1, (0, 3, 4)),
            Prepared(choose_kernel, fixed, CHOOSE_OPTIONS, 1, (0, 3, 4, 5, 6)),
        )
        _kinds.keep(kind, known)
    return known
