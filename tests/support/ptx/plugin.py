"""A plugin of pytest (-p support.ptx.plugin): tests of the "interpreter" run what Triton compiles for a GPU instead.

The kernels are imported before the tests are told of an interpreter, so Triton compiles them. Some tests are chosen by
a seed, as all of them take hours.
"""

import os
import pkgutil
import random
from collections.abc import Callable
from typing import Any

import pytest


class Fixed(dict):
    """A table that no test changes: what the interpreter of Triton needs in it would be wrong for compiled kernels."""

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __delitem__(self, key: object) -> None:
        pass


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx-arch", type=int, default=80, help="80 or 90")
    parser.addoption("--ptx-seed", type=int, default=0, help="chooses the tests")
    parser.addoption("--ptx-count", type=int, default=None, help="tests to choose; all without it")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("TRITON_INTERPRET must not be set: it replaces the compiler")
    import importlib

    from support.ptx.device import Device
    from triton.runtime import driver

    from kvpage import kernels

    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"kvpage.kernels.{module.name}")
    arch = config.getoption("--ptx-arch")
    driver.set_active(Device(arch))
    _answer_as(arch)
    os.environ["TRITON_INTERPRET"] = "1"  # for the tests alone: the kernels were taken already


def _answer_as(arch: int) -> None:
    """Let attention choose its tiles for this architecture, whichever a test names."""
    from kvpage.benchmarks.compiling_driver import SHARED_MEMORY
    from kvpage.kernels import attention_launch

    attention_launch._COMPUTE = Fixed(attention_launch._COMPUTE)
    for name, answers in (("choose_tile", (arch, SHARED_MEMORY[arch])), ("constants_of", (arch,))):
        setattr(attention_launch, name, _with_last(getattr(attention_launch, name), answers))


def _with_last(function: Callable[..., Any], answers: tuple[int, ...]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments[: -len(answers)], *answers)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if "interpreter" in item.name]
    for item in chosen:
        if item.module.__name__.endswith("test_triton_layouts"):
            item.module.INTERPRETED = False  # rows of sizes that compile
    count = config.getoption("--ptx-count")
    if count is not None and count < len(chosen):
        chosen = random.Random(config.getoption("--ptx-seed")).sample(chosen, count)
    items[:] = chosen
