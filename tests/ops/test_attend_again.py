"""Layers of a step are launched as the first one like them was: the same grids and numbers, on their own memory."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from kvpage import CacheLayout, KVScales, ops  # noqa: E402
from kvpage.benchmarks.fake_device import fake_device  # noqa: E402
from kvpage.kernels.attention_launch import ALIGNED  # noqa: E402
from kvpage.kernels.prepared import Prepared, addresses_of  # noqa: E402
from kvpage.layout.attention import Attention  # noqa: E402

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NUM_BLOCKS, NUM_HEADS, SIZE = 160, 4, 64
LAYOUTS = {
    "bf16": CacheLayout(16, 2, SIZE, BF16),
    "HND": CacheLayout(16, 2, SIZE, BF16, kv_layout="HND"),
    "e4m3": CacheLayout(16, 2, SIZE, torch.float8_e4m3fn),
    "int8": CacheLayout(16, 2, SIZE, torch.int8),
    "latents": CacheLayout(16, 1, SIZE, BF16, backend="mla"),
}
STEPS = {  # queries of each sequence; and the longest one
    "decodes": ([1] * 5, 2000),
    "short decodes": ([1] * 5, 20),
    "a prompt": ([40], 2000),
    "mixed": ([1, 1, 1, 30, 7], 2000),
}


class Launches:
    """In place of launches: the kernel, grid, addresses and numbers of each, and whether it was repeated."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, object, list[int], object, bool]] = []
        self.compiled: set[int] = set()
        launches = self

        def launch(prepared, grid, tensors, numbers):
            launches.compiled.add(id(prepared))
            launches.made.append((prepared._kernel.__name__, grid, list(addresses_of(tensors)), numbers, False))

        def repeat(prepared, grid, addresses, numbers):
            if id(prepared) not in launches.compiled or not prepared._is_usual(addresses, numbers):
                return False
            launches.made.append((prepared._kernel.__name__, grid, list(addresses), numbers, True))
            return True

        patch.setattr(Prepared, "launch", launch)
        patch.setattr(Prepared, "repeat", repeat)

    def take(self) -> list:
        made, self.made = self.made, []
        return made


