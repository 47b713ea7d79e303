"""The build as a user meets it: with and without nvcc, as an sdist, editable; and what it links and compiles to."""

import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

import kvpage
import kvpage._C as _C
from kvpage.tools.build import _cuda_version, _installed

pybind11 = pytest.importorskip("pybind11")

ROOT = Path(__file__).resolve().parents[2]
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
BUILD_OUTPUT = shutil.ignore_patterns(".git", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache")


def not_in_a_clone(folder: str, names: list[str]) -> set[str]:
    """Return the names that a build or an editable install has made; the latter links folders into the package."""
    return BUILD_OUTPUT(folder, names) | {name for name in names if Path(folder, name).is_symlink()}


needs_nvcc = pytest.mark.skipif(not NVCC, reason="no nvcc")
pytestmark = pytest.mark.skipif(
    not (ROOT / "CMakeLists.txt").exists() or not shutil.which("cmake") or not shutil.which("ninja"),
    reason="needs the source tree, cmake and ninja",
)


def environment(**changes: str) -> dict[str, str]:
    """This environment with nvcc nowhere to be found, and `changes`."""
    removed = ("CUDACXX", "CUDAARCHS", "CUDA_PATH", "CUDAToolkit_ROOT", "KVPAGE_CUDA", "CMAKE_ARGS")
    env = {name: value for name, value in os.environ.items() if name not in removed}
    folders = [folder for folder in env["PATH"].split(os.pathsep) if not (Path(folder) / "nvcc").exists()]
    return env | {"PATH": os.pathsep.join(folders)} | changes


def configure(source: Path, build: Path, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        shutil.which("cmake"), "-S", source, "-B", build, "-G", "Ninja", *options,
        f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}", f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]  # fmt: skip
    return subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


BROKEN_NVCC = {
    "fails": "exit 1",
    "only prints a version": 'case "$*" in *--version*|*-V*) echo "nvcc: release 13.0, V13.0.88";; *) exit 1;; esac',
    "compiles nothing, happily": "exit 0",
}


def look_for_cuda(folder: Path, choice: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Configure a project that does nothing but look for a CUDA compiler; it prints whether there is one."""
    include = f'include("{ROOT}/csrc/cuda/compiler.cmake")\nmessage(STATUS "cuda: ${{KVPAGE_HAS_CUDA}}")\n'
    start = "cmake_minimum_required(VERSION 3.24)\nproject(stand_in NONE)\n"
    (folder / "CMakeLists.txt").write_text(start + include)
    return configure(folder, folder / "build", environment(**variables), f"-DKVPAGE_CUDA={choice}")


def test_on_without_a_compiler_fails_with_one_sentence(tmp_path):
    done = look_for_cuda(tmp_path, "ON")
    assert done.returncode != 0
    sentence = "KVPAGE_CUDA=ON needs a working CUDA compiler with the static CUDA runtime and none was found"
    assert sentence in " ".join(done.stdout.split())
    assert done.stdout.count("CMake Error") == 1


@pytest.mark.parametrize("broken", BROKEN_NVCC.values(), ids=BROKEN_NVCC)
def test_auto_survives_a_broken_compiler(broken, tmp_path):
    done = look_for_cuda(tmp_path, "AUTO", CUDACXX=script(tmp_path / "nvcc", broken))
    assert done.returncode == 0, done.stdout
    assert "-- cuda: OFF" in done.stdout


def test_auto_without_a_compiler(tmp_path):
    done = look_for_cuda(tmp_path, "AUTO")
    assert done.returncode == 0, done.stdout
    assert "-- cuda: OFF" in done.stdout


def test_off_asks_no_compiler(tmp_path):
    nvcc = script(tmp_path / "nvcc", f"touch {tmp_path}/asked; exit 1")
    done = look_for_cuda(tmp_path, "OFF", CUDACXX=nvcc)
    assert done.returncode == 0 and "-- cuda: OFF" in done.stdout, done.stdout
    assert not (tmp_path / "asked").exists()


@needs_nvcc
def test_a_compiler_that_works_is_used(tmp_path):
    done = configure(ROOT, tmp_path, environment(CUDACXX=NVCC, CUDAARCHS="90"), "-DKVPAGE_CUDA=ON")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^-- kvpage: the C\+\+ core and CUDA for 90,", done.stdout, re.MULTILINE)


LISTED = "printf 'compute_75\\ncompute_80\\ncompute_86\\ncompute_90\\ncompute_90a\\ncompute_100\\n'"
ALL_ARCHS = "80-real;86-real;90-real;100-real;100-virtual"
GPUS = {
    "two kinds": ('printf "9.0\\n8.6\\n9.0\\n"', "86-real;90-real;90-virtual"),
    "too old, and nonsense": ('printf "7.5\\n[N/A]\\n"', ALL_ARCHS),
    "newer than the compiler": ("echo 12.0", ALL_ARCHS),
    "none": ("echo No devices were found; exit 6", ALL_ARCHS),
}


def architectures(folder: Path, gpus: str, **variables: str) -> str:
    """Return what is compiled for beside these GPUs, as nvidia-smi answers, by an nvcc that lists LISTED."""
    script(folder / "nvidia-smi", gpus)
    (folder / "ask.cmake").write_text(
        f'set(CMAKE_CUDA_COMPILER "{script(folder / "nvcc", LISTED)}")\n'
        f'include("{ROOT}/csrc/cuda/architectures.cmake")\nmessage("${{CMAKE_CUDA_ARCHITECTURES}}")\n'
    )
    env = environment(**variables)
    env["PATH"] = f"{folder}{os.pathsep}{env['PATH']}"
    done = subprocess.run([shutil.which("cmake"), "-P", folder / "ask.cmake"], env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize("gpus", GPUS)
def test_the_gpus_that_are_here_are_compiled_for(tmp_path, gpus):
    answer, archs = GPUS[gpus]
    assert architectures(tmp_path, answer) == archs


def test_the_caller_names_architectures(tmp_path):
    assert architectures(tmp_path, "echo 8.6", CUDAARCHS="90") == "90"


def test_other_words_are_refused(tmp_path):
    done = configure(ROOT, tmp_path / "build", environment(), "-DKVPAGE_CUDA=MAYBE")
    assert done.returncode != 0 and "KVPAGE_CUDA must be AUTO, ON or OFF, got MAYBE" in done.stdout
    setup = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path]
    done = subprocess.run(setup, cwd=ROOT, env=environment(KVPAGE_CUDA="maybe"), text=True, capture_output=True)
    assert done.returncode != 0
    assert "KVPAGE_CUDA must be one of AUTO, ON, OFF, got 'MAYBE'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The sdist that a build frontend makes of a clone, unpacked beside `tree`, the clone."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = shutil.copytree(ROOT, folder / "tree", ignore=not_in_a_clone)
    make = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", make], cwd=tree, check=True, capture_output=True)
    (archive,) = folder.glob("kvpage-*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def test_sdist_holds_what_a_build_elsewhere_needs(unpacked, tmp_path):
    tree = unpacked.parent / "tree"
    for pattern in (
        "CMakeLists.txt",
        "setup.py",
        "csrc/**/*.*",
        "kernels/*.py",
        "kvpage/**/*.py*",
        "kvpage/server/page/files/*",
        "tests/**/*.py",
    ):
        present = {path.relative_to(tree) for path in tree.glob(pattern)}
        assert present and present <= {path.relative_to(unpacked) for path in unpacked.glob(pattern)}
    done = configure(unpacked, tmp_path / "build", environment(), "-DKVPAGE_CUDA=OFF")
    assert done.returncode == 0, done.stdout


def venv_with_what_is_here(folder: Path) -> Path:
    """Make an environment that finds the packages of this one, kvpage apart; return its Python."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "build.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "bin" / "python"


USE = """
import importlib.resources, torch, kvpage, kvpage.kernels, kvpage.benchmarks
from kvpage import ops
layout = kvpage.CacheLayout(4, 2, 8, torch.float32)
(cache,) = layout.allocate(3, 1, torch.device("cpu"))
rows = torch.randn(5, 2, 8)
ops.reshape_and_cache(rows, rows, cache, torch.arange(4, 9), layout)
keys, values = ops.gather_cache(cache, torch.tensor([[1, 2]], dtype=torch.int32), [5], layout)
assert torch.equal(keys, rows) and torch.equal(values, rows)
folder = importlib.resources.files(kvpage)
assert all((folder / name).is_file() for name in ("py.typed", "_C.pyi", "server/page/files/index.html"))
assert not (folder / "benchmarks" / "results").is_dir(), "recorded figures belong to the project, not to the package"
print(folder)
"""


def test_an_install_from_an_sdist_works(unpacked, tmp_path):
    """The extension is the one that these tests have; another test compiles, wherever the package is installed."""
    tree = tree_without_compiling(unpacked, tmp_path, copied=Path(_C.__file__))
    python = venv_with_what_is_here(tmp_path / "venv")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-build-isolation", "--no-deps"]
    done = subprocess.run([*install, "--ignore-installed", tree], env=environment(), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    env = environment()
    env.pop("PYTHONPATH", None)
    done = subprocess.run([python, "-c", USE], cwd=tmp_path, env=env, text=True, capture_output=True)
    assert done.stdout.strip().startswith(str(tmp_path / "venv")), done.stdout + done.stderr


def tree_without_compiling(sources: Path, tmp_path: Path, copied: Path | None = None) -> Path:
    """Return a copy of the sources whose CMake project compiles nothing: it copies or touches the extension."""
    tree = shutil.copytree(sources, tmp_path / "tree", ignore=not_in_a_clone)
    make = "touch" if copied is None else f'copy "{copied}"'
    folder, name = "${CMAKE_LIBRARY_OUTPUT_DIRECTORY}", "_C" + importlib.machinery.EXTENSION_SUFFIXES[0]
    (tree / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(stand_in NONE)\n"
        f'add_custom_target(_C COMMAND ${{CMAKE_COMMAND}} -E make_directory "{folder}"\n'
        f'                  COMMAND ${{CMAKE_COMMAND}} -E {make} "{folder}/{name}")\n'
    )
    return tree


def test_a_build_folder_outlives_its_build_environment(tmp_path):
    """pip builds in an environment of its own, ninja included, and removes it; the build folder may stay."""
    tree = tree_without_compiling(ROOT, tmp_path)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", "temporary", "--build-lib", "library"]
    for attempt in ("first", "second"):
        (tmp_path / attempt).mkdir()
        ninja = Path(shutil.copy(shutil.which("ninja"), tmp_path / attempt / "ninja"))
        env = environment()
        env["PATH"] = os.pathsep.join([str(ninja.parent), env["PATH"]])
        done = subprocess.run(command, cwd=tree, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        ninja.unlink()


def test_an_editable_install_finds_new_kernels(tmp_path):
    """With an empty kvpage/__init__.py: this is about finding files."""
    tree = tree_without_compiling(ROOT, tmp_path)
    (tree / "kvpage" / "__init__.py").write_text("")
    python = venv_with_what_is_here(tmp_path / "venv")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-build-isolation", "--no-deps"]
    done = subprocess.run([*install, "-e", tree], env=environment(), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    (tree / "kernels" / "brand_new.py").write_text("found = True\n")
    show = "import kvpage.kernels.brand_new as new; print(new.found, new.__file__)"
    done = subprocess.run([python, "-c", show], cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout.split() == ["True", str(tree / "kernels" / "brand_new.py")], done.stderr


def test_the_extension_links_neither_torch_nor_cuda():
    if not shutil.which("readelf"):
        pytest.skip("no readelf")
    dynamic = subprocess.run(["readelf", "-d", _C.__file__], check=True, text=True, capture_output=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert any(name.startswith("libstdc++") for name in needed)
    assert not [name for name in needed if re.search("torch|c10|cuda|python", name)]


def test_build_info():
    info = kvpage.build_info()
    assert info["version"] == kvpage.__version__
    assert info["torch"] == _installed("torch") is not None
    assert (info["cuda"] is None) == (info["cuda_archs"] is None)
    assert bool(info["devices"]) == (info["cuda_error"] is None)
    for device in info["devices"]:
        assert device["name"] and device["compute_capability"] >= (5, 0) and device["num_copy_engines"] >= 0
    if info["driver"] is None:
        assert not info["batched_copy"]
    assert info["tiles"] == "amx" or info["tiles"].startswith(("amx-", "not taken: "))
    assert _installed("no-such-distribution") is None
    assert (_cuda_version(0), _cuda_version(12080), _cuda_version(13000)) == (None, "12.8", "13.0")


def disassembler() -> Path | None:
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return path if path.exists() else None


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_device_kernel_copies_16_bytes_and_spills_nothing(arch, tmp_path):
    nvdisasm = disassembler()
    if nvdisasm is None:
        pytest.skip("no nvdisasm beside triton")
    cubin = tmp_path / "sm_kernel.cubin"
    source = ROOT / "csrc" / "copy" / "sm_kernel" / "sm_kernel.cu"
    compile_it = [NVCC, "-std=c++17", "-O3", "-cubin", f"-arch={arch}", f"-I{ROOT / 'csrc'}", "-o", cubin, source]
    subprocess.run(compile_it, check=True, capture_output=True)
    sass = subprocess.run([nvdisasm, cubin], check=True, text=True, capture_output=True).stdout
    kernels = re.split(r"^\.text\.", sass, flags=re.MULTILINE)[1:]
    assert len(kernels) == 10  # five vector widths, few parameters and many
    wide = [kernel for kernel in kernels if "Vector16" in kernel.splitlines()[0]]
    assert len(wide) == 2
    for kernel in wide:
        assert kernel.count("LDG.E.128") == kernel.count("STG.E.128") == 4
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert not re.search(r"\b(LD|ST)\.E", sass), "a generic access: the compiler does not see global memory"
