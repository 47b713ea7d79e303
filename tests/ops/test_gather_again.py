"""A gather like an earlier one is launched as if it were the first: the same grid and numbers, on its own memory."""

import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from kvpage import CacheLayout, KVScales, ops  # noqa: E402
from kvpage.benchmarks.fake_device import fake_device  # noqa: E402
from kvpage.kernels import gather  # noqa: E402
from kvpage.ops.cuda.gathers import Gathers  # noqa: E402

CPU, BF16 = torch.device("cpu"), torch.bfloat16
BLOCK_SIZE, HEADS, SIZE, NUM_BLOCKS = 16, 2, 32, 9
LAYOUTS = {
    "bf16": CacheLayout(BLOCK_SIZE, HEADS, SIZE, BF16),
    "HND": CacheLayout(BLOCK_SIZE, HEADS, SIZE, BF16, kv_layout="HND"),
    "paged": CacheLayout(BLOCK_SIZE, HEADS, SIZE, BF16, backend="paged"),
    "e4m3": CacheLayout(BLOCK_SIZE, HEADS, SIZE, torch.float8_e4m3fn),
    "int8": CacheLayout(BLOCK_SIZE, HEADS, SIZE, torch.int8),
    "latents": CacheLayout(BLOCK_SIZE, 1, SIZE, BF16, backend="mla"),
}
SPANS = slice(7, 10)  # of the kernel's arguments: addresses of lengths, starts, ends


class World:
    """A fake device, and the spans of each launch, kept alive; `anew` counts calls that were not known."""

    def __init__(self, patch: pytest.MonkeyPatch, device) -> None:
        self.device, self.uploaded, self.anew = device, {}, 0
        upload, launch = gather._upload, gather.gather_cache

        def kept(*arguments):
            spans = upload(*arguments)
            self.uploaded[spans.data_ptr()] = spans
            return spans

        def counted(*arguments):
            self.anew += 1
            return launch(*arguments)

        patch.setattr(gather, "_upload", kept)
        patch.setattr(gather, "gather_cache", counted)

    def cache(self, kind: str = "bf16", num_blocks: int = NUM_BLOCKS) -> ops.BoundCache:
        layout = LAYOUTS[kind]
        cache = ops.BoundCache(
            layout.allocate(num_blocks, 1, CPU)[0], layout, KVScales.of(0.5, [2, 3]) if kind == "e4m3" else None
        )
        cache.is_cuda = True
        return cache

    def take(self) -> list[tuple]:
        """Return the launches since: kernel, grid, and arguments with the spans' contents in place of addresses."""
        launches, self.device.launches[:] = list(self.device.launches), []
        return [(name, grid, self._without_spans(arguments)) for name, grid, arguments in launches]

    def _without_spans(self, arguments: list) -> list:
        lengths, starts, ends = arguments[SPANS]
        spans = self.uploaded[lengths]
        assert starts == spans[1].data_ptr() and ends in (0, spans[2].data_ptr())
        return [*arguments[: SPANS.start], spans.tolist(), bool(ends), *arguments[SPANS.stop :]]


@pytest.fixture
def world(monkeypatch):
    with fake_device() as device, torch.no_grad():
        yield World(monkeypatch, device)


def make_out(lengths: list[int], packed: bool = True, size: int = SIZE, dtype=BF16, heads: int = HEADS):
    shape = (sum(lengths),) if packed else (len(lengths), max(lengths))
    return tuple(torch.zeros(*shape, heads, size, dtype=dtype) for _ in range(2))


