"""Rehearsals note one launch for each machine code. What was compiled side by side is not compiled again."""

import os
from contextlib import nullcontext

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from kvpage import CacheLayout, ops  # noqa: E402
from kvpage.benchmarks.fake_device import NUMBER, FakeDevice, fake_device  # noqa: E402
from kvpage.kernels.rehearsal import Variant, compile_variants, key_of, rehearsal  # noqa: E402
from kvpage.kernels.reshape import reshape_and_cache_kernel  # noqa: E402

LAYOUT = CacheLayout(16, 2, 64, torch.bfloat16)
CPU = torch.device("cpu")


def write_rows(device: FakeDevice, num_tokens: int, dtype: torch.dtype = torch.bfloat16, skipped: int = 0) -> None:
    """Write rows that begin `skipped` elements into their memory."""
    cache = device.bound(LAYOUT.allocate(4, 1, CPU)[0], LAYOUT)
    memory = torch.zeros(num_tokens * 2 * 64 + skipped, dtype=dtype)
    rows = memory[skipped:].view(num_tokens, 2, 64)
    ops.reshape_and_cache(rows, rows.clone(), cache, torch.arange(num_tokens))


def test_a_variant_is_noted_once_and_nothing_is_launched() -> None:
    with fake_device() as device, rehearsal() as variants:
        for num_tokens in (1, 2, 16, 17):
            write_rows(device, num_tokens)
        assert len(variants) == 1 and not device.launches
        write_rows(device, 4, skipped=1)
        assert len(variants) == 2, "rows at an address that is no multiple of 16 bytes are loaded in another way"
        for variant in variants.values():
            sizes = [argument.numel() for argument in variant.arguments if isinstance(argument, torch.Tensor)]
            assert max(sizes) <= 2, "no memory of a step is kept"
            assert variants[key_of(variant)] is variant


def test_outside_of_a_rehearsal_launches_are_made() -> None:
    with fake_device() as device:
        with rehearsal() as variants:
            write_rows(device, 4)
        compile_variants(list(variants.values()), CPU)
        write_rows(device, 4)
        assert [name for name, *_ in device.launches] == [reshape_and_cache_kernel.__name__]


def test_what_was_compiled_side_by_side_is_not_compiled_again() -> None:
    with fake_device() as device:
        with rehearsal() as variants:
            write_rows(device, 4)
            write_rows(device, 4, skipped=1)
        told: list[int] = []
        compile_variants(list(variants.values()), CPU, told.append)
        assert told == [1, 1]
        codes = reshape_and_cache_kernel.device_caches[NUMBER][0]
        assert len(codes) == 2
        for skipped in (0, 1):
            write_rows(device, 33, skipped=skipped)
        assert len(codes) == 2 and len(device.launches) == 2


def test_a_launch_that_was_made_is_made_in_a_rehearsal() -> None:
    with fake_device() as device:
        write_rows(device, 4)
        with rehearsal() as variants:
            write_rows(device, 5)
        assert not variants and len(device.launches) == 2


def test_errors_of_the_compiler_come_through() -> None:
    class Broken:
        def warmup(self, *args: object, grid: object) -> None:
            raise ValueError("no such instruction")

    with fake_device(), pytest.raises(ValueError, match="no such instruction"):
        compile_variants([Variant(Broken(), (), {})], CPU)


@pytest.mark.parametrize("num_errors", [1, 2])
def test_what_threads_disturb_is_compiled_alone(num_errors: int) -> None:
    """As Python 3.11 does when several threads parse; an error that stays comes through."""

    class Disturbed:
        def __init__(self) -> None:
            self.num_calls = 0

        def warmup(self, *args: object, grid: object) -> None:
            self.num_calls += 1
            if self.num_calls <= num_errors:
                raise RuntimeError("at 1:2") from SystemError("AST constructor recursion depth mismatch")

    kernel, told = Disturbed(), list[int]()
    with fake_device(), pytest.raises(RuntimeError) if num_errors == 2 else nullcontext():
        compile_variants([Variant(kernel, (), {})], CPU, told.append)
    assert told == [1] and kernel.num_calls == 2


@pytest.mark.parametrize("number", [1, 15, 16, 2**31 - 1, 2**31, 2**31 + 16])
def test_numbers_are_told_apart_as_triton_does(number: int) -> None:
    """Those of a kernel of three: specialised, of its type alone, and a constant."""

    @triton.jit(do_not_specialize=["b"])
    def kernel(a, b, C: triton.language.constexpr):
        pass

    usual = key_of(Variant(kernel, (17, 17, 3), {}))
    is_large = number > 2**31 - 1
    assert (key_of(Variant(kernel, (number, 17, 3), {})) == usual) is (number in (15, 2**31 - 1))
    assert (key_of(Variant(kernel, (17, number, 3), {})) == usual) is not is_large
    assert key_of(Variant(kernel, (17, 17, number), {})) != usual
    assert key_of(Variant(kernel, (17, 17, 3), {"num_warps": 8})) != usual
