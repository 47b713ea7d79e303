"""Numbers of each type for tests of instructions: half of them random, half those at which something changes."""

import numpy as np

COUNT = 160
F16, F32, F64 = np.float16, np.float32, np.float64
MOST = 2.0**31  # what an integer of 32 bits cannot hold
SPECIAL: dict[type, list[float]] = {
    F32: [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-42, 3.4e38, 0.5, 1.5, 2.5, -2.5, 300.0, MOST, -MOST],
    F16: [0.0, -0.0, 1.0, -1.5, np.inf, np.nan, 6e-8, 65504.0, 0.5, 2.5],
    F64: [0.0, -0.0, 1.0, np.inf, np.nan, 1e-300, 0.1],
}


def values_of(dtype: type, seed: int) -> np.ndarray:
    rng, kind = np.random.default_rng(seed), np.dtype(dtype)
    if kind.kind == "f":
        special = np.array(SPECIAL[kind.type], kind)
        plain = rng.standard_normal(COUNT) * 2.0 ** rng.integers(-12, 12, COUNT)
    else:
        info = np.iinfo(kind)
        special = np.array([info.min, info.max, 0, 1, 2, 7, 31, 32, 33, 64, info.max // 2], kind)
        plain = rng.integers(info.min, info.max, COUNT, kind, endpoint=True)
    return np.where(rng.random(COUNT) < 0.5, rng.choice(special, COUNT), plain.astype(kind)).astype(kind)


def small(seed: int, most: int) -> np.ndarray:
    """Return integers below `most`."""
    return np.random.default_rng(seed).integers(0, most, COUNT).astype(np.uint32)