def make_tables(num_seqs: int, max_blocks: int = 3) -> torch.Tensor:
    return torch.zeros(num_seqs, max_blocks, dtype=torch.int32)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_repeated_launch_is_what_a_new_one_is(world, kind, packed):
    latents = kind == "latents"

    def call(lengths, starts, max_blocks):
        key, value = make_out(lengths, packed, heads=1 if latents else HEADS)
        out, tables = (key, None if latents else value), make_tables(len(lengths), max_blocks)
        cache = world.cache(kind)
        assert ops.gather_cache(cache, tables, lengths, seq_starts=starts, out=out) is out
        again = world.take()
        before = world.anew
        world.device.forget()
        ops.gather_cache(cache, tables, lengths, seq_starts=starts, out=out)
        assert world.anew == before + 1 and world.take() == again
        return before

    call([20, 1], [0, 3], 3)
    known = world.anew
    assert call([20, 4], [1, 16], 3) == known
    if packed:  # other numbers of sequences and tokens are of the same kind
        known = world.anew
        for num_seqs, length in ((1, 1), (3, BLOCK_SIZE - 1), (3, BLOCK_SIZE), (2, BLOCK_SIZE + 1)):
            assert call([length] * num_seqs, None, 2) == known
            known = world.anew


def others(world):
    """Calls that are well, and of another kind than the one that is known."""
    tables, lengths = make_tables(2), [20, 1]
    cache, out = world.cache(), make_out(lengths)
    yield "blocks", world.cache(num_blocks=8), tables, out
    yield "order", world.cache("HND"), tables, out
    yield "quantised", world.cache("e4m3"), tables, out
    yield "size", cache, tables, make_out(lengths, size=16)
    yield "padded", cache, tables, make_out(lengths, packed=False)
    yield "strided", cache, tables, tuple(torch.zeros(21, HEADS, 2 * SIZE, dtype=BF16)[..., :SIZE] for _ in range(2))
    yield "list", cache, tables, list(out)
    yield "negative", cache, torch._neg_view(tables), out


def test_a_call_of_another_kind_is_prepared_anew(world):
    lengths = [20, 1]
    ops.gather_cache(world.cache(), make_tables(2), lengths, out=make_out(lengths))
    for name, cache, tables, out in others(world):
        before = world.anew
        ops.gather_cache(cache, tables, lengths, out=out)
        assert world.anew == before + 1, name


def test_another_device_is_not_known(world, monkeypatch):
    lengths = [20, 1]
    for _ in range(2):
        ops.gather_cache(world.cache(), make_tables(2), lengths, out=make_out(lengths))
    assert world.anew == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    ops.gather_cache(world.cache(), make_tables(2), lengths, out=make_out(lengths))
    assert world.anew == 2


def test_lengths_in_a_tensor_and_no_tokens_take_the_long_way(world):
    lengths, tables = [20, 1], make_tables(2)
    ops.gather_cache(world.cache(), tables, lengths, out=make_out(lengths))
    ops.gather_cache(world.cache(), tables, torch.tensor(lengths), out=make_out(lengths))
    world.take()
    ops.gather_cache(world.cache(), tables, [0, 0], out=make_out([0]))
    ops.gather_cache(world.cache(), tables[:0], [], out=make_out([0]))
    assert world.anew == 4 and world.take() == []


def bad_calls():
    """What is wrong, of a call like the one that is known, and its error."""
    key, value = make_out([20, 1])
    yield {"lengths": [20]}, "seq_lens must have one entry"
    yield {"lengths": [22, -1]}, "seq_lens must be in"
    yield {"lengths": [20, 1.0]}, "seq_lens must be integers"
    yield {"lengths": [20, 2]}, "key.shape must be"
    yield {"lengths": [49, 1]}, "seq_lens must be in"
    yield {"starts": [29, 0]}, "must be at most 48"
    yield {"starts": [-1, 0]}, "seq_starts must be in"
    yield {"starts": [0]}, "seq_starts must have one entry"
    yield {"starts": [0, "1"]}, "seq_starts must be integers"
    yield {"out": (key, key)}, "must not be in the same memory"
    yield {"out": (key, value[:20])}, "value.shape must be"
    yield {"out": (key[:1].expand(21, -1, -1), value)}, "must have memory for each"
    yield {"out": (key, None)}, "value must be given"
    yield {"out": (None, value)}, "key must not be None"
    yield {"out": (torch._neg_view(key), value)}, "must not be a view"
    yield {"out": (key, value, key)}, "must be a pair"
    yield {"tables": make_tables(2).long()}, "block_tables.dtype"
    yield {"tables": make_tables(2)[0]}, "block_tables must be"
    yield {"tables": make_tables(2, 6)[:, ::2]}, "block_tables must be contiguous"
    yield {"tables": [[0, 1, 2]] * 2}, "block_tables must be a torch.Tensor"


