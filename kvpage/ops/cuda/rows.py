"""Operations on tokens in a CUDA device's memory: Triton kernels, or torch operations where Triton is not installed.

Arguments are checked by kvpage.ops.rows, but for ids in the device's memory, which are not waited for. The kernels
check them, skip the bad ones, and set a bit of the device's error word.
"""

import functools
import importlib.util
import os
import warnings

import torch

from kvpage.checks.device_lock import synchronize
from kvpage.ops import reference
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.tokens import Lengths
from kvpage.ops.cuda.gathers import Gathers, Out
from kvpage.ops.cuda.launches import Launches

_DEBUG = os.environ.get("KVPAGE_DEBUG") == "1"
_ERRORS = {
    1: "slot_mapping held a slot out of range",
    2: "block_tables held a block id out of range",
    4: "seq_lens or seq_starts were out of range",
    8: "fresh_rows held a row out of range",
}
_error_words: dict[torch.device, torch.Tensor] = {}  # int32 [1] a device, for all kernels: bits, the keys of _ERRORS
_launches = Launches()
_gathers = Gathers()


def check_device(device: torch.device | str = "cuda") -> None:
    """Wait for all work of a device so far, and check that no kernel met a bad slot or block id since the last call.

    A kernel skips rows with a bad id, and does everything else. With KVPAGE_DEBUG=1 in the environment, every operation
    calls this itself.

    Args:
        device: A CUDA device.

    Raises:
        ValueError: A kernel met a bad id, or `device` is not a CUDA device.
    """
    device = _with_index(torch.device(device))
    if device not in _error_words:
        return
    synchronize(device)
    word = int(_error_words[device].item())
    if word:
        clear_error_word(device)
        raise_errors(word, device)


def find_error_word(device: torch.device) -> torch.Tensor | None:
    """Return the error word of a device, int32 [1] there; None while no kernel has run on it."""
    return _error_words.get(device)


def clear_error_word(device: torch.device) -> None:
    """Forget what the kernels of a device have reported, after the work of its current stream."""
    _error_words[device].zero_()


def raise_errors(word: int, device: torch.device) -> None:
    """Raise ValueError for the bits of an error word that is not 0."""
    texts = "; ".join(text for bit, text in _ERRORS.items() if word & bit)
    raise ValueError(f"{texts} on {device}; it was skipped")


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _error_word(device: torch.device) -> torch.Tensor:
    """Return the device's error word, made at its first use and zero for every stream from then on."""
    word = _error_words.get(device)
    return _make_error_word(device) if word is None else word


def _make_error_word(device: torch.device) -> torch.Tensor:
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"an operation must have run once on {device} before a graph captures one")
        word = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
    return _error_words.setdefault(device, word)


def _check_if_debugging(device: torch.device) -> None:
    if _DEBUG and not torch.cuda.is_current_stream_capturing():
        check_device(device)


@functools.cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn("triton is not installed: tokens are written and gathered by slower torch operations", stacklevel=4)
    return False


def repeat_reshape(key: torch.Tensor, value: torch.Tensor | None, cache: BoundCache, slots: torch.Tensor) -> bool:
    """Write rows into slots and return True, if rows of their kind were checked and written before."""
    error = _error_words.get(cache.device)
    if error is None or _DEBUG or torch.cuda.current_device() != cache.device.index:
        return False
    return _launches.repeat(key, value, cache, slots, error)


def reshape_and_cache(key: torch.Tensor, value: torch.Tensor | None, cache: BoundCache, slots: torch.Tensor) -> None:
    """Write rows into slots; all but the values of the slots is checked."""
    if not _has_triton():
        _check_slots(slots, cache.shape[0] * cache.shape[1])
        reference.reshape_and_cache(key, value, cache.tensor, slots, cache.layout, cache.scales)
        return
    from kvpage.kernels import reshape

    with torch.cuda.device(cache.device):
        launched = reshape.reshape_and_cache(key, value, cache.views, slots, cache.scales, _error_word(cache.device))
        _check_if_debugging(cache.device)
    if launched is not None:
        _launches.keep(key, value, cache, slots, launched)


def repeat_gather(
    cache: BoundCache, block_tables: torch.Tensor, lengths: Lengths, starts: Lengths | None, out: Out
) -> bool:
    """Copy rows of sequences into `out` and return True, if a call of this kind was checked before."""
    error = _error_words.get(cache.device)
    if error is None or _DEBUG or torch.cuda.current_device() != cache.device.index:
        return False
    if torch.cuda.is_current_stream_capturing():  # lengths of the host must not be captured
        return False
    return _gathers.repeat(cache, block_tables, lengths, starts, out, error)


def gather_cache(
    cache: BoundCache,
    block_tables: torch.Tensor,
    lengths: list[int],
    starts: list[int],
    out: Out,
) -> None:
    """Copy rows of sequences into `out`; all but ids is checked."""
    if not _has_triton():
        _check_blocks(block_tables, lengths, starts, *cache.shape[:2])
        spans = torch.tensor(lengths), torch.tensor(starts)
        reference.gather_into(cache.tensor, block_tables, *spans, out, cache.layout, cache.scales)
        return
    from kvpage.kernels import gather

    with torch.cuda.device(cache.device):
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("gather_cache must be given lengths on the device where a graph captures, and out")
        gathered = gather.gather_cache(
            cache.views, block_tables, starts, lengths, out, cache.scales, _error_word(cache.device)
        )
        _check_if_debugging(cache.device)
    if gathered is not None:
        _gathers.keep(cache, block_tables, out, gathered)


def gather_cache_by_device_lengths(
    cache: BoundCache,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor | None,
    out: Out,
) -> None:
    """Copy rows of sequences whose lengths only the device knows into `out`."""
    if not _has_triton():
        raise ValueError("seq_lens must be on the host where Triton is not installed")
    from kvpage.kernels import gather

    with torch.cuda.device(cache.device):
        gather.gather_cache_by_device_lengths(
            cache.views, block_tables, starts, lengths, out, cache.scales, _error_word(cache.device)
        )
        _check_if_debugging(cache.device)


def _check_slots(slots: torch.Tensor, num_slots: int) -> None:
    """Check the slots: torch would end the process for a bad index on a device, and waits for it in any case."""
    bad = (slots < -1) | (slots >= num_slots)
    if bool(bad.any()):
        raise ValueError(f"slot_mapping must be -1 or in [0, {num_slots}), got {int(slots[bad][0])}")


def _check_blocks(
    block_tables: torch.Tensor, lengths: list[int], starts: list[int], num_blocks: int, block_size: int
) -> None:
    for table, start, length in zip(block_tables.tolist(), starts, lengths, strict=True):
        for block_id in table[start // block_size : -(-(start + length) // block_size)] if length else ():
            if not 0 <= block_id < num_blocks:
                raise ValueError(f"block_tables must name blocks in [0, {num_blocks}), got {block_id}")
