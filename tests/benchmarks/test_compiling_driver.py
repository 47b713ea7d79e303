"""The driver of a GPU that is not there answers whatever Triton's compiler asks of a driver."""

import os
import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from kvpage.benchmarks.compiling_driver import NUM_LOADED, SHARED_MEMORY, CompilingDriver  # noqa: E402

COMPILER = Path(triton.__file__).parent / "compiler" / "compiler.py"


def test_it_has_what_the_compiler_calls():
    source = COMPILER.read_text()
    names = set(re.findall(r"driver\.active\.(?:utils\.)?(\w+)", source)) - {"utils"}
    assert "load_binary" in names and all(hasattr(CompilingDriver, name) for name in names - {"launcher_cls"})
    taken = re.search(r"([\w., ]+) = driver\.active\.utils\.load_binary", source)[1]
    assert len(taken.split(",")) == NUM_LOADED == len(CompilingDriver(1).load_binary("name", b"code", 0, 1))


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_a_device(arch):
    device = CompilingDriver(7, arch, num_multiprocessors=3)
    assert device.get_current_device() == 7 and device.get_current_target().arch == arch
    assert device.get_device_properties(7) == {"max_shared_mem": SHARED_MEMORY[arch], "multiprocessor_count": 3}
    device.unload_module("name")


def test_hooks_hear_of_each_launch_before_it_is_taken():
    heard = []

    class Keeping(CompilingDriver):
        def take(self, launch, source, metadata):
            heard.append((launch, source, metadata))

    launch = Keeping(1).launcher_cls("source", "metadata")
    launch(1, 2, 3, 7, "code", None, "about", heard.append, None, 4, 5)
    assert heard == ["about", (("code", (1, 2, 3), 7, (4, 5)), "source", "metadata")]
