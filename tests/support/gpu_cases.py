"""Marks of a test where no GPU is: none of the cases that need one is made.

    [parametrize where: cpu, cuda(gpu)]  ─►  [parametrize where: cpu]
    [parametrize where: cuda(gpu)]       ─►  [gpu]      one test instead of its cases, which is skipped

A grid has thousands of cases, and each would cost the time of a small test to be skipped.
"""

from collections.abc import Iterable, Sequence

import pytest


def without_gpu_cases(marks: Sequence[pytest.Mark], is_whole: bool) -> list[pytest.Mark]:
    """Return the marks of a test function without the cases that are marked `gpu`.

    Args:
        marks: of the function itself, as `pytestmark` has them.
        is_whole: whether its class or module is marked `gpu`.

    Returns:
        The same marks with fewer cases; for a test without other cases, its marks without parameters, and `gpu`.
    """
    reduced = [without_gpu_values(mark) if mark.name == "parametrize" else mark for mark in marks]
    if is_whole or None in reduced or any(mark.name == "gpu" for mark in marks):
        return [*(mark for mark in marks if mark.name not in ("parametrize", "gpu")), pytest.mark.gpu.mark]
    return [mark for mark in reduced if mark is not None]


def without_gpu_values(mark: pytest.Mark) -> pytest.Mark | None:
    """Return a mark `parametrize` without the values that are marked `gpu`; None if it has no others."""
    names, values, *others = mark.args
    values = list(values)
    kept = [index for index, value in enumerate(values) if not needs_gpu(value)]
    if len(kept) == len(values):
        return mark
    ids = mark.kwargs.get("ids")
    options = dict(mark.kwargs)
    if isinstance(ids, Iterable):
        ids = list(ids)
        options["ids"] = [ids[index] for index in kept]
    return pytest.mark.parametrize(names, [values[index] for index in kept], *others, **options).mark if kept else None


def needs_gpu(value: object) -> bool:
    return any(mark.name == "gpu" for mark in getattr(value, "marks", ()))
