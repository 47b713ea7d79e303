"""How much rows change with what stands before them: measured, kept, and compared with what a check layer sees."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpage.blend import MemorySegments, Reuse, SegmentKV, SegmentStore, StoredSegments, measure_sensitivity
from kvpage.blend.selection import ranks
from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata

L, H, D, C = 2, 3, 8, 4


def rows(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(L, num_tokens, H, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def segment(num_tokens: int, is_standalone: bool = True, sensitivity: torch.Tensor | None = None) -> SegmentKV:
    return SegmentKV(rows(num_tokens), rows(num_tokens, 1), torch.arange(num_tokens), is_standalone, sensitivity)


def make_store(fmt: str = "vllm", dtype: torch.dtype = torch.float32, tier: str = "memory://?size=4MiB") -> KVStore:
    config = KVStoreConfig(chunk_size=C, tiers=(tier,), num_threads=1)
    return KVStore(config, KVStoreMetadata("m", fmt=fmt, kv_dtype=dtype))


# --- measured --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_it_is_the_change_of_v_over_its_size_in_each_layer(num_tokens: int, dtype: torch.dtype) -> None:
    alone, behind = rows(num_tokens, 1, dtype), rows(num_tokens, 2, dtype)
    alone[1] *= 100  # a layer of large numbers counts no more
    expected = torch.zeros(num_tokens)
    for before, now in zip(alone.double(), behind.double(), strict=True):
        for token in range(num_tokens):
            expected[token] += (now[token] - before[token]).square().mean() / before.square().mean() / L
    found = measure_sensitivity(zip(alone, behind, strict=True))
    assert found.dtype == torch.float32 and torch.allclose(found, expected, rtol=1e-4)


def test_what_does_not_change_has_none_and_what_is_no_number_is_not_known() -> None:
    alone, behind = rows(5), rows(5)
    behind[:, 2] += 1.0
    found = measure_sensitivity(zip(alone, behind, strict=True))
    assert [bool(value) for value in found] == [False, False, True, False, False]
    assert measure_sensitivity([(torch.zeros(5, H, D),) * 2]).tolist() == [0.0] * 5
    for number in (float("nan"), float("inf"), 3e38):
        behind[1, 3, 0, 0] = number
        assert measure_sensitivity(zip(alone, behind, strict=True)) is None


# --- compared --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="layers must be at least one, got none"):
        measure_sensitivity([])
    with pytest.raises(ValueError, match=r"layers must hold V of one shape, got \[5, 3, 8\] and \[4, 3, 8\]"):
        measure_sensitivity([(rows(5)[0], rows(4)[0])])
    with pytest.raises(ValueError, match="layers must be of the same tokens, got 5 and 1"):
        measure_sensitivity([(rows(5)[0], rows(5)[0]), (rows(1)[0], rows(1)[0])])
    with pytest.raises(ValueError, match="alone must have 3 dimensions"):
        measure_sensitivity([(rows(5), rows(5))])
    with pytest.raises(TypeError, match="after must be a "):
        measure_sensitivity([(rows(5)[0], None)])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1e-30, 0.5, 0.75, 3.0]), st.integers(0, 3)), max_size=40))
def test_ranks_are_shares_of_the_rows_of_a_kind(given_rows: list[tuple[float, int]]) -> None:
    scores = torch.tensor([score for score, _ in given_rows])
    kinds = torch.tensor([kind for _, kind in given_rows], dtype=torch.int64)
    expected = []
    for at, (score, kind) in enumerate(given_rows):
        its = [(other, place) for place, (other, k) in enumerate(given_rows) if k == kind]
        num_before = sum(other > score or (other == score and place < at) for other, place in its)
        expected.append(1 - num_before / len(its))
    assert ranks(scores, kinds).tolist() == pytest.approx(expected)


# --- kept ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[1.0, 2.0, float("nan")], [1.0, float("inf"), 2.0], [1.0, 2.0, -1e-9]])
def test_it_must_be_finite_and_not_negative(values: list[float]) -> None:
    with pytest.raises(ValueError, match="sensitivity must be finite and not negative"):
        segment(3, sensitivity=torch.tensor(values))


def test_it_must_be_a_number_a_token() -> None:
    with pytest.raises(ValueError, match="sensitivity must be of 3 tokens, got 2"):
        segment(3, sensitivity=torch.ones(2))
    with pytest.raises(TypeError, match="sensitivity must be a "):
        segment(3, sensitivity=[1.0, 2.0, 3.0])
    assert segment(3, sensitivity=torch.ones(3, dtype=torch.float64)).sensitivity.dtype == torch.float32


def test_of_the_tokens_that_are_reused() -> None:
    known = segment(5, sensitivity=torch.arange(5.0))
    assert Reuse(known, 1, 10, 3).sensitivity().tolist() == [1.0, 2.0, 3.0]
    assert Reuse(known, 0, 10, 5).after(12).sensitivity().tolist() == [2.0, 3.0, 4.0]
    assert Reuse(segment(5), 1, 10, 3).sensitivity() is None
    # With nothing before the segment its rows are what they were.
    assert (
        Reuse(known, 2, 2, 3).sensitivity().tolist() == Reuse(segment(5), 2, 2, 3).sensitivity().tolist() == [0.0] * 3
    )
    assert Reuse(segment(5, False), 2, 2, 3).sensitivity() is None


@pytest.mark.parametrize("kind", ["memory", "store", "disk"])
def test_the_better_one_of_a_segment_is_kept(kind: str, tmp_path: Path) -> None:
    tokens, zeros = np.arange(5, dtype=np.int32), torch.zeros(5)
    each = {"context": segment(5, False), "alone": segment(5), "measured": segment(5, True, zeros)}
    tier = f"disk://{tmp_path}?size=16MiB&segment=8MiB" if kind == "disk" else "memory://?size=4MiB"
    with make_store(tier=tier) as store:
        for order, expected in (
            (["context", "alone", "measured"], [None, None, 0.0]),
            (["measured", "alone", "context"], [0.0, 0.0, 0.0]),
            (["context", "measured", "alone"], [None, 0.0, 0.0]),
        ):
            store.clear()
            cache = MemorySegments(1 << 20) if kind == "memory" else StoredSegments(store)
            for name, value in zip(order, expected, strict=True):
                cache.keep(tokens, each[name])
                found = cache.find(tokens)
                assert (None if found.sensitivity is None else found.sensitivity[0].item()) == value
            assert found.is_standalone
            if kind == "memory":
                assert cache.num_bytes == each["alone"].num_bytes and len(cache) == 1


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, C - 1, C, C + 1, 3 * C + 2])
def test_it_comes_back_bit_by_bit(num_tokens: int, dtype: torch.dtype, fmt: str) -> None:
    values = torch.rand(num_tokens, generator=torch.Generator().manual_seed(3))
    values[0] = 0.0
    values[-1] *= 1e-40  # no normal number
    kv = torch.stack([rows(num_tokens, 0, dtype), rows(num_tokens, 1, dtype)], 1)
    kv = kv if fmt == "vllm" else kv.transpose(2, 3).contiguous()
    with make_store(fmt, dtype) as store:
        segments = SegmentStore(store)
        segments.put(range(num_tokens), kv, range(num_tokens), True, sensitivity=values).result()
        found = segments.get(range(num_tokens))
        assert torch.equal(found.sensitivity.view(torch.int32), values.view(torch.int32))
        assert torch.equal(found.kv, kv) and found.positions.tolist() == list(range(num_tokens))


@pytest.mark.parametrize("kind", ["memory", "store"])
def test_one_is_wanted_that_is_better_than_what_there_is(kind: str) -> None:
    tokens, zeros = np.arange(5, dtype=np.int32), torch.zeros(5)
    each = [(False, False), (True, False), (True, True)]
    with make_store() as store:
        for have, (is_standalone, is_measured) in enumerate(each):
            store.clear()
            cache = MemorySegments(1 << 20) if kind == "memory" else StoredSegments(store)
            assert all(cache.wants(tokens, *flags) for flags in each)
            cache.keep(tokens, segment(5, is_standalone, zeros if is_measured else None))
            assert [cache.wants(tokens, *flags) for flags in each] == [place > have for place in range(3)]
            assert all(cache.wants(tokens, *flags, b"tenant") for flags in each)
            assert all(cache.wants(np.arange(6, dtype=np.int32), *flags) for flags in each)
        with pytest.raises(ValueError, match="sensitivity must be None of a segment that is not standalone"):
            cache.wants(tokens, False, True)
        for flags in ((1, False), (True, None)):
            with pytest.raises(TypeError, match="must be True or False"):
                cache.wants(tokens, *flags)


def test_of_two_that_begin_alike_the_measured_one_says_nothing_of_the_other() -> None:
    kv = torch.stack([rows(2 * C), rows(2 * C, 1)], 1)
    one, other = [*range(2 * C)], [*range(C), *range(50, 50 + C)]
    with make_store() as store:
        segments = SegmentStore(store)
        segments.put(other, kv, range(2 * C), True).result()
        segments.put(one, kv, range(2 * C), True, sensitivity=torch.arange(2.0 * C)).result()
        assert segments.get(one).sensitivity.tolist() == [*range(2 * C)]
        found = segments.get(other)
        assert found.num_tokens == 2 * C and found.sensitivity is None
        assert segments.get([*range(C), 99]).sensitivity.tolist() == [*range(C)]


def test_only_what_was_computed_by_itself_has_one() -> None:
    kv, message = torch.stack([rows(5), rows(5, 1)], 1), "sensitivity must be None of a segment that is not standalone"
    with pytest.raises(ValueError, match=message):
        segment(5, False, torch.zeros(5))
    with make_store() as store:
        with pytest.raises(ValueError, match=message):
            SegmentStore(store).put(range(5), kv, range(5), False, sensitivity=torch.zeros(5))
        assert SegmentStore(store).lookup(range(5)) == 0


@pytest.mark.parametrize("word", [0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0xBF800000])
def test_what_cannot_be_one_is_not_known(word: int) -> None:
    tokens, kv = np.arange(5, dtype=np.int32), torch.stack([rows(5), rows(5, 1)], 1)
    tag = torch.zeros(1, 2, 5, H, D)
    words = np.stack([np.arange(5), np.zeros(5), np.arange(5), np.full(5, 0x3F800000)], 1).astype(np.uint32)
    words[3, 3] = word
    tag.view(torch.uint8)[0, 0, :, 0, :16] = torch.from_numpy(words.view(np.uint8).copy()).view(5, 16)
    with make_store() as store:
        store.store(tokens, torch.cat([kv, tag]), namespace=b"blend\0measured\0").result()
        found = SegmentStore(store).get(tokens)
        assert torch.equal(found.kv, kv) and found.sensitivity is None
        assert SegmentStore(store).get(tokens[:3]) is None  # chunks are of four tokens
        assert StoredSegments(store).find(tokens).sensitivity is None
