"""A launch that is repeated is the one that Triton would make: the same code, grid and arguments, for every kind."""

import os
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from triton.runtime import driver  # noqa: E402

from kvpage import CacheLayout, KVScales  # noqa: E402
from kvpage.benchmarks.compiling_driver import CompilingDriver  # noqa: E402
from kvpage.kernels import blend, chunk, gather, prepared, rotary  # noqa: E402
from kvpage.kernels.prepared import Prepared, PreparedKinds  # noqa: E402
from kvpage.layout.rotation import Rotation  # noqa: E402

DEVICE = 98  # no other test's: what was compiled stays with the kernels
CPU, BF16 = torch.device("cpu"), torch.bfloat16
KERNELS = gather.gather_cache_kernel, chunk.chunk_kernel, rotary.mix_rows_kernel, blend.row_deviation_kernel


class CodeDriver(CompilingDriver):
    """Compiles for sm_90 and keeps what it was to launch: a number of the code, the grid, the arguments."""

    def __init__(self):
        super().__init__(DEVICE)
        self.launches, self.codes = [], []

    def function_of(self, name, binary):
        if binary not in self.codes:
            self.codes.append(binary)
        return self.codes.index(binary)

    def take(self, launch, source, metadata):
        *place, args = launch
        self.launches.append((*place, [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg or 0 for arg in args]))


@pytest.fixture
def fake(monkeypatch):
    fake = CodeDriver()
    driver.set_active(fake)
    forget(monkeypatch)
    for kernel in KERNELS:
        kernel.device_caches.pop(DEVICE, None)
    yield fake
    if torch.cuda.is_available():  # there is no other to go back to where it is not
        driver.reset_active()


def forget(monkeypatch):
    for module in (gather, chunk, rotary, blend):
        monkeypatch.setattr(module, "_kinds", PreparedKinds())


ERROR = torch.zeros(1, dtype=torch.int32)
PLAIN, SCALED = CacheLayout(16, 2, 64, BF16), CacheLayout(16, 2, 64, torch.float8_e4m3fn)
ONE, EACH = 0.5, [1.0, 2.0]  # for all heads, and for each
EACH_SCALES = [KVScales.of(key, value) for key in (ONE, EACH) for value in (ONE, EACH)]


def gathers():
    """Calls that differ in what a kernel is compiled for, and in what it is not."""
    caches = {layout: layout.allocate(9, 1, CPU)[0] for layout in (PLAIN, SCALED)}
    tables = torch.zeros(1, 3, dtype=torch.int32)
    for num_tokens in (1, 5, 40):
        rows = torch.zeros(num_tokens, 2, 64, dtype=BF16)
        wide = torch.zeros(num_tokens, 2, 80, dtype=BF16)[..., :64]
        shifted = torch.zeros(num_tokens * 128 + 1, dtype=BF16)[1:].view(num_tokens, 2, 64)
        lengths = torch.tensor([num_tokens])
        for out in ((rows, rows), (wide, rows), (shifted, rows), (rows[None], rows[None])):
            views = PLAIN.views(caches[PLAIN])
            yield lambda v=views, o=out, n=num_tokens: gather.gather_cache(v, tables, [0], [n], o, None, ERROR)
            for starts in (None, lengths.int()):
                yield lambda v=views, o=out, s=starts, n=lengths: gather.gather_cache_by_device_lengths(
                    v, tables, s, n.int(), o, None, ERROR
                )
        for scales in (None, *EACH_SCALES):
            views = SCALED.views(caches[SCALED])
            yield lambda v=views, o=rows, n=num_tokens, s=scales: gather.gather_cache(
                v, tables, [0], [n], (o, o), s, ERROR
            )


def chunks():
    caches = PLAIN.allocate(9, 3, CPU)
    views, ids = PLAIN.views(caches[0]), torch.zeros(4, dtype=torch.int32)
    for num_tokens in (1, 33):
        rows = torch.zeros(3, 2, num_tokens, 2, 64, dtype=BF16)
        for to_chunk in (True, False):
            for start, most, one_by_one in ((0, 2**31 - 1, False), (5, 3, False), (1, 2**31 - 1, True)):
                for given in (ids, ids.long()):
                    yield (
                        lambda a=(views, given, start, rows, None, ERROR, to_chunk, most, one_by_one): chunk.move_chunk(
                            caches, *a
                        )
                    )


def scaled_chunks():
    """Layers with one scale after those with one for each head, and the other way round."""
    cache, ids = SCALED.allocate(9, 1, CPU)[0], torch.zeros(4, dtype=torch.int32)
    views, rows = SCALED.views(cache), torch.zeros(1, 2, 33, 2, 64, dtype=BF16)
    for scales in (*EACH_SCALES, *EACH_SCALES[::-1]):
        for to_chunk in (True, False):
            yield lambda a=(views, ids, 0, rows, [scales], ERROR, to_chunk): chunk.move_chunk([cache], *a)


