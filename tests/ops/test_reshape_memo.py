"""ReshapeMemo without a GPU: what it launches again, on which addresses, and what it does not take for known."""

import pytest
import torch

from kvpage import CacheLayout, KVScales
from kvpage.ops.cuda.reshape_memo import Call, ReshapeMemo

LAYOUT = CacheLayout(4, 2, 16, torch.int8)
FP8 = CacheLayout(4, 2, 16, torch.float8_e4m3fn)


class Recorder:
    def __init__(self):
        self.calls = []

    def again(self, addresses):
        self.calls.append(addresses)


def make_call(layout=LAYOUT, num_tokens=5, scales=None, **fields):
    cache = layout.allocate(3, 2, torch.device("cpu"))[0]
    key, value = (torch.zeros(num_tokens, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    call = Call(key, value, cache, torch.arange(num_tokens), layout, scales)
    return call._replace(**fields)


@pytest.fixture
def known():
    memo, recorder, call, error = ReshapeMemo(), Recorder(), make_call(), torch.zeros(1, dtype=torch.int32)
    memo.remember(call, recorder, LAYOUT.views(call.cache), error)
    return memo, recorder, call, error


def test_a_call_of_a_known_kind_is_launched_on_its_own_memory(known):
    memo, recorder, _, error = known
    call = make_call()
    assert memo.repeat(call)
    key_view, value_view = LAYOUT.views(call.cache)
    parts = (
        call.key,
        call.value,
        key_view.rows,
        value_view.rows,
        key_view.scales,
        value_view.scales,
        call.slots,
        error,
    )
    assert recorder.calls == [tuple(part.data_ptr() for part in parts)]


def test_given_scales_are_taken_from_the_call():
    memo, recorder = ReshapeMemo(), Recorder()
    first = make_call(FP8, scales=KVScales.of(1, [2, 3]))
    memo.remember(first, recorder, FP8.views(first.cache), torch.zeros(1, dtype=torch.int32))
    call = make_call(FP8, scales=KVScales.of(4, [5, 6]))
    assert memo.repeat(call)
    assert recorder.calls[0][4:6] == (call.scales.key.data_ptr(), call.scales.value.data_ptr())
    assert not memo.repeat(make_call(FP8)) and not memo.repeat(make_call(FP8, scales=KVScales.of(1, 1)))


def test_what_there_is_not_has_no_address():
    layout = CacheLayout(4, 1, 16, torch.bfloat16, "mla")
    memo, recorder = ReshapeMemo(), Recorder()
    call = make_call(layout, key=torch.zeros(5, 1, 16, dtype=torch.bfloat16), value=None)
    memo.remember(call, recorder, layout.views(call.cache), torch.zeros(1, dtype=torch.int32))
    assert memo.repeat(call)
    assert [recorder.calls[0][i] for i in (1, 3, 4, 5)] == [0] * 4


def unlike_calls():
    rows, slots = torch.zeros(5, 2, 16, dtype=torch.bfloat16), torch.arange(5)
    yield {"key": rows.half()}
    yield {"key": rows[:4]}
    yield {"key": rows[..., :8]}
    yield {"key": rows[:, :1]}
    yield {"key": rows.transpose(0, 1).contiguous().transpose(0, 1)}
    yield {"key": rows.to("meta")}
    yield {"value": rows.float()}
    yield {"value": rows[..., :8]}
    yield {"value": None}
    yield {"slots": slots[:4]}
    yield {"slots": slots.int()}
    yield {"slots": torch.arange(10)[::2]}
    yield {"slots": slots[None]}
    yield {"cache": LAYOUT.allocate(4, 1, torch.device("cpu"))[0]}
    yield {"cache": CacheLayout(4, 2, 16, torch.int8, layer_layout="packed").allocate(3, 2, torch.device("cpu"))[0]}
    yield {"layout": CacheLayout(4, 2, 16, torch.int8, "flashinfer")}
    yield {"layout": CacheLayout(4, 2, 16, torch.int8, kv_layout="HND")}
    yield {"scales": KVScales.of(1, 1)}


@pytest.mark.parametrize("fields", list(unlike_calls()))
def test_a_call_that_differs_is_not_known(known, fields):
    memo, recorder, call, _ = known
    assert memo.repeat(call)
    assert not memo.repeat(call._replace(**fields)) and len(recorder.calls) == 1


@pytest.mark.parametrize("name", ["key", "value", "cache"])
def test_addresses_that_are_not_aligned_are_not_known(known, name):
    memo, recorder, call, error = known
    tensor = getattr(call, name)
    memory = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype)
    shifted = memory[4:].as_strided(tensor.shape, tensor.stride())
    unlike = call._replace(**{name: shifted})
    assert shifted.data_ptr() % 16 and not memo.repeat(unlike)
    memo.remember(unlike, recorder, LAYOUT.views(unlike.cache), error)
    assert not memo.repeat(unlike) and recorder.calls == []


def test_a_full_memo_starts_anew():
    memo, recorder, error = ReshapeMemo(capacity=2), Recorder(), torch.zeros(1, dtype=torch.int32)
    calls = [make_call(num_tokens=count) for count in (1, 2, 3)]
    for call in calls:
        memo.remember(call, recorder, LAYOUT.views(call.cache), error)
    assert [memo.repeat(call) for call in calls] == [False, False, True]
