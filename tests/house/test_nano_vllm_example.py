"""The example of nano-vllm, over modules with its names; over nano-vllm itself where NANO_VLLM names its folder."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from support import fake_nano_vllm  # noqa: E402

PATH = Path(__file__).parents[2] / "examples" / "nano_vllm.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("example_nano_vllm", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fake_nano_vllm.installed(monkeypatch)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield module
    torch.compiler.set_stance("default")


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


@pytest.mark.skipif("NANO_VLLM" not in os.environ, reason="NANO_VLLM names no folder with the package nanovllm")
def test_nano_vllm_itself():
    done = subprocess.run([sys.executable, PATH, os.environ["NANO_VLLM"]], text=True, capture_output=True)
    assert "24 of 24 prompts as model.generate" in done.stdout, done.stderr