def mixes():
    blocks, ids = torch.zeros(4, 16, 2, 64, dtype=BF16), torch.arange(6)
    for num_rows in (2, 6):
        rows, fresh = (torch.zeros(num_rows, 2, 64, dtype=BF16) for _ in range(2))
        angles = torch.zeros(num_rows, 16)
        for rotation in (None, Rotation(angles, angles, 64, 0, False), Rotation(angles, angles, 64, 8, True)):
            for args in ((None, None, None, None), (fresh, ids[:num_rows], None, None), (None, None, None, ids)):
                out = rows if args[3] is None else blocks
                args = (*args[:3], None if args[3] is None else ids[:num_rows])
                yield lambda r=rows, o=out, t=rotation, a=args: rotary.mix_rows(r, o, t, *a, ERROR)


def deviations():
    for num_rows in (2, 6):
        valid = torch.ones(num_rows, dtype=torch.bool)
        rows = torch.zeros(num_rows, 2, 64, dtype=BF16)
        wide = torch.zeros(num_rows, 2, 80, dtype=BF16)[..., :64]
        shifted = torch.zeros(num_rows * 128 + 1, dtype=BF16)[1:].view(num_rows, 2, 64)
        for retrieved in (rows.clone(), wide, shifted, shifted.float()):
            fresh = rows.to(retrieved.dtype)
            yield lambda f=fresh, r=retrieved, v=valid: blend.row_deviation(f, r, v)


@pytest.mark.parametrize(
    "calls, made_here",
    [(gathers, (7, 8, 9)), (chunks, ()), (scaled_chunks, ()), (mixes, ()), (deviations, (3,))],
)
def test_a_repeated_launch_is_what_triton_would_launch(fake, monkeypatch, calls, made_here):
    """made_here: places of tensors that each call makes anew: lengths and their sums, results."""
    made = list(calls())
    for call in made:
        call()
    first, fake.launches = fake.launches, []
    for call in made:
        call()
    again, fake.launches = fake.launches, []
    for call in made:
        forget(monkeypatch)
        call()
    assert len(first) == len(again) == len(fake.launches) >= len(made)
    for one, other, new in zip(first, again, fake.launches, strict=True):
        assert one[:3] == other[:3] == new[:3]
        for place, values in enumerate(zip(one[3], other[3], new[3], strict=True)):
            assert place in made_here or len(set(values)) == 1


def test_a_profiler_that_asks_for_it_is_called_at_each_launch(fake, monkeypatch):
    """Triton launches then; without one it is not asked."""
    call, asked = next(mixes()), []
    call()
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    monkeypatch.setattr(prepared, "_HOOKS", hooks)
    monkeypatch.setattr(
        triton.compiler.CompiledKernel, "__getitem__", lambda kernel, grid: lambda *args: asked.append(grid)
    )
    call()
    assert len(fake.launches) == 2 and not asked
    hooks.launch_exit_hook = print
    call()
    assert len(asked) == 1 and len(fake.launches) == 2


def test_an_older_triton_gets_no_constants(fake, monkeypatch):
    """Up to 3.2 a launcher takes the arguments that are no constants, and no others."""
    call = next(mixes())
    monkeypatch.setattr(prepared, "TAKES_CONSTANTS", False)
    call()
    call()
    first, again = (args for *_, args in fake.launches)
    assert again == first[:-1] and len(first) == len(rotary.mix_rows_kernel.arg_names)


def test_numbers_and_addresses_that_mean_other_code_are_left_to_triton(fake):
    """A number of 64 bits, or an address that is less aligned."""
    made = Prepared(rotary.mix_rows_kernel, (0,) * 8, {}, 3, range(6))
    made._compiled = SimpleNamespace(is_current=lambda: True)
    assert not made.repeat((1, 1, 1), [16] * 9, (1, 1, 2**31, 1))
    for place in range(6):
        assert not made.repeat((1, 1, 1), [24 if i == place else 16 for i in range(9)], (1, 1, 1, 1))
    with pytest.raises(AttributeError, match="launch"):
        made.repeat((1, 1, 1), [16] * 6 + [24] * 3, (1, 1, 2**31 - 1, 1))


def test_code_of_another_device_is_not_launched(fake):
    call, loads, load = next(mixes()), [], fake.load_binary
    fake.load_binary = lambda *args: loads.append(args[-1]) or load(*args)
    call()
    fake.get_current_device = lambda: DEVICE - 1
    call()
    rotary.mix_rows_kernel.device_caches.pop(DEVICE - 1)
    assert loads == [DEVICE, DEVICE - 1] and len(fake.launches) == 2


def test_tables_are_forgotten_only_when_no_kernel_reads_them(monkeypatch):
    """Another stream than the one whose memory they are may be at work."""
    waits, tables = [], chunk._Tables(capacity=2)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append((device, len(tables._known))))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    for number, device in enumerate((first, second, first)):
        assert tables.on(device, ((number,),)) is tables.on(device, ((number,),))
        assert len(waits) == (2 if number == 2 else 0)
    assert sorted(waits, key=str) == [(first, 2), (second, 2)] and len(tables._known) == 1


def test_kinds_are_forgotten_when_there_are_too_many():
    kinds = PreparedKinds(capacity=2)
    for kind in range(3):
        kinds.keep(kind, str(kind))
    assert [kinds.get(kind) for kind in range(3)] == [None, None, "2"]
