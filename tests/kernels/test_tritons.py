"""The launches of every kernel that .ci/tritons makes under other versions of Triton: alike, and with their errors."""

import json
import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from support import launch_kernels  # noqa: E402
from triton.runtime import driver  # noqa: E402


@pytest.fixture(autouse=True)
def usual_driver():
    yield
    if torch.cuda.is_available():
        driver.reset_active()


def test_a_case_is_launched_alike_each_time(capsys):
    assert launch_kernels.main("deviation") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"case": "deviation", "error": None}]


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
