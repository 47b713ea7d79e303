"""Philox-4x32-10 against the known answers of its authors, and what is made of it."""

import numpy as np
import pytest

from kvpage.serving.sampling.philox import philox4x32, uniforms

ANSWERS = [  # Random123's kat_vectors: counter, key, words
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def column(words: list[int]) -> np.ndarray:
    return np.array(words, np.uint64)[:, None]


@pytest.mark.parametrize("counter, key, words", ANSWERS)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert philox4x32(column(counter), column(key))[:, 0].tolist() == words


def test_columns_are_computed_by_themselves() -> None:
    counters = np.concatenate([column(counter) for counter, _, _ in ANSWERS], axis=1)
    keys = np.concatenate([column(key) for _, key, _ in ANSWERS], axis=1)
    assert philox4x32(counters, keys).T.tolist() == [words for _, _, words in ANSWERS]


def test_uniforms_take_all_bits_of_seed_and_position_and_the_stream() -> None:
    first = uniforms([0], [0])[0]
    assert first == ((0x6627E8D5 << 21) ^ (0xE169C58D >> 11)) * 2.0**-53
    others = [uniforms([2**32], [0])[0], uniforms([0], [2**32])[0], uniforms([0], [0], 1)[0], uniforms([1], [0])[0]]
    assert len({first, *others}) == 5 and uniforms([], []).shape == (0,)
    many = uniforms(np.full(100_000, 2**63 - 1), np.arange(100_000))
    assert many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.005
    counts = np.histogram(many, 256, (0, 1))[0]
    assert ((counts - 390.625) ** 2 / 390.625).sum() < 350  # 255 degrees of freedom: 4.2 sigma
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.015
