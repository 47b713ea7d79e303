"""Functions fit on a screen and a file holds one noun: whoever opens it reads it whole. No class is split for this."""

import statistics
from pathlib import Path

import pytest
from support.function_sizes import NATIVE_SUFFIXES, functions_in

PROJECT = Path(__file__).resolve().parents[2]
MAX_FUNCTION = 60
MAX_KERNEL = 80  # a kernel is one function: what it calls must be inlined, and its arguments are many
MAX_MEDIAN = 8
MAX_FILE = 600
MAX_TEST_FILE = 600
LONG_FILE = 400
MAX_LONG_FILES = 16  # it may only fall
FOLDERS = ("kvpage", "kernels", "benchmarks", "csrc", "examples")


def sources(folder: str) -> list[Path]:
    """Return the sources in a folder; a folder that an editable install has linked into the package is left out."""
    suffixes = (".py", *NATIVE_SUFFIXES)
    return sorted(path for path in (PROJECT / folder).rglob("*.*") if path.suffix in suffixes)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def listed(lines: list[str]) -> str:
    return "\n  ".join(["", *lines])


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_fit_on_a_screen(folder):
    lines = [
        f"{path.relative_to(PROJECT)}:{function.line}: {function.name} has {function.num_lines} lines"
        for path in sources(folder)
        for function in functions_in(path)
        if function.num_lines > (MAX_KERNEL if function.on_device else MAX_FUNCTION)
    ]
    assert not lines, f"a function must have at most {MAX_FUNCTION} lines, a kernel {MAX_KERNEL}:{listed(lines)}"


@pytest.mark.parametrize("folder", ["kvpage", "benchmarks", "csrc"])
def test_most_functions_are_short(folder):
    lengths = [function.num_lines for path in sources(folder) for function in functions_in(path)]
    assert statistics.median(lengths) <= MAX_MEDIAN


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_files_are_short(folder):
    most = MAX_TEST_FILE if folder == "tests" else MAX_FILE
    lines = [f"{p.relative_to(PROJECT)}: {num_lines(p)} lines" for p in sources(folder) if num_lines(p) > most]
    assert not lines, f"a file in {folder} must have at most {most} lines:{listed(lines)}"


def test_few_files_are_long():
    paths = {path.resolve() for folder in FOLDERS for path in sources(folder)}
    lines = [f"{p.relative_to(PROJECT)}: {num_lines(p)} lines" for p in sorted(paths) if num_lines(p) > LONG_FILE]
    assert len(lines) <= MAX_LONG_FILES, f"at most {MAX_LONG_FILES} files may have more:{listed(lines)}"


PYTHON = """
def outer(
    a,
):
    def inner():
        return a

    return inner

@triton.jit(do_not_specialize=["a"])
def kernel(a):
    pass

class Kind:
    @property
    async def later(self): ...
"""

NATIVE = """
#include "sum.h"
namespace kvpage {
namespace {

struct Point {
  int sum() const { return x + y; }
  int scaled(int by) const {
    return by * sum();
  }
};

const std::array<int, 2> kTable = {1, 2};

}  // namespace

// A comment (with a parenthesis) {
Sum::Sum(const Point& a,
         const Point& b)
    : total_(a.sum()),
      other_(b.sum()) {
  for (int i = 0; i < 2; ++i) {
    if (i == 1) {
      total_ += i;
    } else {
      total_ -= f(i);
    }
  }
  std::sort(a.begin(), a.end(), [](int x, int y) {
    return x < y;
  });
  const auto add = [&](int x) {
    return x;
  };
}

template <typename T>
__global__ void twice(T* values) {
  values[0] *= 2;
}

}  // namespace kvpage
"""


def test_functions_of_python_are_found(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(PYTHON)
    assert [tuple(function) for function in functions_in(path)] == [
        ("outer", 2, 7, False),
        ("kernel", 11, 2, True),
        ("inner", 5, 2, False),
        ("later", 16, 1, False),
    ]


def test_functions_of_cpp_are_found(tmp_path):
    path = tmp_path / "some.cu"
    path.write_text(NATIVE)
    assert [tuple(function) for function in functions_in(path)] == [
        ("scaled", 8, 3, False),
        ("Sum::Sum", 18, 18, False),
        ("twice", 38, 3, True),
    ]
