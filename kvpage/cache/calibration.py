"""Calibration: up to which size of extents the SM kernel beats the copy engines, between pinned memory and one device.

    GB/s │            engine ____________        The engines copy extents one after the other, each at a fixed cost.
         │                 ╱                     The kernel pays nothing for one more, but with its few multiprocessors
         │  kernel ──────╱──────────────         it may not reach the engines' full rate. So the lines cross once.
         │             ╱                         The device, the driver, the bus and the direction decide where.
         └───────────────────────── extent
           2 KiB             2 MiB

`calibrate(device)` measures it in a fraction of a second and keeps it for the process.
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
    """Rates of both executors, in GB/s (10^9 bytes), for pieces at random places.

    Attributes:
        piece_bytes: Bytes of a piece.
        engine: The copy engines' rate.
        kernel: The kernel's rate.
    """

    piece_bytes: int
    engine: float
    kernel: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurement of one device.

    Attributes:
        device: The device's name.
        max_groups: Thread groups that the kernel may take.
        swap_in: Rates from host to device, from the smallest pieces to the largest that were measured.
        swap_out: Rates from device to host.
        max_bytes_in: The largest extents, on average, that the kernel copies to the device; 0 if it never wins.
        max_bytes_out: The same from the device.
        seconds: Duration of the measurement, allocation included.
    """

    device: str
    max_groups: int
    swap_in: tuple[Throughput, ...]
    swap_out: tuple[Throughput, ...]
    max_bytes_in: int
    max_bytes_out: int
    seconds: float


def find_crossover(table: Sequence[Throughput]) -> int:
    """Return the piece size up to which the kernel should copy: 0 for never, the last one of the table for always.

    Of all places for the border, the cheapest in total is taken; a size's cost is the logarithm of the ratio by which
    the other executor was faster. So one noisy figure among many moves the border little. The kernel has to be MIN_GAIN
    times as fast. Of equal places the smallest is taken.

    Args:
        table: Rates, ascending by size.

    Raises:
        ValueError: The sizes do not ascend, or a rate is not positive.
    """
    if any(a.piece_bytes >= b.piece_bytes for a, b in zip(table, table[1:], strict=False)):
        raise ValueError(f"table must ascend by piece_bytes, got {[row.piece_bytes for row in table]}")
    best = least = 0.0
    crossover = 0
    for row in table:  # least: the gain of the line above this row over the line below the first
        if row.engine <= 0 or row.kernel <= 0:
            raise ValueError(f"table must hold positive rates, got {row}")
        least += math.log(row.kernel / (row.engine * MIN_GAIN))
        if least > best:
            best, crossover = least, row.piece_bytes
    return crossover


def calibrate(device: torch.device | str | int = "cuda", max_groups: int = MAX_GROUPS) -> Calibration:
    """Measure both executors between pinned memory and a device, in less than a second, once per process and device.

    It takes 32 MiB of memory on either side while it runs. It does not wait for other work on the device, which would
    spoil the figures. So call it, or make the first CacheEngine, before the serving begins.

    Args:
        device: A CUDA device.
        max_groups: Thread groups that the kernel may take.

    Returns:
        The rates of both executors in both directions, and the sizes up to which the kernel is faster.

    Raises:
        ValueError: The device is not CUDA, or a graph is captured.
        RuntimeError: CUDA cannot be used.
    """
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if target.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {target}")
    error = _C.cuda_error()
    if error is not None or not torch.cuda.is_available():
        raise RuntimeError(f"calibrate needs CUDA: {error or 'this torch cannot use it'}")
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("calibrate must not be called while a graph is captured")
    return _calibrate(torch.cuda.current_device() if target.index is None else target.index, max_groups)


@functools.cache
def _calibrate(index: int, max_groups: int) -> Calibration:
    start = time.perf_counter()
    device = torch.device("cuda", index)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]  # torch does not annotate it
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
    """Measure pieces at random places of both buffers, so that no two of them are neighbours on both sides."""
    layout = CacheLayout(1, 1, piece_bytes, torch.uint8, backend="mla")
    num_pieces = len(src) // piece_bytes
    srcs, dsts = ([side.view(layout.shape(num_pieces))] for side in (src, dst))
    order = torch.randperm(num_pieces, generator=torch.Generator().manual_seed(0))
    mapping = torch.stack([order, order.roll(1)], 1)[:MAX_PIECES]
    engine = BlockCopier(srcs, dsts, layout, 0, max_groups)
    kernel = BlockCopier(srcs, dsts, layout, piece_bytes, max_groups)
    seconds = [_fastest(copier, mapping, stream) for copier in (engine, kernel)]
    num_bytes = len(mapping) * piece_bytes
    return Throughput(piece_bytes, *(num_bytes / elapsed / 1e9 for elapsed in seconds))


def _fastest(copier: BlockCopier, mapping: torch.Tensor, stream: torch.cuda.Stream) -> float:
    """Return the seconds from the call until the bytes have arrived, the host's part included. Round 1 warms up."""
    rounds = []
    for _ in range(ROUNDS + 1):
        stream.synchronize()
        start = time.perf_counter()
        copier.run(mapping)
        stream.synchronize()
        rounds.append(time.perf_counter() - start)
    return min(rounds[1:])
