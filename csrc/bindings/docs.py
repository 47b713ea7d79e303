"""Writes the docstrings of kvpage/_C.pyi into a header, so that `help` says what the stub says.

python csrc/bindings/docs.py kvpage/_C.pyi docs.h
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

HEADER = """// Made from kvpage/_C.pyi by csrc/bindings/docs.py.
#pragma once

#include <string_view>

namespace kvpage {

struct Doc {
  std::string_view name;
  const char* text;
};

inline constexpr Doc kDocs[] = {
"""
FOOTER = """};

// The docstring of a class or of one of its members. One that is missing ends the compilation.
consteval const char* doc(std::string_view name) {
  for (const Doc& entry : kDocs)
    if (entry.name == name) return entry.text;
  throw "kvpage/_C.pyi has no such docstring";
}

}  // namespace kvpage
"""


def docstrings(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names, and texts without their indentation."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        text = ast.get_docstring(node)
        if text:
            yield prefix + node.name, text
        if isinstance(node, ast.ClassDef):
            yield from docstrings(node.body, f"{node.name}.")


def main() -> None:
    stub, header = map(Path, sys.argv[1:])
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    lines = [f'    {{"{name}", R"doc({text})doc"}},\n' for name, text in docstrings(tree.body)]
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(HEADER + "".join(lines) + FOOTER, encoding="utf-8")


if __name__ == "__main__":
    main()
