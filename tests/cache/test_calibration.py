"""Where the line between copy engine and kernel is drawn, on made-up tables; and the measurement, on a GPU."""

import dataclasses

import pytest
import torch

import kvpage
import kvpage._C as _C
from kvpage.cache.calibration import MAX_PIECES, MIN_GAIN, PIECE_BYTES, Throughput, _measure, find_crossover

SIZES = (2, 4, 8, 16, 32)


def table(engine, kernel) -> list[Throughput]:
    return [Throughput(*row) for row in zip(SIZES, engine, kernel, strict=True)]


CASES = {
    "crosses once": ([1, 2, 4, 8, 16], [5, 6, 7, 7, 7], 8),
    "never": ([10, 20, 30, 40, 50], [9, 9, 9, 9, 9], 0),
    "always": ([1, 2, 3, 4, 5], [9, 9, 9, 9, 9], 32),
    "a draw is the engine's": ([5] * 5, [5] * 5, 0),
    "a small gain is none": ([5] * 5, [5 * (1 + 0.9 * (MIN_GAIN - 1))] * 5, 0),
    "just the gain": ([1] * 5, [MIN_GAIN] * 5, 0),
    "enough of a gain": ([5] * 5, [5 * (1 + 1.1 * (MIN_GAIN - 1))] * 5, 32),
    "a noisy figure among wins": ([1, 2, 4.5, 2, 16], [5, 6, 4, 7, 7], 16),
    "a noisy figure among losses": ([1, 20, 20, 20, 20], [5, 6, 7, 21.5, 7], 2),
    "a noisy first figure": ([5.5, 2, 3, 20, 20], [5, 6, 7, 7, 7], 8),
    "the kernel wins for large ones only": ([10, 10, 10, 10, 10], [1, 1, 1, 1, 20], 0),
}


@pytest.mark.parametrize("engine, kernel, expected", CASES.values(), ids=CASES)
def test_crossover(engine, kernel, expected):
    assert find_crossover(table(engine, kernel)) == expected


def test_crossover_is_the_best_line_there_is():
    """Against trying every line, on random tables."""
    for _ in range(200):
        engine, kernel = (1 + 9 * torch.rand(2, 5, dtype=torch.float64)).tolist()
        rows = table(engine, kernel)

        def cost(last, rows=rows):
            gains = torch.tensor([row.kernel / (row.engine * MIN_GAIN) for row in rows], dtype=torch.float64).log()
            chosen = torch.tensor([row.piece_bytes <= last for row in rows])
            return float(torch.where(chosen, -gains.clamp(max=0), gains.clamp(min=0)).sum())

        assert cost(find_crossover(rows)) == pytest.approx(min(cost(last) for last in (0, *SIZES)), abs=1e-12)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([Throughput(4, 1.0, 1.0), Throughput(2, 1.0, 1.0)], r"must ascend by piece_bytes, got \[4, 2\]"),
        ([Throughput(4, 1.0, 1.0), Throughput(4, 1.0, 1.0)], "must ascend"),
        ([Throughput(4, 0.0, 1.0)], "must hold positive rates, got Throughput"),
        ([Throughput(4, 1.0, -1.0)], "must hold positive rates"),
    ],
)
def test_bad_tables(rows, message):
    with pytest.raises(ValueError, match=message):
        find_crossover(rows)


def test_where_it_cannot_run(monkeypatch):
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        kvpage.calibrate("cpu")
    monkeypatch.setattr(_C, "cuda_error", lambda: "no reason")
    with pytest.raises(RuntimeError, match="calibrate needs CUDA: no reason"):
        kvpage.calibrate()
    monkeypatch.setattr(_C, "cuda_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="calibrate needs CUDA: this torch cannot use it"):
        kvpage.calibrate()


class NoStream:
    def synchronize(self):
        pass


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES[0], PIECE_BYTES[-1]])
def test_a_measurement_copies_scattered_pieces(piece_bytes):
    """The measuring itself, between two buffers on the host: which pieces it moves, and that it does."""
    src = torch.arange(8 << 20, dtype=torch.int32).view(torch.uint8)[: 8 << 20]
    dst = torch.zeros_like(src)
    found = _measure(src, dst, piece_bytes, 16, NoStream())
    assert found.piece_bytes == piece_bytes and found.engine > 0 and found.kernel > 0
    rows, sources = (
        dst.view(-1, piece_bytes),
        {bytes(row[:4].tolist()): i for i, row in enumerate(src.view(-1, piece_bytes))},
    )
    moved = {i: sources[bytes(row[:4].tolist())] for i, row in enumerate(rows) if row.any()}
    assert len(set(moved.values())) >= min(len(rows), MAX_PIECES) - 1  # the first piece of the source begins with zeros
    neighbours = sum(moved.get(i + 1, -9) == source + 1 for i, source in moved.items())
    assert neighbours <= 0.01 * len(rows) + 1
    assert all(torch.equal(rows[i], src.view(-1, piece_bytes)[source]) for i, source in moved.items())


@pytest.mark.gpu
def test_gpu_calibration():
    found = kvpage.calibrate("cuda")
    assert found is kvpage.calibrate(torch.device("cuda", torch.cuda.current_device())) is kvpage.calibrate(0)
    for rows in (found.swap_in, found.swap_out):
        assert tuple(row.piece_bytes for row in rows) == PIECE_BYTES[: len(rows)] and rows
        assert all(row.engine > 0 and row.kernel > 0 for row in rows)
    assert (find_crossover(found.swap_in), find_crossover(found.swap_out)) == (found.max_bytes_in, found.max_bytes_out)
    assert dataclasses.is_dataclass(found) and found.device == torch.cuda.get_device_name()
    with pytest.raises(ValueError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kvpage.calibrate("cuda")
