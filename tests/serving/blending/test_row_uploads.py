"""The rows of segments come to a device layer by layer: one copy each, begun a layer ahead, and never waited for."""

import functools

import pytest
import torch
from support.blending import SEGMENTS, make_engine, model_of, serve

from kvpage.blend.segments import Reuse, SegmentKV
from kvpage.serving.blending import blend_pass
from kvpage.serving.blending.row_uploads import RowUploads

NUM_LAYERS = 4
CPU = torch.device("cpu")


class FakeCopies:
    """Copies that have arrived when they are waited for, not earlier: until then their memory is not a number."""

    def __init__(self):
        self.calls, self.buffers = [], []

    def buffer(self, num_elements, dtype):
        self.buffers.append(torch.full((num_elements,), torch.nan, dtype=dtype))
        return self.buffers[-1]

    def start(self, filled):
        assert filled is self.buffers[-1] and not filled.isnan().any()
        self.calls.append(("start", len(self.buffers) - 1))
        return torch.full_like(filled, torch.nan), len(self.buffers) - 1

    def wait(self, copied, event):
        self.calls.append(("wait", event))
        copied.copy_(self.buffers[event])
        self.buffers[event].fill_(torch.nan)


def segment(num_tokens, value_size=6):
    key, value = (torch.randn(NUM_LAYERS, num_tokens, 2, size) for size in (8, value_size))
    return SegmentKV(key, value, torch.arange(num_tokens), True)


RUNS = [Reuse(segment(5), 0, 3, 5), Reuse(segment(1), 0, 20, 1), Reuse(segment(7), 2, 30, 4)]


def assert_rows(rows, layer):
    for (key, value), one in zip(zip(*rows, strict=True), RUNS, strict=True):
        wanted = one.rows(layer)
        assert torch.equal(key, wanted[0]) and torch.equal(value, wanted[1])


@pytest.mark.parametrize("first", [0, 1, NUM_LAYERS - 1])
def test_one_copy_a_layer_is_begun_a_layer_ahead(first):
    """The first that is asked for is begun then; layers before it are not copied."""
    copies = FakeCopies()
    uploads = RowUploads(RUNS, CPU, copies)
    for layer in range(first, NUM_LAYERS):
        for _ in range(2):  # K and V of a layer may be asked for twice
            assert_rows(uploads.rows(layer), layer)
    count = NUM_LAYERS - first
    expected = [("start", 0), *(("start", i + 1) if turn else ("wait", i) for i in range(count) for turn in (0, 1))]
    assert copies.calls == expected[:-1]


def test_a_layer_that_is_left_out_is_copied_anew():
    copies = FakeCopies()
    uploads = RowUploads(RUNS, CPU, copies)
    for layer in (0, 2, 3):
        assert_rows(uploads.rows(layer), layer)


def test_rows_where_the_blocks_are_are_taken_as_they_are():
    uploads = RowUploads(RUNS, CPU)
    rows = uploads.rows(2)
    assert_rows(rows, 2)
    assert rows[0][0].data_ptr() == RUNS[0].segment.k[2].data_ptr()


@pytest.mark.parametrize("uses_sensitivity", [True, False])
def test_a_blended_prefill_copies_each_layer_once(monkeypatch, uses_sensitivity):
    """The answer is that of rows in host memory."""
    parts, found = [SEGMENTS[index] for index in (2, 0, 3)], []
    copies = FakeCopies()
    for with_copies in (False, True):
        if with_copies:
            monkeypatch.setattr(blend_pass, "RowUploads", functools.partial(RowUploads, copies=copies))
        engine = make_engine("llama", ratio=0.3, uses_sensitivity=uses_sensitivity)
        engine.warm_segments(SEGMENTS)
        copies.calls.clear()
        found.append(serve(engine, parts)[1])
    assert torch.equal(*found)
    starts, waits = ([number for name, number in copies.calls if name == kind] for kind in ("start", "wait"))
    assert 0 < len(starts) <= len(model_of("llama").model.layers) and starts == waits == sorted(set(starts))
