"""Launches without a GPU: what is launched again, on which addresses, and what is not taken for known."""

from typing import NamedTuple

import pytest
import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.ops.cuda.launches import Launches

LAYOUT = CacheLayout(4, 2, 16, torch.int8)
FP8 = CacheLayout(4, 2, 16, torch.float8_e4m3fn)
ERROR = torch.zeros(1, dtype=torch.int32)


class Rows(NamedTuple):
    key: torch.Tensor
    value: torch.Tensor | None
    cache: ops.BoundCache
    slots: torch.Tensor


class Recorder:
    def __init__(self):
        self.calls = []

    def again(self, addresses, num_tokens, num_slots):
        self.calls.append((addresses, num_tokens, num_slots))
        return True


def bound(layout=LAYOUT, scales=None, num_blocks=3):
    return ops.BoundCache(layout.allocate(num_blocks, 2, torch.device("cpu"))[0], layout, scales)


def make_rows(layout=LAYOUT, num_tokens=5, scales=None, **fields):
    key, value = (torch.zeros(num_tokens, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    return Rows(key, value, bound(layout, scales), torch.arange(num_tokens))._replace(**fields)


@pytest.fixture
def known():
    launches, recorder, rows = Launches(), Recorder(), make_rows()
    launches.keep(*rows, recorder)
    return launches, recorder, rows


def test_rows_of_a_known_kind_are_launched_on_their_own_memory(known):
    launches, recorder, _ = known
    rows = make_rows()
    assert launches.repeat(*rows, ERROR)
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
    assert recorder.calls == [(tuple(part.data_ptr() for part in parts), 5, 12)]


def test_given_scales_are_those_of_the_cache():
    launches, recorder = Launches(), Recorder()
    launches.keep(*make_rows(FP8, scales=KVScales.of(1, [2, 3])), recorder)
    rows = make_rows(FP8, scales=KVScales.of(4, [5, 6]))
    assert launches.repeat(*rows, ERROR)
    assert recorder.calls[0][0][4:6] == (rows.cache.scales.key.data_ptr(), rows.cache.scales.value.data_ptr())
    assert not launches.repeat(*make_rows(FP8), ERROR)
    assert not launches.repeat(*make_rows(FP8, scales=KVScales.of(1, 1)), ERROR)


def test_what_is_not_there_has_no_address():
    layout = CacheLayout(4, 1, 16, torch.bfloat16, "mla")
    launches, recorder = Launches(), Recorder()
    rows = make_rows(layout, key=torch.zeros(5, 1, 16, dtype=torch.bfloat16), value=None)
    launches.keep(*rows, recorder)
    assert launches.repeat(*rows, ERROR)
    assert [recorder.calls[0][0][i] for i in (1, 3, 4, 5)] == [0] * 4


def unlike_rows():
    rows = torch.zeros(5, 2, 16, dtype=torch.bfloat16)
    yield {"key": rows.half()}
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
    assert launches.repeat(*rows, ERROR)
    assert not launches.repeat(*rows._replace(**fields), ERROR) and len(recorder.calls) == 1


def test_fewer_and_more_rows_are_of_the_same_kind(known):
    """A prefill has another number of tokens in each step."""
    launches, recorder, _ = known
    for num_tokens in (1, 4, 6, 100):
        assert launches.repeat(*make_rows(num_tokens=num_tokens), ERROR)
    assert [call[1] for call in recorder.calls] == [1, 4, 6, 100]


def unchecked_rows():
    """Rows for which the operation has an error, or must look closer."""
    rows = torch.zeros(5, 2, 16, dtype=torch.bfloat16)
    yield {"key": rows[:4]}
    yield {"value": rows[:4]}
    yield {"slots": torch.arange(4)}
    yield {"slots": torch.arange(5, dtype=torch.int32)}
    yield {"slots": torch.arange(10)[::2]}
    yield {"slots": torch.arange(5)[:, None]}
    yield {"slots": torch.arange(5).to_sparse()}
    yield {"slots": torch.nn.Parameter(torch.arange(5), requires_grad=False)}
    yield {"key": torch._neg_view(rows)}
    yield {"value": rows.to_sparse()}
    yield {"value": torch.nn.Parameter(rows)}
    yield {"key": rows[0]}
    yield {"key": rows[None]}
    yield {"value": rows[0]}
    yield {"key": rows[:0], "value": rows[:0], "slots": torch.arange(0)}


@pytest.mark.parametrize("fields", list(unchecked_rows()))
def test_rows_that_need_a_closer_look_are_not_known(known, fields):
    launches, recorder, rows = known
    unlike = rows._replace(**fields)
    assert not launches.repeat(*unlike, ERROR) and recorder.calls == []
    assert launches.repeat(*rows, ERROR)


def test_an_address_that_the_launch_refuses_is_not_known(known):
    launches, recorder, rows = known
    recorder.again = lambda *call: False
    assert not launches.repeat(*rows, ERROR)


def test_when_full_it_starts_anew():
    launches, recorder = Launches(capacity=2), Recorder()
    each = [make_rows(key=torch.zeros(5, 2, size, dtype=torch.bfloat16)) for size in (1, 2, 3)]
    for rows in each:
        launches.keep(*rows, recorder)
    assert [launches.repeat(*rows, ERROR) for rows in each] == [False, False, True]


def test_nested_caches_are_refused():
    layout = CacheLayout(16, 2, 64, torch.float32)
    nested = torch.nested.nested_tensor([torch.zeros(2, 6, 64)])
    for move in (ops.store_chunk, ops.load_chunk):
        with pytest.raises(ValueError, match=r"caches\[0\] must be a tensor with strides, got one that is nested"):
            move([nested], torch.tensor([1], dtype=torch.int32), torch.zeros(1, 2, 3, 2, 64), layout)
