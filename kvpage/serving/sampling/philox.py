"""Philox-4x32-10: compute random numbers from a key and a counter, in any order and on any device.

    key = seed     counter = (position, position >> 32, stream, 0)     ─► 4 words of 32 bits

After J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

import numpy as np
import numpy.typing as npt

NUM_ROUNDS = 10
MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
LOW = np.uint64(2**32 - 1)
HALF = np.uint64(32)


def philox4x32(counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the random words of each column, [4, n]. counters: [4, n]; keys: [2, n]; words of 32 bits as uint64."""
    even, odd = counters[0::2], counters[1::2]
    for number in range(NUM_ROUNDS):
        products = even * MULTIPLIERS
        even, odd = (products >> HALF)[::-1] ^ odd ^ keys, (products & LOW)[::-1]
        if number + 1 < NUM_ROUNDS:
            keys = (keys + KEY_STEPS) & LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike, stream: int = 0) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1 - 2**-53] for each seed and position, both [n] in [0, 2**64)."""
    seeds, positions = np.asarray(seeds, np.uint64), np.asarray(positions, np.uint64)
    counters = np.zeros((4, len(positions)), np.uint64)
    counters[0], counters[1], counters[2] = positions & LOW, positions >> HALF, stream
    words = philox4x32(counters, np.stack([seeds & LOW, seeds >> HALF]))
    mantissas = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = mantissas.astype(np.float64) * 2.0**-53
    return numbers
