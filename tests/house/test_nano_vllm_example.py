"""The example of nano-vllm, over modules with its names; over nano-vllm itself where NANO_VLLM names its folder."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from support import fake_nano_vllm  # noqa: E402

PATH = Path(__file__).parents[2] / "examples" / "nano_vllm.py"


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch):
    """The example, over what a folder has. No module of nano-vllm outlives the test, and no group of processes."""
    spec = importlib.util.spec_from_file_location("example_nano_vllm", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield module
    torch.compiler.set_stance("default")
    if dist.is_initialized():  # by a call that has failed
        dist.destroy_process_group()
    for name in [name for name in sys.modules if name.split(".")[0] == "nanovllm"]:
        del sys.modules[name]


@pytest.fixture
def example(real, monkeypatch: pytest.MonkeyPatch):
    """The example, over modules in place of nano-vllm's."""
    with monkeypatch.context() as fakes:
        fake_nano_vllm.installed(fakes)
        fakes.setattr(real, "check_files", lambda folder: None)
        yield real


@pytest.mark.parametrize("num_blocks", [200, 60], ids=["enough blocks", "preempted and evicted"])
def test_tokens_are_those_of_generate_and_prefixes_are_found(example, capsys, num_blocks):
    example.main("nowhere", num_blocks)
    same, found = capsys.readouterr().out.splitlines()
    assert same == "24 of 24 prompts as model.generate"
    assert int(found.split()[0]) > 1000
    assert "flash_attn" not in sys.modules


def test_a_sequence_that_does_not_fit_is_an_error_and_not_a_loop(example):
    with pytest.raises(example.OutOfBlocks):
        example.main("nowhere", num_blocks=10)


def test_what_is_not_there_refuses_to_be_called(example):
    with pytest.raises(RuntimeError, match="PagedAttention should have been called"):
        example.refusing("flash_attn", "one").one(1, two=2)


FILES = {
    "__init__": "",
    "models/qwen3": "Attention = RMSNorm = Qwen3ForCausalLM = 1",
    "engine/llm_engine": "import flash_attn\nModelRunner = Scheduler = 1",
    "utils/context": "get_context = reset_context = 1\ndef set_context(is_prefill, cu_seqlens_q=None): ...",
    "utils/loader": "load_model = 1",
}


def written(folder: Path, **changed: str) -> str:
    """Write a package nanovllm of few names."""
    for name, text in {**FILES, **changed}.items():
        path = folder / "nanovllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_a_folder_without_the_package_is_refused(real, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold the package nanovllm, .*nanovllm/__init__.py"):
        real.main(str(tmp_path))
    (Path(written(tmp_path)) / "nanovllm" / "utils" / "loader.py").unlink()
    with pytest.raises(FileNotFoundError, match="without .*nanovllm/utils/loader.py"):
        real.main(str(tmp_path))
    assert "nanovllm" not in sys.modules


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"models/qwen3": "Attention = 1"}, "models/qwen3.py must have RMSNorm, got a version of nano-vllm without it"),
        ({"engine/llm_engine": "ModelRunner = 1"}, "engine/llm_engine.py must have Scheduler"),
        ({}, r"utils/context.py: set_context must take .*, block_tables, got \(is_prefill, cu_seqlens_q=None\)"),
    ],
    ids=["no norm", "no scheduler", "another step"],
)
def test_a_version_with_another_interface_is_refused(real, tmp_path, changed, message):
    with pytest.raises(ImportError, match=message):
        real.main(written(tmp_path, **changed))
    assert "flash_attn" not in sys.modules


@pytest.mark.skipif("NANO_VLLM" not in os.environ, reason="NANO_VLLM names no folder with the package nanovllm")
def test_nano_vllm_itself():
    done = subprocess.run([sys.executable, PATH, os.environ["NANO_VLLM"]], text=True, capture_output=True)
    assert "24 of 24 prompts as model.generate" in done.stdout, done.stderr
