"""Measuring a device's memory: what work takes of it at most, and what it keeps."""

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvpage.checks.device_lock import synchronize


class Taken(NamedTuple):
    """Bytes beyond those before some work. most: while it was done. kept: once it was done, and nothing is cached."""

    most: int
    kept: int


def free_bytes(device: torch.device) -> int:
    """Return the device's free memory, once torch's allocator keeps nothing that nobody uses."""
    with torch.cuda.device(device):
        gc.collect()
        synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]


def bytes_taken(device: torch.device, work: Callable[[], object]) -> Taken:
    """Do the work, and return what it has taken: by torch's allocator, and by modules and libraries beside it."""
    free = free_bytes(device)
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    most = torch.cuda.max_memory_reserved(device) - reserved
    num_kept = free - free_bytes(device)
    beside = num_kept - (torch.cuda.memory_reserved(device) - reserved)
    return Taken(max(most + max(beside, 0), 0), max(num_kept, 0))
