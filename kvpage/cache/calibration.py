"""Calibration: up to which size of extents the SM kernel beats the copy engines, between pinned memory and one device.

    GB/s │            engine ____________        The engines work off extents one after the other, each at a fixed cost;
         │                 ╱                     the kernel pays nothing for one more, but may not reach the engines'
         │  kernel ──────╱──────────────         full rate with the few multiprocessors that it may take. So the lines
         │             ╱                         cross once. Where is a matter of device, driver and bus, and of the
         └───────────────────────── extent      direction.
           2 KiB             2 MiB

It is measured in a fraction of a second and kept for the process: `calibrate(device)`.
"""

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

import kvpage._C as _C
from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops.copies import MAX_GROUPS, BlockCopier

MIN_GAIN = 1.05  # the kernel takes multiprocessors from the computation, so a draw is the engines'
PIECE_BYTES = tuple(1 << shift for shift in range(11, 22))  # 2 KiB to 2 MiB
BUFFER_BYTES = 32 << 20
MAX_PIECES = 2048
ROUNDS = 3
SECONDS = 0.8  # after which no further size is measured: with the buffers' allocation, less than a second


class Throughput(NamedTuple):
    """What both executors moved, in GB/s (10^9 bytes), in pieces of so many bytes at random places."""

    piece_bytes: int
    engine: float
    kernel: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured on one device.

    swap_in, swap_out: from host to device and back, from the smallest pieces to the largest that were measured.
    max_bytes_in, max_bytes_out: the largest extents, on average, that the kernel is to copy; 0 if it never wins.
    seconds: what it took, allocation included.
    """

    device: str
    max_groups: int
    swap_in: tuple[Throughput, ...]
    swap_out: tuple[Throughput, ...]
    max_bytes_in: int
    max_bytes_out: int
    seconds: float


def find_crossover(table: Sequence[Throughput]) -> int:
    """The piece size up to which the kernel should copy: 0 for never, the last one of the table for always.

    `table` ascends by size. Of all places where the line could be drawn, the one that costs least in total, a size's
    cost being the logarithm of how much faster the other executor was: one noisy figure among many moves the line
    little. The kernel has to be MIN_GAIN times as fast; of equal places the smallest is taken.
    """
    if any(a.piece_bytes >= b.piece_bytes for a, b in zip(table, table[1:], strict=False)):
        raise ValueError(f"table must ascend by piece_bytes, got {[row.piece_bytes for row in table]}")
    best = least = 0.0
    crossover = 0
    for row in table:  # least: what drawing the line above this row saves over drawing it below the first
        if row.engine <= 0 or row.kernel <= 0:
            raise ValueError(f"table must hold positive rates, got {row}")
        least += math.log(row.kernel / (row.engine * MIN_GAIN))
        if least > best:
            best, crossover = least, row.piece_bytes
    return crossover


def calibrate(device: torch.device | str | int = "cuda", max_groups: int = MAX_GROUPS) -> Calibration:
    """Measures both executors between pinned memory and `device`, in less than a second; once per process and device.

    It takes 32 MiB of memory on either side while it runs, and does not wait for other work on the device, which would
    spoil the figures: call it, or make the first CacheEngine, before the serving begins.

    Raises ValueError for a device that is not CUDA and while a graph is captured; RuntimeError where CUDA cannot be
    used.
    """
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {found}")
    error = _C.cuda_error()
    if error is not None or not torch.cuda.is_available():
        raise RuntimeError(f"calibrate needs CUDA: {error or 'this torch cannot use it'}")
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("calibrate must not be called while a graph is captured")
    return _calibrate(torch.cuda.current_device() if found.index is None else found.index, max_groups)


@functools.cache
def _calibrate(index: int, max_groups: int) -> Calibration:
    start = time.perf_counter()
    device = torch.device("cuda", index)
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        host = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device)
        swap_in: list[Throughput] = []
        swap_out: list[Throughput] = []
        for piece_bytes in PIECE_BYTES:
            if time.perf_counter() - start > SECONDS and swap_out:
                break
            swap_in.append(_measure(host, buffer, piece_bytes, max_groups, stream))
            swap_out.append(_measure(buffer, host, piece_bytes, max_groups, stream))
    return Calibration(
        device=torch.cuda.get_device_name(device),
        max_groups=max_groups,
        swap_in=tuple(swap_in),
        swap_out=tuple(swap_out),
        max_bytes_in=find_crossover(swap_in),
        max_bytes_out=find_crossover(swap_out),
        seconds=time.perf_counter() - start,
    )


def _measure(
    src: torch.Tensor, dst: torch.Tensor, piece_bytes: int, max_groups: int, stream: torch.cuda.Stream
) -> Throughput:
    """Pieces at random places of both buffers, so that no two of them are neighbours on both sides."""
    layout = CacheLayout(1, 1, piece_bytes, torch.uint8, backend="mla")
    num_pieces = len(src) // piece_bytes
    srcs, dsts = ([side.view(layout.shape(num_pieces))] for side in (src, dst))
    order = torch.randperm(num_pieces, generator=torch.Generator().manual_seed(0))
    mapping = torch.stack([order, order.roll(1)], 1)[:MAX_PIECES]
    engine = BlockCopier(srcs, dsts, layout, 0, max_groups)
    kernel = BlockCopier(srcs, dsts, layout, piece_bytes, max_groups)
    seconds = [_fastest(copier, mapping, stream) for copier in (engine, kernel)]
    num_bytes = len(mapping) * piece_bytes
    return Throughput(piece_bytes, *(num_bytes / taken / 1e9 for taken in seconds))


def _fastest(copier: BlockCopier, mapping: torch.Tensor, stream: torch.cuda.Stream) -> float:
    """Seconds from the call until the bytes have arrived, the host's part included; the first round warms up."""
    rounds = []
    for _ in range(ROUNDS + 1):
        stream.synchronize()
        start = time.perf_counter()
        copier.run(mapping)
        stream.synchronize()
        rounds.append(time.perf_counter() - start)
    return min(rounds[1:])
