"""The example of mini-sglang, over managers of its shape; over itself where MINI_SGLANG names its folder."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import fake_mini_sglang

from kvpage.integrations.mini_sglang import PrefixSlots

PATH = Path(__file__).parents[2] / "examples" / "mini_sglang.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("example_mini_sglang", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "NUM_PROMPTS", 60)
    return module


@pytest.fixture
def lives(example, monkeypatch):
    parts = fake_mini_sglang.installed(monkeypatch)
    monkeypatch.setattr(example, "load", lambda folder: parts)
    return example


def test_prompts_find_what_others_computed(lives, capsys):
    lives.main("nowhere")
    lines = capsys.readouterr().out.splitlines()
    found = [int(line.split(": ")[1].split()[0]) for line in lines if "found" in line]
    assert found[0] == found[2] == 0  # a cache that keeps nothing
    assert found[1] > 1000 and found[3] > 800
    assert all(line.startswith("    0 of") for line in lines if "found" not in line)


def test_a_slot_under_wrong_tokens_shows(lives, monkeypatch):
    evicted = PrefixSlots.evict
    monkeypatch.setattr(PrefixSlots, "evict", lambda self, size: evicted(self, size).flip(0) // 2)
    with pytest.raises((AssertionError, ValueError)):
        lives.main("nowhere")


def written(folder: Path, **files: str) -> None:
    """Write modules that begin a package minisgl."""
    for name in ("utils/misc", "utils/registry", "core", "kvcache/__init__"):
        path = folder / "minisgl" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name.split("/")[0], ""))
    for name in ("cache", "table", "decode", "prefill"):
        path = folder / "minisgl" / "scheduler" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.touch()


@pytest.fixture
def alone():
    """No module of mini-sglang outlives the test."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "minisgl"]:
        del sys.modules[name]


def test_a_folder_without_the_package_is_refused(example, tmp_path):
    with pytest.raises(FileNotFoundError, match="folder must hold the package minisgl, .*utils/misc.py"):
        example.main(str(tmp_path))
    written(tmp_path)
    (tmp_path / "minisgl" / "scheduler" / "table.py").unlink()
    with pytest.raises(FileNotFoundError, match="minisgl/scheduler/table.py"):
        example.main(str(tmp_path))


@pytest.mark.parametrize(("core", "lacks"), [("", "core.py must have Context"), ("Context = SamplingParams = 1", "kv")])
def test_a_version_with_other_names_is_refused(example, alone, tmp_path, core, lacks):
    written(tmp_path, core=core)
    with pytest.raises(ImportError, match=lacks):
        example.main(str(tmp_path))


def test_tokens_are_compared_up_to_the_first_that_differs(example):
    tokens = torch.tensor([3, 1, 2])
    others = [torch.tensor(other) for other in ([3, 1, 2, 9], [3, 1], [3, 9, 2], [1])]
    assert [example.num_alike(tokens, other) for other in [*others, tokens[:0]]] == [3, 2, 1, 0, 0]


def test_rows_get_their_slots_and_no_others(example):
    table = torch.full((3, 6), -1)
    example.write_rows(table, torch.arange(6), [(2, 0, 1), (0, 1, 3)], page_size=2)
    assert table.tolist() == [[-1, -1, 2, 3, 4, 5], [-1] * 6, [0, 1, -1, -1, -1, -1]]


@pytest.mark.skipif("MINI_SGLANG" not in os.environ, reason="MINI_SGLANG names no folder with the package minisgl")
def test_mini_sglang_itself():
    done = subprocess.run([sys.executable, PATH, os.environ["MINI_SGLANG"]], text=True, capture_output=True)
    assert done.stdout.count("prompt tokens found") == 4, done.stderr
    found = [int(line.split(": ")[1].split()[0]) for line in done.stdout.splitlines() if "found" in line]
    assert all(found)
    assert all(line.startswith("    0 of") for line in done.stdout.splitlines()[3::4])  # those over kvpage
