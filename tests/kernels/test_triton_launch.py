"""How the Triton kernels are launched, without a GPU: a driver that compiles for one, and keeps what it was to launch.

So it is seen what a launch compiles, that another like it compiles nothing, and that Launches repeats the same.
"""

import os
from typing import NamedTuple

import pytest
import torch

from kvpage import CacheLayout, KVScales, ops
from kvpage.ops.cuda.launches import Launches

triton = pytest.importorskip("triton")
from support.fake_driver import DEVICE, FakeDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from kvpage.kernels import chunk, gather  # noqa: E402
from kvpage.kernels.chunk import chunk_kernel, move_chunk  # noqa: E402
from kvpage.kernels.gather import gather_cache, gather_cache_by_device_lengths, gather_cache_kernel  # noqa: E402
from kvpage.kernels.prepared import PreparedKinds  # noqa: E402
from kvpage.kernels.reshape import reshape_and_cache, reshape_and_cache_kernel  # noqa: E402

BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDriver()
    driver.set_active(fake)
    for module in (gather, chunk):
        monkeypatch.setattr(module, "_kinds", PreparedKinds())
    for kernel in (reshape_and_cache_kernel, gather_cache_kernel, chunk_kernel):
        kernel.device_caches.pop(DEVICE, None)
    yield fake
    if torch.cuda.is_available():  # there is no other to go back to where it is not
        driver.reset_active()


def compiled(kernel):
    return list(kernel.device_caches[DEVICE][0].values())


class Call(NamedTuple):
    key: torch.Tensor
    value: torch.Tensor | None
    cache: ops.BoundCache
    slots: torch.Tensor


def make_call(dtype=BF16, num_tokens=33, scales=None, **names):
    layout = CacheLayout(16, 8, 128, dtype, **names)
    cache = layout.allocate(9, 2, torch.device("cpu"))[1]
    key, value = (torch.zeros(num_tokens, 8, 128, dtype=BF16) for _ in range(2))
    return Call(key, value, ops.BoundCache(cache, layout, scales), torch.zeros(num_tokens, dtype=torch.int64))


def launch(call, error):
    key, value, cache, slots = call
    return reshape_and_cache(key, value, cache.views, slots, cache.scales, error)


def launched_on(args):
    """As the driver would pass them: addresses for tensors."""
    return [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]


@pytest.mark.parametrize("names", [{}, {"kv_layout": "HND"}, {"backend": "flashinfer"}, {"layer_layout": "packed"}])
def test_launches_of_plain_rows_move_16_bytes_at_a_time(fake, names):
    call, error = make_call(**names), torch.zeros(1, dtype=torch.int32)
    views, tables = call.cache.views, torch.zeros(2, 3, dtype=torch.int32)
    launch(call, error)
    gather_cache(views, tables, [0, 5], [30, 3], (call.key, call.value), None, error)
    for to_chunk in (False, True):
        rows = torch.zeros(1, 2, 8, 20, 128, dtype=BF16).transpose(2, 3)
        move_chunk([call.cache.tensor], views, tables[0], 3, rows, None, error, to_chunk)
    kernels = [
        kernel for jit in (reshape_and_cache_kernel, gather_cache_kernel, chunk_kernel) for kernel in compiled(jit)
    ]
    assert len(kernels) == len(fake.launches) == 4
    for kernel in kernels:
        assert kernel.asm["ptx"].count("ld.global.v4.b32") >= 2 and kernel.asm["ptx"].count("st.global.v4.b32") >= 2


def test_what_changes_from_call_to_call_compiles_nothing(fake):
    error = torch.zeros(1, dtype=torch.int32)
    for num_tokens in (1, 2, 15, 16, 17, 1024):
        call = make_call(num_tokens=num_tokens)
        launch(call, error)
        views, tables = call.cache.views, torch.zeros(num_tokens, 1 + num_tokens % 7, dtype=torch.int32)
        for dims in (3, 4):
            rows = call.key if dims == 3 else torch.zeros(num_tokens, 1, 8, 128, dtype=BF16)
            gather_cache(views, tables, [0] * num_tokens, [1] * num_tokens, (rows, rows), None, error)
        lengths = torch.zeros(num_tokens + 1, dtype=torch.int32)[1:]
        gather_cache_by_device_lengths(views, tables, lengths, lengths, (call.key, call.value), None, error)
        rows = torch.zeros(1 + num_tokens % 3, 2, num_tokens, 8, 128, dtype=BF16)
        layers = [call.cache.tensor] * len(rows)
        move_chunk(layers, views, tables[0], num_tokens % 5, rows, None, error, True)
        move_chunk(layers, views, tables[0].long(), num_tokens % 5, rows, None, error, True, one_by_one=True)
        move_chunk(layers, views, tables[0], num_tokens % 5, rows, None, error, False)
    assert len(compiled(reshape_and_cache_kernel)) == 1
    assert len(compiled(gather_cache_kernel)) == 3
    assert len(compiled(chunk_kernel)) == 3


def test_programs_are_limited_by_powers_of_two_of_tiles(fake):
    """However long the chunk, few kernels are compiled."""
    call, error = make_call(), torch.zeros(1, dtype=torch.int32)
    views, ids = call.cache.views, torch.zeros(200, dtype=torch.int32)
    for num_tokens in (*range(1, 40), 1000, 3000):
        rows = torch.zeros(2, 2, num_tokens, 8, 128, dtype=BF16)
        move_chunk([call.cache.tensor] * 2, views, ids, 0, rows, None, error, False, max_programs=8)
        _, (programs, layers, _), _, args = fake.launches[-1]
        turns = args[list(chunk_kernel.arg_names).index("CHUNK")].TURNS
        assert layers == 2 and programs <= 4 and (programs - 1) * turns < -(-num_tokens * 8 // 16) <= programs * turns
    assert len(compiled(chunk_kernel)) <= 10


@pytest.mark.parametrize("dtype, scales", [(BF16, None), (INT8, None), (E4M3, KVScales.of(1, [2.0] * 8))])
@pytest.mark.parametrize("names", [{}, {"backend": "paged", "layer_layout": "packed"}])
def test_a_repeated_launch_is_what_a_new_one_is(fake, dtype, scales, names):
    launches, error = Launches(), torch.zeros(1, dtype=torch.int32)
    first, second = make_call(dtype, scales=scales, **names), make_call(dtype, scales=scales, **names)
    launches.keep(*first, launch(first, error))
    assert launches.repeat(*second, error)
    launch(second, error)
    assert len(compiled(reshape_and_cache_kernel)) == 1
    _, again, checked = ((*place, launched_on(args)) for *place, args in fake.launches)
    absent = [i for i, arg in enumerate(checked[-1]) if arg is None]
    assert [again[-1][i] for i in absent] == [0] * len(absent)
    assert again[:3] == checked[:3]
    assert all(i in absent or one == other for i, (one, other) in enumerate(zip(again[-1], checked[-1], strict=True)))


def test_a_launch_of_latents_is_repeated(fake):
    layout, error = CacheLayout(16, 1, 576, BF16, "mla"), torch.zeros(1, dtype=torch.int32)
    cache = ops.BoundCache(layout.allocate(9, 1, torch.device("cpu"))[0], layout)
    launches = Launches()
    call = Call(torch.zeros(3, 1, 576, dtype=BF16), None, cache, torch.zeros(3, dtype=torch.int64))
    launches.keep(*call, launch(call, error))
    assert launches.repeat(*call, error) and fake.launches[0][:3] == fake.launches[1][:3]
    assert [0 if arg is None else arg for arg in launched_on(fake.launches[0][3])] == list(fake.launches[1][3])
