"""Where segments begin and end, what is kept of them, and the config."""

import random

import numpy as np
import pytest
import torch

from kvpage.blend import BlendConfig, ContentBoundaries, MemorySegments, Reuse, SegmentKV, StoredSegments
from kvpage.blend.spans import spans_by_separator, spans_of_lengths
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata

L, H, D = 2, 3, 8


def tokens_of(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def segment(num_tokens: int, is_standalone: bool = False, start: int = 0, seed: int = 0) -> SegmentKV:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(L, num_tokens, H, D, generator=generator) for _ in "kv")
    return SegmentKV(k, v, torch.arange(start, start + num_tokens), is_standalone)


# --- spans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, separator, expected",
    [
        ([], [9], []),
        ([9], [9], [(0, 1)]),
        ([1, 9, 9, 2], [9], [(0, 2), (2, 3)]),
        ([1, 2], [9], []),
        ([1], [9, 9], []),
        ([1, 9, 9, 9, 2, 9, 9], [9, 9], [(0, 3), (3, 7)]),  # overlapping separators: the first one counts
        ([1, 9, 8, 2, 9, 8, 3], [9, 8], [(0, 3), (3, 6)]),
        ([1, 2, 3], [], []),
    ],
)
def test_separators_end_segments(tokens: list[int], separator: list[int], expected: list[tuple[int, int]]) -> None:
    assert spans_by_separator(tokens_of(*tokens), separator) == expected


def test_lengths_are_segments_from_the_first_token_on() -> None:
    assert spans_of_lengths([2, 1, 3], 7) == [(0, 2), (2, 3), (3, 6)]
    assert spans_of_lengths([], 0) == []
    assert spans_of_lengths([4], 4) == [(0, 4)]
    for lengths, message in (([0], "positive"), ([-1], "positive"), ([1.0], "positive"), ([3, 2], "fit into 4 tokens")):
        with pytest.raises(ValueError, match=f"segments must .*{message}"):
            spans_of_lengths(lengths, 4)


def test_the_part_of_a_reuse_behind_a_position() -> None:
    kept = segment(5)
    one = Reuse(kept, 1, 10, 4)
    assert one.after(0) is not None and one.after(10) == one
    assert one.after(12) == Reuse(kept, 3, 12, 2)
    assert one.after(13) == Reuse(kept, 4, 13, 1) and one.after(14) is None
    key, value = one.after(12).rows(1)
    assert torch.equal(key, kept.k[1, 3:5]) and torch.equal(value, kept.v[1, 3:5])


# --- in memory -------------------------------------------------------------------------------------------------------


def test_memory_forgets_what_was_found_longest_ago() -> None:
    bytes_each = segment(1).num_bytes
    cache, oracle = MemorySegments(6 * bytes_each), {}  # by tokens, the last used last
    rng = random.Random(5)
    for step in range(400):
        tokens = tokens_of(*range(rng.randint(1, 5)))
        key, is_standalone = len(tokens), rng.random() < 0.3
        if rng.random() < 0.5:
            one = segment(len(tokens), is_standalone, seed=step)
            wanted = key not in oracle or (is_standalone and not oracle[key].is_standalone)
            assert cache.wants(tokens, is_standalone, False) is wanted
            cache.keep(tokens, one)
            if wanted:
                oracle.pop(key, None)
                oracle[key] = one
                while sum(oracle) > 6:
                    del oracle[next(iter(oracle))]
        else:
            assert cache.find(tokens) is oracle.get(key)
            if key in oracle:
                oracle[key] = oracle.pop(key)
        assert (len(cache), cache.num_bytes) == (len(oracle), sum(oracle) * bytes_each)


def test_memory_keeps_tenants_apart_and_nothing_that_is_too_large() -> None:
    cache, tokens = MemorySegments(segment(3).num_bytes), tokens_of(1, 2, 3)
    cache.keep(tokens, segment(3), b"a")
    assert cache.find(tokens) is None and cache.find(tokens, b"a") is not None
    cache.keep(tokens_of(1, 2, 3, 4), segment(4), b"a")
    assert cache.find(tokens, b"a") is not None and len(cache) == 1
    with pytest.raises(ValueError, match="max_bytes must be positive, got 0"):
        MemorySegments(0)


# --- in a store ------------------------------------------------------------------------------------------------------


