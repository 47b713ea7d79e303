"""Triton's cache filled without a GPU: for which launches, by which keys, and what is said of those that fail."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import torch  # noqa: E402

from kvpage.benchmarks import bench_paged_attention, fill_triton_cache, gpu_launches  # noqa: E402
from kvpage.benchmarks.fake_device import fake_device  # noqa: E402
from kvpage.benchmarks.fill_triton_cache import KEY_MODULES, compile_share, keys_of, names_of, num_kernels  # noqa: E402


def key():
    module = next(name for name in KEY_MODULES if hasattr(sys.modules[name], "triton_key"))
    return sys.modules[module].triton_key()


def test_a_key_follows_from_the_other_library(tmp_path):
    """The wheels of two Pythons differ in their native library, and so would their keys."""
    keys = []
    for name, content in (("one", b"312"), ("other", b"313"), ("again", b"312")):
        (tmp_path / name).write_bytes(content)
        with keys_of(tmp_path / name):
            keys.append(key())
    assert keys[0] == keys[2] != keys[1]


def test_each_launch_has_a_name_of_its_own():
    names = names_of(90, [])
    assert len(set(names)) == len(names)
    assert {"write rows", "smoke rows", "decode llama 3 8B bfloat16 64 8192 1", "sample float32"} <= set(names)
    cases = bench_paged_attention.cases(bench_paged_attention.SIZES["whole"])
    assert sum(name.startswith(("decode ", "prefill ")) for name in names) == len(list(cases))
    assert names_of(80, ["smoke"]) == [name for name in names if "smoke" in name]


def test_a_launch_that_cannot_be_compiled_is_named_and_the_others_are(monkeypatch):
    def broken():
        raise RuntimeError("PTXAS error\nwith details")

    ran = []
    calls = {"right": lambda: ran.append(1), "broken": broken, "not asked for": broken, "last": lambda: ran.append(2)}
    monkeypatch.setattr(fill_triton_cache, "launches", lambda device: iter(calls.items()))
    failed = compile_share((90, ["right", "broken", "last"]), None)
    assert failed == {"broken": "RuntimeError: PTXAS error"} and ran == [1, 2]


def test_the_cause_is_the_first_of_a_chain():
    try:
        try:
            raise ValueError("at the root")
        except ValueError as error:
            raise RuntimeError("above it") from error
    except RuntimeError as error:
        assert fill_triton_cache._first_cause(error) == "ValueError: at the root"


def test_machine_code_is_counted(tmp_path):
    assert num_kernels(tmp_path / "none") == 0
    for name in ("A/kernel.cubin", "A/kernel.json", "B/kernel.cubin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert num_kernels(tmp_path) == 2


def test_a_failure_is_an_exit_code(monkeypatch, capsys):
    report = {"compiled": 1, "failed": {"sample": "TypeError: no"}}
    monkeypatch.setattr(fill_triton_cache, "fill", lambda *_: report)
    monkeypatch.setattr(sys, "argv", ["", "--capability", "90"])
    with pytest.raises(SystemExit) as ended:
        fill_triton_cache.main()
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and json.loads(lines[0]) == report and lines[1] == "sample: TypeError: no"


@pytest.mark.parametrize("capability", [80, 90])
def test_launches_are_those_of_the_capability(capability, monkeypatch):
    """What is compiled for one is nothing to the other."""
    asked = []
    monkeypatch.setattr(gpu_launches.ops, "attend", lambda query, cache, sequences, attention: asked.append(sequences))
    with fake_device(capability) as device:
        target = device.get_current_target()
        calls = dict(gpu_launches.attention_launches(device))
        calls["prefill llama 3 8B bfloat16 1 8192 256"]()
    assert target.arch == capability and device.facts[1] == capability
    (sequences,) = asked
    assert sequences.max_query_len == 256 and sequences.seq_lens.dtype == torch.int32


PRETENDED = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  *zipfile*) touch "$TRITON_CACHE_DIR/kernel.ptx" "$TRITON_CACHE_DIR/kernel.cubin" "$TRITON_CACHE_DIR/kernel.json";;
  *fill_triton_cache*) exit "$ENDS_WITH";;
esac
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("code", [0, 1])
def test_the_script_asks_for_both_wheels_and_keeps_what_a_launch_needs(code, tmp_path):
    python, cache, calls = tmp_path / "bin/python3", tmp_path / "cache", tmp_path / "calls"
    python.parent.mkdir()
    cache.mkdir()
    python.write_text(PRETENDED)
    python.chmod(0o755)
    script = Path(__file__).parents[2] / "benchmarks/fill_triton_cache.sh"
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "CALLS": str(calls)}
    environment |= {"TRITON_CACHE_DIR": str(cache), "ENDS_WITH": str(code), "TMPDIR": str(tmp_path)}
    command = ["bash", script, "3.5.1", "3.13", "--capability", "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    install, download, _, fill = calls.read_text().splitlines()
    assert install.endswith("triton==3.5.1") and "--python-version 3.13" in download
    assert "libtriton.so --capability 90" in fill
    assert done.returncode == code and {path.name for path in cache.iterdir()} == {"kernel.cubin", "kernel.json"}
