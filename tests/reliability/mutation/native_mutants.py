"""Mutants of C++ files: every one is in one program, and in one extension, and is chosen when they run.

csrc/FILE.cpp ─► instrumented ─► programs of tests/reliability/native, the first to be asked: models beside it,
                            │    and each allocation failing in turn
                            └──► kvpage._C in a copy of the package, which the tests of Python import
"""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import native_build
import pybind11
from battery_native import LIVES

from mutation.cpp_sites import instrumented
from mutation.mutant import Mutant, numbered

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PLACE = ROOT / ".pytest_cache" / "reliability" / "mutants"
PROGRAMS = {"core": ["core"], "memory": ["memory", "failing_allocator"]}
LINK_FLAGS: dict[str, list[str]] = {"core": [], "memory": ["-Wl,--wrap=realloc"]}
NO_SUCH_MUTANT = 77  # as in mutants.h
NUM_REACHED = 8192
MOST_BYTES = 1 << 30
NO_SUCH = "no such mutant"


class NativeMutants:
    """Those of the files, which are written to `folder` with all mutants in them."""

    def __init__(self, paths: list[str], folder: Path = PLACE / "csrc") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.mutants: list[Mutant] = []
        self.sources: dict[str, Path] = {}
        for path in paths:
            source = (ROOT / path).read_text()
            text, found = instrumented(source, len(self.mutants))
            lines = source.splitlines()
            functions = _functions(lines)
            self.mutants += [
                Mutant(path, line, functions[line - 1], lines[line - 1].strip(), change) for line, change in found
            ]
            place = folder / Path(path).relative_to("csrc")
            place.parent.mkdir(parents=True, exist_ok=True)
            self.sources[path.removeprefix("csrc/").removesuffix(".cpp")] = place
            _write(place, text)
        for name in ("mutants.h", "mutants.cpp"):
            _write(folder / name, (HERE / name).read_text())
        self.mutants = numbered(self.mutants)
        self.folder = folder
        self._library: ctypes.CDLL | None = None

    # --- in Python ---

    def load(self, extension: Path) -> None:
        """The extension that was built with the mutants, and is imported here."""
        self._library = ctypes.CDLL(str(extension))
        self._library.kvpage_reached.restype = ctypes.POINTER(ctypes.c_char)

    def begin(self) -> None:
        assert self._library is not None, "load first"
        self._library.kvpage_forget_reached()

    def reached(self) -> list[int]:
        assert self._library is not None, "load first"
        flags = self._library.kvpage_reached()[:NUM_REACHED]
        return [index for index in range(len(self.mutants)) if flags[index]]

    def apply(self, index: int) -> None:
        assert self._library is not None, "load first"
        self._library.kvpage_choose_mutant(index)

    # --- the programs ---

    def build_program(self, name: str) -> Path:
        """One of PROGRAMS, in which the standard library checks what it is asked for."""
        flags = [flag for flag in native_build.FLAGS if not flag.startswith("-g")]
        flags += ["-Wno-all", "-Wno-extra", "-Wno-narrowing", f"-I{self.folder}", "-D_GLIBCXX_ASSERTIONS"]
        paths = [self.sources.get(each, native_build.CSRC / f"{each}.cpp") for each in native_build.CORE]
        paths += [native_build.NATIVE / f"{each}.cpp" for each in LIVES + PROGRAMS[name]]
        paths.append(self.folder / "mutants.cpp")
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(partial(native_build._object, flags), paths))
        program = PLACE / f"{name}-{native_build._digest(*(each.name for each in objects))}"
        return native_build._made(program, [*flags, *LINK_FLAGS[name], *map(str, objects)])

    def build_extension(self) -> Path:
        """A copy of the package with the instrumented extension; returns where to import it from."""
        place = PLACE / "package"
        for folder in (ROOT / "csrc", self.folder):  # the instrumented files in place of the others
            for file in folder.rglob("*"):
                if file.is_file():
                    target = place / "csrc" / file.relative_to(folder)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _write(target, file.read_text())
        options = 'set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -O0 -w -Wno-narrowing")\n'
        standard = "set(CMAKE_CXX_STANDARD 20)"
        listed = (ROOT / "CMakeLists.txt").read_text()
        _write(place / "CMakeLists.txt", listed.replace(standard, options + standard))
        (place / "kvpage").mkdir(exist_ok=True)
        for entry in (ROOT / "kvpage").iterdir():
            target = place / "kvpage" / entry.name
            if entry.suffix != ".so" and entry.name != "__pycache__" and not target.exists():
                target.symlink_to(entry)
        build = place / "build"
        configure = ["cmake", "-S", str(place), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None",
                     f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
                     f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={place / 'kvpage'}", f"-DPython_EXECUTABLE={sys.executable}",
                     f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", "-DKVPAGE_CUDA=OFF"]  # fmt: skip
        for command in (configure, ["cmake", "--build", str(build), "--target", "_C"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"the extension was not built:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return place


class Program:
    """Asks the program about one mutant after the other. `reached`: the mutants that its lives come to. count: what it
    does with each seed.
    """

    def __init__(self, program: Path, seeds: list[int], count: int) -> None:
        self._commands = [[str(program), str(seed), str(count)] for seed in seeds]
        self.reached: set[int] = set()
        self._seconds = 0.0  # of the processor, that the longest took
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "reached"
            for command in self._commands:
                began = os.times().children_user
                done = self._run(command, {"KVPAGE_REACHED": str(place)}, 600)
                self._seconds = max(self._seconds, os.times().children_user - began)
                if done.returncode != 0:
                    raise RuntimeError(f"the program must pass without mutants: {done.stderr}")
                self.reached |= {index for index, flag in enumerate(place.read_bytes()) if flag}

    def killed_by(self, index: int) -> str | None:
        """What the program said, None if nothing; NO_SUCH where it means nothing."""
        if index not in self.reached:
            return None
        for command in self._commands:
            done = self._run(command, {"KVPAGE_MUTANT": str(index)}, 0.4 + 5 * self._seconds)
            if done.returncode == NO_SUCH_MUTANT:
                return NO_SUCH
            if done.returncode == -signal.SIGPROF:
                return "the program does not end"
            if done.returncode != 0:
                return f"the program: {done.stderr[:200]}"
        return None

    def _run(self, command: list[str], variables: dict[str, str], seconds: float) -> "subprocess.CompletedProcess[str]":
        """SIGPROF ends it after so many seconds of the processor."""

        def limited() -> None:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, preexec_fn=limited)


def _functions(lines: list[str]) -> list[str]:
    """For each line the function that it stands in, by layout: definitions begin at the margin, or within a class."""
    found, current = [], ""
    for line in lines:
        if line and not line[0].isspace() and line[0] not in "}/#" and "(" in line:
            words = line[: line.index("(")].split()
            current = words[-1].lstrip("*&") if words else current
        found.append(current)
    return found


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