def test_a_segment_is_of_one_length() -> None:
    k = torch.zeros(L, 3, H, D)
    for v, positions in ((k[:, :2], torch.arange(3)), (k[:1], torch.arange(3)), (k, torch.arange(2))):
        with pytest.raises(ValueError, match="k, v and positions must be of the same layers and tokens"):
            SegmentKV(k, v, positions, True)


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
def test_a_store_keeps_them(fmt: str) -> None:
    config = KVStoreConfig(chunk_size=4, tiers=("memory://?size=4MiB",), num_threads=1)
    with KVStore(config, KVStoreMetadata("m", fmt=fmt, kv_dtype=torch.float32)) as store:
        cache, tokens = StoredSegments(store), tokens_of(*range(10, 19))
        assert cache.find(tokens) is None and cache.wants(tokens, False, False) and cache.wants(tokens, True, False)
        in_context, standalone = segment(9, False, 5, 1), segment(9, True, 0, 2)
        cache.keep(tokens, in_context)
        check(cache.find(tokens), in_context, 9)
        assert not cache.wants(tokens, False, False) and cache.wants(tokens, True, False)
        assert cache.wants(tokens, False, False, b"tenant")
        cache.keep(tokens, standalone)
        check(cache.find(tokens), standalone, 9)
        assert not cache.wants(tokens, True, False) and not cache.wants(tokens, False, False)
        check(cache.find(np.append(tokens, np.int32(3))), standalone, 8)  # whole chunks of a longer one
        assert cache.wants(np.append(tokens, np.int32(3)), False, False)


def check(found: SegmentKV | None, expected: SegmentKV, num_tokens: int) -> None:
    assert found is not None and found.num_tokens == num_tokens and found.is_standalone == expected.is_standalone
    assert torch.equal(found.k, expected.k[:, :num_tokens]) and torch.equal(found.v, expected.v[:, :num_tokens])
    assert torch.equal(found.positions, expected.positions[:num_tokens])


# --- config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"ratio": 1.1}, r"ratio must be in \[0, 1\], got 1.1"),
        ({"ratio": -0.1}, r"ratio must be in \[0, 1\]"),
        ({"ratio": float("nan")}, r"ratio must be in \[0, 1\]"),
        ({"ratio": True}, r"ratio must be in \[0, 1\]"),
        ({"check_layer": -1}, "check_layer must be an integer of at least 0, got -1"),
        ({"check_layer": 1.0}, "check_layer must be an integer of at least 0, got 1.0"),
        ({"max_bytes": 0}, "max_bytes must be an integer of at least 1, got 0"),
        ({"metric": "q"}, "metric must be one of k, v, kv, got 'q'"),
        ({"filters": [(1, 0.5)]}, "filters must be empty without a check_layer, got"),
        ({"filters": torch.ones(2, 2)}, "filters must be empty without a check_layer, got"),
        ({"check_layer": 2, "filters": [(2, 0.5)]}, "filters must be of layers from 0 to under 2, got 2"),
        ({"check_layer": 2, "filters": [(-1, 0.5)]}, "filters must be of layers from 0 to under 2, got -1"),
        ({"check_layer": 2, "filters": [(True, 0.5)]}, "filters must be of layers .* got True"),
        ({"check_layer": 2, "filters": [(1, 1.5)]}, r"filters' ratios must be in \[0, 1\], got 1.5"),
        ({"check_layer": 3, "filters": [(1, 0.3), (2, 0.5)]}, "filters must have rising layers and ratios that do not"),
        ({"seam": -1.0}, "seam must be finite and not negative, got -1.0"),
        ({"seam": float("inf")}, "seam must be finite and not negative, got inf"),
        ({"seam": float("nan")}, "seam must be finite and not negative, got nan"),
        ({"check_layer": 3, "filters": [(2, 0.5), (1, 0.3)]}, "filters must have rising layers"),
        ({"separator": ["#"]}, "separator must be token ids"),
        ({"deadline": -1}, "deadline must not be negative, got -1"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlendConfig(**fields)
    with pytest.raises(ValueError, match="boundaries must be None with a separator"):
        BlendConfig(separator=[1], boundaries=ContentBoundaries())
    with pytest.raises(TypeError, match="boundaries must be ContentBoundaries, got int"):
        BlendConfig(boundaries=3)
    assert BlendConfig(separator=[1, 2]).separator == (1, 2)


@pytest.mark.parametrize("num_layers, expected", [(1, 0), (2, 1), (3, 1), (32, 1)])
def test_the_second_layer_is_the_check_layer_unless_one_is_named(num_layers: int, expected: int) -> None:
    assert BlendConfig().stages_of(num_layers) == ((expected, 0.15),)
    assert BlendConfig(0.3, check_layer=0).stages_of(num_layers) == ((0, 0.3),)
    with pytest.raises(ValueError, match=f"check_layer must be under {num_layers}, got {num_layers}"):
        BlendConfig(check_layer=num_layers).stages_of(num_layers)


def test_filters_keep_no_less_than_the_check_layer() -> None:
    filters = [(1, 0.5), (3, 0.3)]
    assert BlendConfig(0.15, 4, filters=filters).stages_of(5) == ((1, 0.5), (3, 0.3), (4, 0.15))
    assert BlendConfig(0.4, 4, filters=filters).stages_of(5) == ((1, 0.5), (3, 0.4), (4, 0.4))
    assert BlendConfig(1.0, 4, filters=filters).stages_of(5) == ((1, 1.0), (3, 1.0), (4, 1.0))
