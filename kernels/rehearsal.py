"""Rehearsal: launches that are not made. What they would compile is noted, and compiled side by side.

    with rehearsal() as variants:          a step of padding ─► Prepared.launch ─► variants
    compile_variants(variants, device)     the compiler, in as many threads as there are cores

A launch that was made before is made: Triton has its machine code.
"""

import os
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

ALIGNMENT = 16  # bytes: kernels are compiled anew for addresses and numbers that are no multiple of it
LARGEST = 2**31 - 1  # larger numbers are of another type: kernels are compiled anew for these
MAX_THREADS = 16  # each may take some 300 MB while it compiles


class Variant(NamedTuple):
    """A kernel, with arguments and options that ask for one machine code. Its tensors are a few bytes each."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


Variants = dict[Hashable, Variant]

rehearsed: ContextVar[Variants | None] = ContextVar("rehearsed", default=None)


@contextmanager
def rehearsal() -> Iterator[Variants]:
    """Note, inside, what the calling thread's launches would compile. They leave their results as they are."""
    variants: Variants = {}
    token = rehearsed.set(variants)
    try:
        yield variants
    finally:
        rehearsed.reset(token)


def note(variants: Variants, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Note a launch with these arguments, unless one like it is noted."""
    key = key_of(Variant(kernel, arguments, options))
    if key not in variants:
        variants[key] = Variant(kernel, tuple(map(_small, arguments)), options)


def key_of(variant: Variant) -> Hashable:
    """Return a key that launches of the same machine code share, and no others."""
    forms = tuple(_form(*pair) for pair in zip(variant.kernel.params, variant.arguments, strict=True))
    return variant.kernel.fn.__qualname__, forms, tuple(sorted(variant.options.items()))


def _form(parameter: Any, argument: Any) -> Hashable:
    """Return all that Triton compiles for in an argument."""
    if isinstance(argument, torch.Tensor):
        is_looked_at = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        return argument.dtype, is_looked_at and argument.data_ptr() % ALIGNMENT == 0
    if isinstance(argument, float):
        return float
    if parameter.is_constexpr or isinstance(argument, bool) or not isinstance(argument, int):
        known: Hashable = argument
        return known
    is_large = argument > LARGEST
    return is_large if parameter.do_not_specialize else (is_large, argument == 1, argument % ALIGNMENT == 0)


def _small(argument: Any) -> Any:
    """Return a tensor of a few elements with the same dtype and alignment; any other argument as it is."""
    if not isinstance(argument, torch.Tensor):
        return argument
    few = torch.empty(2, dtype=argument.dtype, device=argument.device)
    return few[1:] if argument.data_ptr() % ALIGNMENT else few


def compile_variants(
    variants: Collection[Variant], device: torch.device, progress: Callable[[int], object] = lambda num: None
) -> None:
    """Compile for a device. progress: called with 1 after each. Errors of the compiler are raised as they are."""

    def build(variant: Variant) -> None:
        with torch.cuda.device(device):  # each thread has a current one of its own
            variant.kernel.warmup(*variant.arguments, grid=(1, 1, 1), **variant.options)

    with ThreadPoolExecutor(min(max(len(variants), 1), _num_cores(), MAX_THREADS), "kvpage-compile") as pool:
        futures = [pool.submit(build, variant) for variant in variants]
        try:
            for future in as_completed(futures):
                if not _is_of_threads(future.exception()):
                    future.result()
                progress(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    # A kernel's table is made by whichever thread comes first, and another may be lost; so may what threads disturb.
    for variant in variants:
        build(variant)


def _is_of_threads(error: BaseException | None) -> bool:
    """Return whether an error comes of several threads alone: Python 3.11 parses sources wrongly in some at once.

    "AST constructor recursion depth mismatch" is its SystemError, which Triton wraps.
    """
    while error is not None:
        if isinstance(error, SystemError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
