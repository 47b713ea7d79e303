"""Builds kvpage._C with CMake. Metadata lives in pyproject.toml; `kernels/` is installed as kvpage.kernels, the
scripts in `benchmarks/` as kvpage.benchmarks, which `kvpage bench` runs.

Environment: KVPAGE_CUDA=AUTO|ON|OFF, CUDAARCHS (CMake's own list of CUDA architectures; by default those of the GPUs
that are here, without one all from 8.0 on), CMAKE_ARGS (passed on). `pip install -v .` shows what is compiled.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent.resolve()
CUDA_CHOICES = ("AUTO", "ON", "OFF")


def digest_of_sources() -> str:
    """Return a digest of the sources of the extension, by which benchmarks/record.py tells builds apart."""
    made = hashlib.sha256()
    for path in [HERE / "CMakeLists.txt", *sorted(path for path in (HERE / "csrc").rglob("*") if path.is_file())]:
        made.update(f"{path.relative_to(HERE)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return made.hexdigest()[:16]


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        cuda = os.environ.get("KVPAGE_CUDA", "AUTO").upper()
        if cuda not in CUDA_CHOICES:
            sys.exit(f"KVPAGE_CUDA must be one of {', '.join(CUDA_CHOICES)}, got {cuda!r}")
        target = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = Path(self.build_temp).resolve() / ext.name
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(HERE), "-B", str(build), "-G", "Ninja",
            # Given each time: a build folder may remember the ninja of a build environment that is gone.
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DKVPAGE_CUDA={cuda}",
            f"-DKVPAGE_VERSION={self.distribution.get_version()}",
            f"-DKVPAGE_SOURCES={digest_of_sources()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]  # fmt: skip
        for command in (configure, ["cmake", "--build", str(build), "--target", "_C"]):
            code = subprocess.run(command).returncode
            if code:
                sys.exit(f"building kvpage._C failed with exit code {code}; the output of CMake above says why")


setup(
    packages=[
        *find_packages(include=["kvpage*"], exclude=["kvpage.kernels*", "kvpage.benchmarks*"]),
        "kvpage.kernels",
        "kvpage.benchmarks",
        "kvpage.benchmarks.gpu",
    ],
    package_dir={
        "kvpage.kernels": "kernels",
        "kvpage.benchmarks": "benchmarks",
        "kvpage.benchmarks.gpu": "benchmarks/gpu",
    },
    package_data={"kvpage": ["py.typed", "*.pyi"], "kvpage.server.page": ["files/*"]},
    include_package_data=False,  # what the sdist holds besides, as recorded figures, stays out of the package
    ext_modules=[Extension("kvpage._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
