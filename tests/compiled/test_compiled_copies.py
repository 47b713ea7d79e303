"""The kernel that copies blocks, as nvcc compiles it, against plain copies: each width of a vector, each room for its
parameters."""

import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.ptx.kernel import Kernel, random_picks

CSRC = Path(__file__).parents[2] / "csrc"
SOURCE = CSRC / "copy" / "sm_kernel" / "sm_kernel.cu"
VECTORS = {"NS_8Vector16E": 16, "m": 8, "j": 4, "t": 2, "h": 1}  # as C++ writes them in names
UNIT_VECTORS = 32 * 4  # of a warp: 32 lanes, 4 each
THREADS = 256


@pytest.fixture(scope="module", params=[80, 90], ids="sm_{}".format)
def ptx(request, tmp_path_factory):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    out = tmp_path_factory.mktemp("ptx") / "copy.ptx"
    arch = f"-arch=compute_{request.param}"
    subprocess.run(["nvcc", "-std=c++20", "-O3", f"-I{CSRC}", arch, "-ptx", SOURCE, "-o", out], check=True)
    return out.read_text()


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of each block, and where those of block 0 are; the next block's are a step farther."""

    source: int
    target: int
    num_bytes: int
    source_step: int
    target_step: int

    def packed(self, source: int, target: int) -> bytes:
        steps = (self.num_bytes, self.source_step, self.target_step)
        return struct.pack("<QQqqq", source + self.source, target + self.target, *steps)


def make_pieces(sizes: list[int], num_blocks: int, descends: bool) -> list[Piece]:
    """Pieces side by side in a block; the target's blocks may lie in the opposite order."""
    step, start, pieces = sum(sizes), 0, []
    for size in sizes:
        last = (num_blocks - 1) * step if descends else 0
        pieces.append(Piece(start, start + last, size, step, -step if descends else step))
        start += size
    return pieces


def parameters(pieces: list[Piece], pairs: list[tuple[int, int]], vector: int, source: int, target: int) -> bytes:
    per_extent = -(-max(piece.num_bytes for piece in pieces) // (vector * UNIT_VECTORS))
    num_units = per_extent * len(pieces) * len(pairs)
    head = struct.pack("<QQqqq", 0, 0, len(pieces), num_units, per_extent)
    tail = b"".join(piece.packed(source, target) for piece in pieces)
    return head + tail + b"".join(struct.pack("<ii", *pair) for pair in pairs)


def aligned_memory(num_bytes: int) -> np.ndarray:
    memory = np.random.default_rng(1).integers(0, 256, num_bytes + 16, dtype=np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + num_bytes]


ROOMS = [*((8128, *each) for each in VECTORS.items()), (32640, "NS_8Vector16E", 16), (32640, "h", 1)]


@pytest.mark.parametrize("room, name, vector", ROOMS)
def test_every_vector_and_room(ptx, room, name, vector):
    entry = re.search(rf"\.entry\s+([\w$]*copy_inlineI{name}Ll{room}E[\w$]*)", ptx)[1]
    kernel, rng = Kernel(ptx, entry), np.random.default_rng(vector)
    short, long = [([1], False)], [([33, 127, 3], True), ([128, 129, 300], False)]
    num_pairs, num_blocks = (5, 3) if room == 8128 else (1030, 24)  # as many as the smaller room has no place for
    for counts, descends in short + (long if room == 8128 else []):
        pieces = make_pieces([count * vector for count in counts], num_pairs + 2, descends)
        size = pieces[0].source_step * (num_pairs + 2)
        source, target = aligned_memory(size), aligned_memory(size)
        target[:] = 0xEE
        want, sources, targets = target.copy(), *(rng.permutation(num_pairs + 2)[:num_pairs] for _ in range(2))
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        for piece in pieces:
            for one, other in pairs:
                begin, end = piece.source + one * piece.source_step, piece.target + other * piece.target_step
                want[end : end + piece.num_bytes] = source[begin : begin + piece.num_bytes]
        given = kernel.pack([parameters(pieces, pairs, vector, source.ctypes.data, target.ctypes.data)])
        regions = [(memory.ctypes.data, memory.nbytes) for memory in (source, target)]
        pick = random_picks(1) if (room, counts) == (8128, [1]) else None
        kernel.launch((num_blocks, 1, 1), THREADS, given, regions, pick=pick)
        assert np.array_equal(target, want)