@pytest.mark.parametrize("change, error", list(bad_calls()))
def test_a_bad_call_is_refused_after_a_good_one(world, change, error):
    cache, call = world.cache(), {"tables": make_tables(2), "lengths": [20, 1], "starts": [0, 3]}
    call["out"] = make_out(call["lengths"])
    gather_with(cache, **call)
    gather_with(cache, **call)
    world.take()
    with pytest.raises((TypeError, ValueError), match=error):
        gather_with(cache, **call | change)
    assert world.anew == 1 and world.take() == []


def gather_with(cache, tables, lengths, starts, out):
    ops.gather_cache(cache, tables, lengths, seq_starts=starts, out=out)


def test_rooms_too_short_or_too_few_are_refused_after_good_ones(world):
    tables, lengths = make_tables(2), [20, 1]
    ops.gather_cache(world.cache(), tables, lengths, out=make_out(lengths, packed=False))
    with pytest.raises(ValueError, match="must have room for 21 tokens"):
        ops.gather_cache(world.cache(), tables, [1, 21], out=make_out(lengths, packed=False))
    with pytest.raises(ValueError, match="key.shape must be"):
        ops.gather_cache(world.cache(), make_tables(3), [1, 1, 1], out=make_out(lengths, packed=False))


def test_rows_that_would_overlap_are_refused_after_fewer(world):
    """The strides are those of a good call of fewer tokens."""
    cache, (_, value) = world.cache(), make_out([40])
    memory = torch.zeros(3000, dtype=BF16)
    for num_tokens in (4, 5):
        key = memory.as_strided((num_tokens, HEADS, SIZE), (SIZE, 4 * SIZE, 1))
        call = cache, make_tables(1), [num_tokens], None, None, (key, value[:num_tokens])
        if num_tokens == 4:
            ops.gather_cache(*call)
            continue
        with pytest.raises(ValueError, match="must have memory for each"):
            ops.gather_cache(*call)


def test_captures_take_no_known_launch(world, monkeypatch):
    call = world.cache(), make_tables(1), [3], None, None, make_out([3])
    ops.gather_cache(*call)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="lengths on the device where a graph captures"):
        ops.gather_cache(*call)


def test_layers_of_a_step_share_one_copy_of_lengths(world, monkeypatch):
    tables, lengths, out = make_tables(2), [20, 1], make_out([20, 1])
    for _ in range(3):
        ops.gather_cache(world.cache(), tables, lengths, out=out)
    first = world.take()
    assert len(world.uploaded) == 2 and first[1][2][SPANS.start] == [[20, 1], [0, 0], [20, 21]]  # the first call's, too
    lengths[:] = [1, 20]
    ops.gather_cache(world.cache(), tables, lengths, out=out)
    assert world.take()[0][2][SPANS.start] == [[1, 20], [0, 0], [1, 21]]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=8))
    before = len(world.uploaded)
    ops.gather_cache(world.cache(), tables, lengths, out=out)
    assert len(world.uploaded) == before + 1


def test_when_full_it_starts_anew(world):
    """Without a device: a launch that is never made."""
    gathers, error = Gathers(capacity=2), torch.zeros(1, dtype=torch.int32)
    cache, tables, again = world.cache(), make_tables(1), SimpleNamespace(again=lambda *call: True)
    outs = [make_out([5], size=size) for size in (1, 2, 3)]
    for out in outs:
        gathers.keep(cache, tables, out, again)
    assert [gathers.repeat(cache, tables, [5], None, out, error) for out in outs] == [False, False, True]
