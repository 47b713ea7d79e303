"""Function: a function of a source file with its length in lines, decorators not counted; Python, C++ and CUDA.

The reader of C++ relies on clang-format's layout: a function ends at the first brace that is indented like its head.

`python tests/support/function_sizes.py` prints the files and lines of each room.
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
NATIVE_SUFFIXES = (".cpp", ".h", ".cu", ".cuh")
# A brace that opens something else than a function's body.
NO_FUNCTION = re.compile(
    r"\s*(?:namespace|struct|class|enum|union|extern|if|else|for|while|do|switch|case|try|catch)\b"
)


class Function(NamedTuple):
    name: str
    line: int
    num_lines: int
    on_device: bool  # a kernel or a helper of one: its body is unrolled into it


@functools.cache
def functions_in(path: Path) -> list[Function]:
    """Return the functions of a file, those inside other functions and classes as well."""
    text = path.read_text()
    return list(native_functions(text) if path.suffix in NATIVE_SUFFIXES else python_functions(text))


def python_functions(text: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            jitted = any(re.search(r"\bjit\b", ast.unparse(decorator)) for decorator in node.decorator_list)
            yield Function(node.name, node.lineno, num_lines, jitted)


def native_functions(text: str) -> Iterator[Function]:
    lines = text.splitlines()
    for end, line in enumerate(lines):
        if not line.endswith("{"):
            continue
        first = first_line(lines, end)
        head = " ".join(lines[first : end + 1])
        if is_function(head):
            indent = " " * (len(lines[first]) - len(lines[first].lstrip()))
            last = next(i for i in range(end, len(lines)) if lines[i].startswith(f"{indent}}}"))
            yield Function(name_in(head), first + 1, last - first + 1, "__global__" in head)


def is_function(head: str) -> bool:
    """Return whether the code in front of a brace is a function's head: no lambda, no initializer, no comment."""
    before, parenthesis, _ = head.partition("(")
    is_code = not head.lstrip().startswith(("#", "//", "}"))
    return bool(parenthesis) and is_code and not NO_FUNCTION.match(head) and "](" not in head and " = " not in before


def name_in(head: str) -> str:
    found = re.search(r"([\w:~]+)\s*\(", head)
    return found[1] if found else head.strip()


def first_line(lines: list[str], end: int) -> int:
    """Return the index of the line on which the statement begins that ends on line `end`."""
    depth, first = 0, end
    while True:
        depth += lines[first].count(")") - lines[first].count("(")
        continues = lines[first].lstrip().startswith(":") or lines[first].startswith(" " * 6)
        if depth <= 0 and not continues or first == 0:
            return first
        first -= 1


def print_rooms() -> None:
    """Print the files and lines of each room, and of each folder that has rooms."""
    num_files, num_lines = Counter[str](), Counter[str]()
    for folder in ("kvpage", "csrc", "kernels", "benchmarks", "tests"):
        for path in (PROJECT / folder).rglob("*.*"):
            parts = path.relative_to(PROJECT).parts
            if path.suffix not in (".py", ".pyi", *NATIVE_SUFFIXES) or path.parent.resolve() != path.parent:
                continue  # folders that an editable install has linked into the package count where they are
            for room in {folder, "/".join(parts[:2]) if len(parts) > 2 else folder}:
                num_files[room] += 1
                num_lines[room] += len(path.read_text().splitlines())
    for room in sorted(num_lines):
        print(f"{room:<24} {num_files[room]:>5} files {num_lines[room]:>7} lines")


if __name__ == "__main__":
    print_rooms()
