"""Functions in whose code a name means something else, within wrappers of several kinds."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from kvpage.serving.model.meaning import innermost, with_meaning


def add(a: int, b: int) -> int:
    return a + b


def multiply(a: int, b: int) -> int:
    return a * b


def own(a: int, b: int = 3, *, c: int = 5) -> tuple[int, int]:
    return add(a, b), c


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return "wrapped", function(*args, **kwargs)

    return wrapper


def held_by_a_list(function: Callable[..., Any]) -> Callable[..., Any]:
    held = [function]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return held[0](*args, **kwargs)

    return wrapper


def recursive(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of the wrapper's cells is empty."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return never if args == () else function(*args, **kwargs)

    if function is None:
        never = 1
    return wrapper


class Wrapper:
    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)


@pytest.mark.parametrize(("num_wrappers", "expected"), [(0, (12, 7)), (1, ("wrapped", (12, 7)))])
def test_a_name_means_something_else_in_the_copy_alone(num_wrappers: int, expected: object) -> None:
    function: Callable[..., Any] = own
    for _ in range(num_wrappers):
        function = wrapped(function)
    copy = with_meaning(function, "add", multiply)
    assert copy is not None
    assert copy(4, c=7) == expected
    assert innermost(copy, "add").__globals__["add"] is multiply
    assert own(4) == (7, 5) and innermost(function, "add") is own


def test_wrappers_of_wrappers() -> None:
    copy = with_meaning(wrapped(recursive(wrapped(own))), "add", multiply)
    assert copy is not None
    assert copy(4, 2, c=1) == ("wrapped", ("wrapped", (8, 1)))


@pytest.mark.parametrize("function", [held_by_a_list(own), wrapped(held_by_a_list(own)), Wrapper(own), len, None, 3])
def test_none_where_a_wrapper_would_call_the_function_itself(function: object) -> None:
    assert with_meaning(function, "add", multiply) is None


@pytest.mark.parametrize(
    ("function", "found"), [(own, own), (Wrapper(own), own), (multiply, None), (len, None), (3, None)]
)
def test_the_innermost_function_that_has_the_name(function: object, found: object) -> None:
    assert innermost(function, "add") is found
