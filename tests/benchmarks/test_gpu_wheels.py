"""Peers from a folder of wheels: what is there is installed apart, what is broken is said."""

import base64
import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvpage.benchmarks import gpu_wheels

# It is neither imported nor looked for by the import system here: setuptools would then leave the distutils of later
# imports alone, which breaks torch's compiler.
try:
    importlib.metadata.version("pip")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("needs pip", allow_module_level=True)


def make_wheel(folder: Path, name: str) -> Path:
    """A wheel of one module, and one in a folder that others share, which asks for a package that is nowhere."""
    files = {
        f"{name}.py": b"VALUE = 7\n",
        f"shared/of_{name}.py": b"VALUE = 8\n",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        "Requires-Dist: a-package-that-is-nowhere\n".encode(),
        f"{name}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    records = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in files.items()
    ]
    files[f"{name}-1.0.dist-info/RECORD"] = "\n".join([*records, f"{name}-1.0.dist-info/RECORD,,", ""]).encode()
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return wheel


def test_wheels_are_installed_apart_and_broken_ones_left_out(tmp_path, capsys):
    wheel, other = (make_wheel(tmp_path, name) for name in ("a_carried_peer", "another_peer"))
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no archive")
    target = tmp_path / "target"
    assert gpu_wheels.install(tmp_path, target) == [wheel.name, other.name]
    assert "broken-1.0-py3-none-any.whl is left out" in capsys.readouterr().out
    code = "import a_carried_peer, shared.of_a_carried_peer, shared.of_another_peer; print(a_carried_peer.VALUE)"
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-c", code],
        env={"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "7\n", done.stderr


def test_no_folder_is_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", str(tmp_path / "none"), str(tmp_path / "target")])
    gpu_wheels.main()
    assert "no wheels in" in capsys.readouterr().out and not (tmp_path / "target").exists()


def test_only_wheels_that_fit_the_patterns_are_installed(tmp_path):
    """FlashInfer comes in a part of its own."""
    peer, other = (make_wheel(tmp_path, name) for name in ("a_carried_peer", "another_peer"))
    assert gpu_wheels.install(tmp_path, tmp_path / "one", only=["a_*", "none*"]) == [peer.name]
    assert gpu_wheels.install(tmp_path, tmp_path / "two", without=["a_*"]) == [other.name]
    assert gpu_wheels.install(tmp_path, tmp_path / "three", without=["*"]) == []
