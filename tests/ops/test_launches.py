"""Launches without a GPU: what is launched again, on which addresses, and what is not taken for known."""

import pytest
import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.ops.cuda.launches import Launches, Rows

LAYOUT = CacheLayout(4, 2, 16, torch.int8)
FP8 = CacheLayout(4, 2, 16, torch.float8_e4m3fn)
ERROR = torch.zeros(1, dtype=torch.int32)


class Recorder:
    def __init__(self):
        self.calls = []

    def again(self, addresses):
        self.calls.append(addresses)


def bound(layout=LAYOUT, scales=None, num_blocks=3):
    return ops.BoundCache(layout.allocate(num_blocks, 2, torch.device("cpu"))[0], layout, scales)


def make_rows(layout=LAYOUT, num_tokens=5, scales=None, **fields):
    key, value = (torch.zeros(num_tokens, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    return Rows(key, value, bound(layout, scales), torch.arange(num_tokens))._replace(**fields)


@pytest.fixture
def known():
    launches, recorder, rows = Launches(), Recorder(), make_rows()
    launches.keep(rows, recorder)
    return launches, recorder, rows


def test_rows_of_a_known_kind_are_launched_on_their_own_memory(known):
    launches, recorder, _ = known
    rows = make_rows()
    assert launches.repeat(rows, ERROR)
    key_view, value_view = LAYOUT.views(rows.cache.tensor)
    parts = (
        rows.key,
        rows.value,
        key_view.rows,
        value_view.rows,
        key_view.scales,
        value_view.scales,
        rows.slots,
        ERROR,
    )
    assert recorder.calls == [tuple(part.data_ptr() for part in parts)]


def test_given_scales_are_those_of_the_cache():
    launches, recorder = Launches(), Recorder()
    launches.keep(make_rows(FP8, scales=KVScales.of(1, [2, 3])), recorder)
    rows = make_rows(FP8, scales=KVScales.of(4, [5, 6]))
    assert launches.repeat(rows, ERROR)
    assert recorder.calls[0][4:6] == (rows.cache.scales.key.data_ptr(), rows.cache.scales.value.data_ptr())
    assert not launches.repeat(make_rows(FP8), ERROR)
    assert not launches.repeat(make_rows(FP8, scales=KVScales.of(1, 1)), ERROR)


def test_what_is_not_there_has_no_address():
    layout = CacheLayout(4, 1, 16, torch.bfloat16, "mla")
    launches, recorder = Launches(), Recorder()
    rows = make_rows(layout, key=torch.zeros(5, 1, 16, dtype=torch.bfloat16), value=None)
    launches.keep(rows, recorder)
    assert launches.repeat(rows, ERROR)
    assert [recorder.calls[0][i] for i in (1, 3, 4, 5)] == [0] * 4


def unlike_rows():
    rows = torch.zeros(5, 2, 16, dtype=torch.bfloat16)
    yield {"key": rows.half()}
    yield {"key": rows[:4]}
    yield {"key": rows[..., :8]}
    yield {"key": rows.transpose(0, 1).contiguous().transpose(0, 1)}
    yield {"value": rows.float()}
    yield {"value": rows[..., :8]}
    yield {"value": None}
    yield {"cache": bound(num_blocks=4)}
    yield {"cache": bound(CacheLayout(4, 2, 16, torch.int8, layer_layout="packed"))}
    yield {"cache": bound(CacheLayout(4, 2, 16, torch.int8, "flashinfer"))}
    yield {"cache": bound(CacheLayout(4, 2, 16, torch.int8, kv_layout="HND"))}
    yield {"cache": bound(CacheLayout(4, 2, 16, torch.bfloat16))}


@pytest.mark.parametrize("fields", list(unlike_rows()))
def test_rows_that_differ_are_not_known(known, fields):
    launches, recorder, rows = known
    assert launches.repeat(rows, ERROR)
    assert not launches.repeat(rows._replace(**fields), ERROR) and len(recorder.calls) == 1


@pytest.mark.parametrize("name", ["key", "value", "cache"])
def test_addresses_that_are_not_aligned_are_not_known(known, name):
    launches, recorder, rows = known
    tensor = rows.cache.tensor if name == "cache" else getattr(rows, name)
    memory = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype)
    shifted = memory[4:].as_strided(tensor.shape, tensor.stride())
    unlike = rows._replace(**{name: ops.BoundCache(shifted, LAYOUT) if name == "cache" else shifted})
    assert shifted.data_ptr() % 16 and not launches.repeat(unlike, ERROR)
    launches.keep(unlike, recorder)
    assert not launches.repeat(unlike, ERROR) and recorder.calls == []


def test_when_full_it_starts_anew():
    launches, recorder = Launches(capacity=2), Recorder()
    each = [make_rows(num_tokens=count) for count in (1, 2, 3)]
    for rows in each:
        launches.keep(rows, recorder)
    assert [launches.repeat(rows, ERROR) for rows in each] == [False, False, True]
