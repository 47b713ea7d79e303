"""The choice of a token from each row of logits: on a CUDA device by Triton kernels, for which no call waits."""

from dataclasses import dataclass

import torch

from kvpage.checks.tensors import check_plain, check_writable
from kvpage.checks.values import as_integer
from kvpage.layout.sampling_record import RECORD_WORDS
from kvpage.ops.cpu.sampling import sample_host_rows
from kvpage.ops.cuda.rows import _has_triton

MAX_ROWS = 65535  # of one launch: they are its second dimension
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_sample_rows(logits: torch.Tensor) -> bool:
    """Return whether kernels of `sample_rows` take such logits: on a CUDA device, fp32, bf16 or fp16, with Triton.

    Args:
        logits: [num_rows, vocab_size].

    Returns:
        Whether it does.
    """
    is_strided = type(logits) is torch.Tensor and logits.layout is torch.strided and not logits.is_nested
    return is_strided and logits.is_cuda and not logits.is_neg() and logits.dtype in DTYPES and _has_triton()


@dataclass(frozen=True, slots=True)
class SamplingMemory:
    """Memory in which `sample_rows` works, a call at a time. Its addresses stay, so that a CUDA graph may hold them.

    Args:
        vocab_size: logits of a row.
        tops: the greatest logit of each block; fp32 [num_rows, num_blocks].
        shares: the sum of the shares of each block; int64 [num_rows, num_blocks].
        lists: blocks that may hold tokens that stay; int32 [num_rows, num_blocks].
        held: keys and ids of such tokens; int32 [num_rows, 2, num].
    """

    vocab_size: int
    tops: torch.Tensor
    shares: torch.Tensor
    lists: torch.Tensor
    held: torch.Tensor

    @classmethod
    def make(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> "SamplingMemory":
        """Allocate the memory.

        Args:
            num_rows: the most rows of a call.
            vocab_size: logits of a row.
            device: of the logits.

        Returns:
            The memory: 16 bytes for each block of 256 logits, and 8 KiB, a row.

        Raises:
            ValueError: a size is not positive.
        """
        from kvpage.kernels.sampling_launch import CAPACITY, num_surveyed_blocks

        for name, size in (("num_rows", num_rows), ("vocab_size", vocab_size)):
            if as_integer(name, size) < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        shape = num_rows, num_surveyed_blocks(vocab_size)
        tops = torch.empty(shape, dtype=torch.float32, device=device)
        shares, lists = tops.new_empty(shape, dtype=torch.int64), tops.new_empty(shape, dtype=torch.int32)
        return cls(vocab_size, tops, shares, lists, held=lists.new_empty((num_rows, 2, CAPACITY)))

    @classmethod
    def of(cls, logits: torch.Tensor, *tensors: torch.Tensor | None) -> "SamplingMemory | None":
        """Return the memory that consists of tensors that `make` has made, for such logits.

        Args:
            logits: [num_rows, vocab_size].
            tensors: tops, shares, lists and held; or None each.

        Returns:
            The memory; None without tensors.

        Raises:
            ValueError: some are missing, or they are not as `make` makes them for this vocabulary.
        """
        parts = [tensor for tensor in tensors if tensor is not None]
        if not parts:
            return None
        check_plain("logits", logits)
        if len(parts) != len(tensors) or logits.dim() != 2 or not logits.shape[1]:
            raise ValueError(f"memory must be all of tops, shares, lists and held, for rows, got {len(parts)} of them")
        made = cls.make(max(len(parts[0]), 1), logits.shape[1], "meta")
        for tensor, name in zip(parts, ("tops", "shares", "lists", "held"), strict=True):
            like = getattr(made, name)
            check_writable(name, tensor)
            _check_column(name, tensor, tuple(like.shape), like.dtype, logits.device)
        return cls(logits.shape[1], *parts)

    def serves(self, num_rows: int, vocab_size: int, device: torch.device) -> bool:
        """Return whether it is for such logits.

        Args:
            num_rows: rows of the call.
            vocab_size: logits of a row.
            device: of the logits.

        Returns:
            Whether it is.
        """
        return len(self.tops) >= num_rows and self.vocab_size == vocab_size and self.tops.device == device


def sample_rows(
    logits: torch.Tensor,
    records: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    memory: SamplingMemory | None = None,
) -> None:
    """Choose one token a row: on a device by two launches on the current stream, on a CPU by a native call.

    Equal bits of logits and equal records give the same token everywhere. On a device the host waits for nothing, and
    all arguments are read there, so a CUDA graph may hold the call.

    Args:
        logits: [num_rows, vocab_size], fp32, bf16 or fp16; each row's logits side by side. They stay as they are.
        records: int64 [num_rows, SAMPLING_RECORD_WORDS], contiguous: the bytes of `SAMPLING_RECORD`, on the logits'
            device. So are the tables whose addresses they hold. The caller keeps these alive; nothing checks them. A
            word's bits 0 to 26 are how often its token was generated. The next four say that it is suppressed, ends the
            sequence, must not come first, and is in the prompt.
        positions: int64 [num_rows], contiguous: how many tokens each row's sequence has generated.
        out: int32 [num_rows], contiguous: takes the tokens; -1 for rows that hold NaN or +inf, or no finite number,
            before or after their rules.
        memory: for at least that many rows and exactly this vocabulary. None on a CPU, which needs none.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: an argument has another shape, dtype, layout or device; on a CPU, a record's number is out of range.
            Nothing is written.
    """
    _check(logits, records, positions, out, memory)
    if runs_on_host(logits):
        sample_host_rows(logits, records, positions, out)
    else:
        _launch(logits, records, positions, out, memory)


def sample_rows_in(
    logits: torch.Tensor,
    records: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    memory: tuple[torch.Tensor | None, ...],
) -> None:
    """Do what `sample_rows` does, in memory that is passed as its tensors, as `SamplingMemory.of` takes them."""
    sample_rows(logits, records, positions, out, SamplingMemory.of(logits, *memory))


def runs_on_host(logits: torch.Tensor) -> bool:
    """Return whether no kernel is launched for such logits."""
    return logits.is_cpu


def _launch(
    logits: torch.Tensor,
    records: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    memory: SamplingMemory | None,
) -> None:
    from kvpage.kernels import sampling_launch

    assert memory is not None, "it was checked"
    with torch.cuda.device(logits.device):
        tensors = memory.tops, memory.shares, memory.lists, memory.held
        sampling_launch.sample_rows(logits, records, positions, out, *tensors)


def _check(
    logits: torch.Tensor,
    records: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    memory: SamplingMemory | None,
) -> None:
    check_plain("logits", logits)
    is_narrow = logits.ndim != 2 or logits.shape[1] < 1 or logits.stride(1) != 1 and logits.shape[1] > 1
    if is_narrow or logits.dtype not in DTYPES:
        raise ValueError(
            f"logits must be rows of fp32, bf16 or fp16, each contiguous, got {logits.dtype} {list(logits.shape)}"
        )
    num_rows, vocab_size = logits.shape
    if num_rows > MAX_ROWS:
        raise ValueError(f"logits must have at most {MAX_ROWS} rows, got {num_rows}")
    if not vocab_size < 2**31 - 2**16:
        raise ValueError(f"vocab_size must fit into 32 bits, got {vocab_size}")
    _check_column("records", records, (num_rows, RECORD_WORDS), torch.int64, logits.device)
    _check_column("positions", positions, (num_rows,), torch.int64, logits.device)
    check_writable("out", out)
    _check_column("out", out, (num_rows,), torch.int32, logits.device)
    if memory is None and logits.is_cpu:
        return
    if not isinstance(memory, SamplingMemory):
        raise TypeError(f"memory must be a SamplingMemory, got {type(memory).__name__}")
    if not memory.serves(num_rows, vocab_size, logits.device):
        raise ValueError(f"memory must be for {num_rows} rows of {vocab_size} logits on {logits.device}")


def _check_column(
    name: str, column: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    check_plain(name, column)
    if column.shape != shape or column.dtype != dtype or not column.is_contiguous() or column.device != device:
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)} on {device}, "
            f"got {column.dtype} {list(column.shape)} on {column.device}"
        )
