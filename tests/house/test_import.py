"""`import kvpage` asks for little, and gives what it says."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvpage
import kvpage._C as _C
from kvpage.source_folder import usable_path

ROOT = Path(__file__).resolve().parents[2]

HIDE = """
import importlib.abc, sys
HIDDEN = {hidden!r}
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""

USE = """
import torch, kvpage
from kvpage import ops
layout = kvpage.CacheLayout(4, 2, 8, torch.float32)
(cache,) = layout.allocate(3, 1, torch.device("cpu"))
rows = torch.randn(5, 2, 8)
ops.reshape_and_cache(rows, rows, cache, torch.arange(4, 9), layout)
keys, values = ops.gather_cache(cache, torch.tensor([[1, 2]], dtype=torch.int32), [5], layout)
assert torch.equal(keys, rows) and torch.equal(values, rows)
print("loaded:", *sorted({name.split(".")[0] for name in sys.modules} & {"triton", "transformers", "typer", "rich"}))
"""


def run(code: str, tmp_path) -> subprocess.CompletedProcess:
    """In a folder of its own, so that a checkout does not hide the installed package."""
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True)


def test_needs_neither_triton_nor_transformers(tmp_path):
    hidden = ["triton", "transformers", "typer", "rich", "matplotlib", "xxhash"]
    done = run(HIDE.format(hidden=hidden) + USE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "loaded:"


def test_loads_no_transformers(tmp_path):
    done = run("import sys, kvpage; print('transformers' in sys.modules)", tmp_path)
    assert done.stdout.strip() == "False", done.stderr


def test_the_command_line_names_the_extra_that_lacks(tmp_path):
    done = run(HIDE.format(hidden=["typer"]) + "import kvpage.tools.cli", tmp_path)
    assert done.returncode != 0
    assert "the command line needs the extra 'engine': pip install 'kvpage[engine]'" in done.stderr
    assert "Traceback" not in done.stderr


def sources(folder: Path) -> Path:
    """The project's sources as a clone has them: nothing is compiled in there."""
    clone = folder / "clone"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "kernels", "benchmarks")
    shutil.copytree(ROOT / "kvpage", clone / "kvpage", ignore=ignored)
    return clone


@pytest.mark.skipif(not (ROOT / "kvpage").exists(), reason="needs the source tree")
def test_python_started_in_a_clone_uses_what_is_installed(tmp_path):
    done = run("import sys" + USE, sources(tmp_path))
    assert done.returncode == 0, done.stderr
    done = run("import kvpage, kvpage.ops; print(kvpage.ops.__file__); print(kvpage.__version__)", tmp_path / "clone")
    installed = Path(kvpage.__path__[0]).resolve()
    assert done.stdout.split() == [str(installed / "ops" / "__init__.py"), kvpage.__version__]


@pytest.mark.skipif(not (ROOT / "kvpage").exists(), reason="needs the source tree")
def test_a_clone_says_that_nothing_is_installed(tmp_path):
    """-S: without site-packages. The sources come first, and alone."""
    clone = sources(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import kvpage"], cwd=clone, text=True, capture_output=True, env={}
    )
    assert done.returncode == 1
    assert f"imported from its source folder {clone / 'kvpage'}" in done.stderr and "pip install ." in done.stderr


def test_an_extension_for_another_python_is_none(tmp_path):
    (tmp_path / "kvpage").mkdir()
    (tmp_path / "kvpage" / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    with pytest.raises(ImportError, match="nothing is compiled for this Python"):
        usable_path([str(tmp_path / "kvpage")], [str(tmp_path), str(tmp_path / "absent")])


def test_public_names_exist():
    assert all(hasattr(kvpage, name) for name in kvpage.__all__)


NATIVE = pytest.mark.parametrize(
    "native",
    [
        _C.BlockPool,
        _C.ChunkPlan,
        _C.HotPrefix,
        _C.KVPart,
        _C._Xxh3,
        _C.PrefixTree,
        _C.Match,
        _C.PartMatch,
        _C.BlockCopier,
        _C.SequenceRows,
        _C.SlotAllocator,
        _C.SlotPool,
        _C.SlotTree,
        _C.TokenRules,
        _C.RecordOrder,
        _C.RecordWalk,
        _C.TreeEntry,
    ],
)


@NATIVE
def test_no_native_object_comes_to_be_without_its_constructor(native):
    """Such a one would have no C++ object behind it; pybind11 would take raw memory for that."""
    for base in native.__mro__:
        with pytest.raises(TypeError, match=r"__new__\(kvpage\._C\.\w+\) is not safe"):
            base.__new__(native)
    with pytest.raises(TypeError, match="constructor"):
        native()


@NATIVE
def test_native_classes_have_no_subclasses(native):
    with pytest.raises(TypeError, match="is not an acceptable base type"):
        type("Derived", (native,), {"__init__": lambda self: None})


@NATIVE
def test_native_classes_are_not_changed(native):
    with pytest.raises(TypeError, match="immutable type"):
        native.__init__ = lambda self: None
    pool = _C.BlockPool(4)
    with pytest.raises(TypeError, match="__class__ assignment"):
        pool.__class__ = native
    assert pool.num_free == 4


def test_all_native_classes_are_tested():
    classes = {value for value in vars(_C).values() if type(value).__name__ == "pybind11_type"}
    assert classes == set(NATIVE.args[1])


def test_native_objects_are_not_copied():
    pool = _C.BlockPool(4)
    for native in (pool, _C.PrefixTree(pool, 2), _C.PrefixTree(pool, 2).match([1])):
        with pytest.raises(TypeError):
            copy.copy(native)
