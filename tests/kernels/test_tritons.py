""".ci/tritons, which launches every kernel under other versions of Triton: cases, choice of versions, table."""

import importlib.util
import json
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from support import launch_kernels  # noqa: E402
from triton.runtime import driver  # noqa: E402

COMMAND = Path(__file__).parents[2] / ".ci" / "tritons"


@pytest.fixture(scope="module")
def tritons():
    loader = SourceFileLoader("tritons", str(COMMAND))
    spec = importlib.util.spec_from_loader("tritons", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def usual_driver():
    yield
    if torch.cuda.is_available():
        driver.reset_active()


def test_another_version_each_day(tritons):
    found = [tritons.chosen([], day) for day in range(len(tritons.VERSIONS))]
    assert sorted(found) == sorted([version] for version in tritons.VERSIONS)
    assert tritons.chosen(["all"], 3) == list(tritons.VERSIONS) and tritons.chosen(["3.4.0"], 3) == ["3.4.0"]


def test_the_table(tritons):
    results = {"3.2.0": {"decode": None, "merge": "ValueError('x')"}, "3.9.0": {"start": "ended with 1"}}
    assert tritons.table(results).splitlines() == [
        "          3.2.0    3.9.0",
        "decode       ok    FAILS",
        "merge     FAILS    FAILS",
        "start     FAILS    FAILS",
    ]


def test_a_case_is_launched_alike_each_time(capsys):
    assert launch_kernels.main("deviation") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"case": "deviation", "error": None}]


def test_a_case_that_fails_tells_the_first_error(capsys, monkeypatch):
    def fail():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    monkeypatch.setitem(launch_kernels.CASES, "none", (90, lambda: fail))
    assert launch_kernels.main("none") == 1
    assert json.loads(capsys.readouterr().out) == {"case": "none", "error": "KeyError('first')"}


def test_a_compiler_that_ends_the_process_is_an_error(capsys, monkeypatch):
    monkeypatch.setitem(launch_kernels.CASES, "none", (90, lambda: os._exit(6)))
    assert launch_kernels.main("none") == 1
    assert json.loads(capsys.readouterr().out)["error"] == "the compiler ended the process"


def test_a_profiler_that_hears_nothing_is_an_error(monkeypatch):
    class Deaf(launch_kernels.KeepingDriver):
        def launcher_cls(self, source, metadata):
            return lambda *args: self.take((args[4], args[:3], 7, ()), source, metadata)

    monkeypatch.setattr(launch_kernels, "KeepingDriver", Deaf)
    with pytest.raises(AssertionError, match="a profiler must hear of 1 launches, heard of 0"):
        launch_kernels.launch("deviation")