def step_of(cache: ops.BoundCache, queries: list[int], longest: int) -> ops.Sequences:
    tables = torch.zeros(len(queries), -(-longest // 16), dtype=torch.int32)
    counts = None if max(queries) == 1 else torch.tensor(queries)
    num_decodes = next((index for index, count in enumerate(queries) if count > 1), len(queries))
    lengths = torch.full((len(queries),), longest)
    return ops.Sequences.of_step(
        cache, sum(queries), tables, lengths, counts, max(queries), longest, num_decodes if counts is not None else 0
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_another_layer_is_launched_as_if_it_were_the_first(monkeypatch, kind: str, step: str) -> None:
    layout, launches = LAYOUTS[kind], Launches(monkeypatch)
    with fake_device() as device, torch.no_grad():
        caches = layout.allocate(NUM_BLOCKS, 2, CPU)
        scales = KVScales.of(0.5, 0.25) if kind == "e4m3" else None
        layers = [ops.BoundCache(cache, layout, scales) for cache in caches]
        for layer in layers:
            layer.is_cuda = True
        queries, longest = STEPS[step]
        sequences, attention = step_of(layers[0], queries, longest), Attention(0.125, value_size=32)
        first, second = torch.zeros(2, sum(queries), NUM_HEADS, SIZE, dtype=BF16)
        ops.attend(first, layers[0], sequences, attention)
        launches.take()
        out = ops.attend(second, layers[1], sequences, attention)
        again = launches.take()
        sequences.launches.clear()
        ops.attend(second, layers[1], sequences, attention)
        anew = launches.take()
    assert device is not None and out.shape == (sum(queries), NUM_HEADS, 32)
    assert all(repeated for *_, repeated in again) and not any(repeated for *_, repeated in anew)
    assert [one[:2] for one in again] == [one[:2] for one in anew]
    assert [one[3] for one in again] == [one[3] for one in anew]
    check_addresses(again, anew, out)


def check_addresses(again: list, anew: list, out: torch.Tensor) -> None:
    """All but results are where the others are; those of a launch begin where its rows do, and none is unaligned."""
    row_bytes, row = out.stride(0) * out.element_size(), 0
    for (name, _, given, numbers, _), (_, _, expected, *_) in zip(again, anew, strict=True):
        if name == "merge_splits_kernel":
            assert given[3:] == expected[3:]
            continue
        assert given[0] == expected[0] and given[2:11] == expected[2:11] and given[13] == expected[13]
        assert given[1] == out.data_ptr() + row * row_bytes
        assert [bool(place) for place in given] == [bool(place) for place in expected]
        assert not any(given[place] % 16 for place in ALIGNED)
        row += numbers[7]
    assert row == len(out)


@pytest.mark.parametrize("queries", [[1] * 5, [1, 1, 1, 30, 7]], ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_another_layer_over_shared_keys_is_launched_as_the_first(monkeypatch, kind: str, queries: list[int]) -> None:
    """Groups, own keys and the merging of both; then prompts."""
    layout, launches = LAYOUTS[kind], Launches(monkeypatch)
    num_decodes = queries.count(1)
    with fake_device() as device, torch.no_grad():
        layers = [device.bound(cache, layout) for cache in layout.allocate(NUM_BLOCKS, 2, CPU)]
        sequences, attention = step_of(layers[0], queries, 2000), Attention(0.125, value_size=32)
        tables, lengths = sequences.block_tables[:num_decodes], [2000] * num_decodes
        sequences.shared = ops.shared_prefixes(tables, lengths, 16)
        first, second = torch.zeros(2, sum(queries), NUM_HEADS, SIZE, dtype=BF16)
        ops.attend(first, layers[0], sequences, attention)
        launches.take()
        out = ops.attend(second, layers[1], sequences, attention)
        again = launches.take()
        sequences.launches.clear()
        ops.attend(second, layers[1], sequences, attention)
        anew = launches.take()
    names = ["paged_attention_kernel", "paged_attention_kernel", "merge_shared_kernel"]
    assert [name for name, *_ in again[:3]] == names and len(again) == (3 if num_decodes == len(queries) else 5)
    assert all(repeated for *_, repeated in again) and not any(repeated for *_, repeated in anew)
    for (*form, given, numbers, _), (*other_form, expected, other_numbers, _) in zip(again, anew, strict=True):
        assert (form, numbers, len(given)) == (other_form, other_numbers, len(expected))
        assert [bool(place) for place in given] == [bool(place) for place in expected]
    for (*_, given, _, _), (*_, expected, _, _) in zip(again[:2], anew[:2], strict=True):
        same = [place for place in range(15) if place not in (1, 11, 12)]  # all but results
        assert [given[place] for place in same] == [expected[place] for place in same]
        assert given[1] == out.data_ptr() and given[14] == sequences.shared.data_ptr()
    (_, _, groups, *_), (_, _, own, *_), (_, _, merged, *_) = again[:3]
    assert merged == [out.data_ptr(), *own[11:13], *groups[11:13], own[8], sequences.shared.data_ptr()]


@pytest.mark.parametrize("change", ["sinks", "positions", "window", "scale", "heads", "dtype", "negative"])
def test_a_layer_of_another_kind_is_launched_anew(monkeypatch, change: str) -> None:
    launches, layout = Launches(monkeypatch), LAYOUTS["bf16"]
    with fake_device() as device, torch.no_grad():
        cache = device.bound(layout.allocate(NUM_BLOCKS, 1, CPU)[0], layout)
        sequences, query = step_of(cache, [3, 4], 100), torch.zeros(7, NUM_HEADS, SIZE, dtype=BF16)
        options = {"scale": 0.125, "value_size": SIZE}
        ops.attend(query, cache, sequences, Attention(**options))
        launches.take()
        if change == "sinks":
            options["sinks"] = torch.zeros(NUM_HEADS)
        elif change == "positions":
            options["query_positions"] = torch.arange(7)
        elif change == "window":
            options["sliding_window"] = 5
        elif change == "scale":
            options["scale"] = 0.5
        elif change == "heads":
            query = torch.zeros(7, 2 * NUM_HEADS, SIZE, dtype=BF16)
        elif change == "dtype":
            query = query.float()
        else:
            query = torch._neg_view(query)
        ops.attend(query, cache, sequences, Attention(**options))
        assert not launches.take()[0][4]


def test_tables_and_caches_that_have_moved_are_refused(monkeypatch) -> None:
    Launches(monkeypatch)
    layout = LAYOUTS["bf16"]
    with fake_device() as device, torch.no_grad():
        cache = device.bound(layout.allocate(NUM_BLOCKS, 1, CPU)[0], layout)
        sequences, query = step_of(cache, [1, 1], 100), torch.zeros(2, NUM_HEADS, SIZE, dtype=BF16)
        attention = Attention(0.125, value_size=SIZE)
        ops.attend(query, cache, sequences, attention)
        with pytest.raises(ValueError, match="query must have 2 rows"):
            ops.attend(query[:1], cache, sequences, attention)
        sequences.block_tables.set_(torch.zeros_like(sequences.block_tables))
        with pytest.raises(ValueError, match="block_tables must keep the memory"):
            ops.attend(query, cache, sequences, attention)
