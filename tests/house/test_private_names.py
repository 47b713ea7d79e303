"""Tests reach into few private attributes of the package, so that a redesign breaks no test of a behaviour.

    engine._runner.forward       counted: `_runner` is a name that the package gives an attribute, and no `self` has it
    engine.debug.runner.forward  the view by the names of roles: see kvpage/serving/stats/debug.py
    point._replace(x=1)          not counted: the package defines no `_replace`

`tests/support/insides.py` has a function for each inside that several tests need. The bound only falls.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[2]
MAX_ACCESSES = 304
OWN = ("self", "cls")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_C"


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module defines: functions, classes, attributes of `self`, variables."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and is_private(node.name):
            yield node.name
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and is_own(node):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and is_private(node.id):
            yield node.id


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in OWN


def accesses(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Yield the private name of each attribute that a module takes from another object than its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and not is_own(node):
            yield node.attr


def trees(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((PROJECT / folder).rglob("*.py")):
            yield path.relative_to(PROJECT), ast.parse(path.read_text())


def test_accesses_are_counted():
    names = set(private_names(ast.parse("class A:\n    _size = 1\n\n    def f(self):\n        self._runner = 2\n")))
    assert names == {"_size", "_runner"}
    tree = ast.parse("x._runner\nself._runner\nx.y._size.z = 1\nx._replace()\nx.__dict__")
    assert sorted(accesses(tree, names)) == ["_runner", "_size"]


def test_few_private_attributes_are_taken():
    names = {name for _, tree in trees("kvpage", "kernels") for name in private_names(tree)}
    counts = Counter({path: sum(1 for _ in accesses(tree, names)) for path, tree in trees("tests")})
    most = "\n  ".join(f"{count:3} {path}" for path, count in counts.most_common(10))
    message = f"at most {MAX_ACCESSES} accesses to private attributes, tests have {counts.total()}:\n  {most}"
    assert counts.total() <= MAX_ACCESSES, message
