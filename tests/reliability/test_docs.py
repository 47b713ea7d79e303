"""The documents name tests that exist."""

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SECURITY = Path(__file__).with_name("test_security.py")


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name, least", [("failures.md", 25), ("security.md", 15)])
def test_every_named_test_exists(name, least):
    found = re.findall(r"`(?:(tests/[\w/]+\.py)::(\w+)|(test_\w+))`", (PROJECT / "docs" / name).read_text())
    assert len(found) >= least
    for path, test, promise in found:
        assert (test or promise) in functions_in(PROJECT / path if path else SECURITY), f"{path}::{test or promise}"


def test_every_test_of_a_promise_is_named():
    named = set(re.findall(r"`(test_\w+)`", (PROJECT / "docs" / "security.md").read_text()))
    assert {test for test in functions_in(SECURITY) if test.startswith("test_")} == named
