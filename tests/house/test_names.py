"""Names of variables are nouns: `request`, `num_tokens` or `checkpoint` says what `one` and `found` hide.

A room has a number of names that are not, which may only fall. Public parameters and fields are interfaces and stay.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rooms import ROOMS

PROJECT = Path(__file__).resolve().parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_NOUNS = {
    "about", "each", "every", "everything", "found", "given", "held", "its", "kept", "mine", "one", "own", "place",
    "some", "taken", "theirs", "these", "those", "wanted", "what", "whose",
}  # fmt: skip
MOST: dict[str, int] = {}  # of all rooms 0


def no_nouns(source: str) -> Iterator[str]:
    """Yield "line: name" of each variable of the source whose name is no noun."""
    tree = ast.parse(source)
    public = {id(node) for node in interface(tree.body)}
    for node in ast.walk(tree):
        name = variable(node)
        if name is not None and name.strip("_") in NO_NOUNS and id(node) not in public:
            yield f"{node.lineno}: {name}"


def variable(node: ast.AST) -> str | None:
    """Return the name that a node assigns; None if it assigns none."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else node.name if isinstance(node, ast.ExceptHandler) else None


def interface(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the parameters of public functions, and the fields of public classes."""
    for node in body:
        is_public = not getattr(node, "name", "").startswith("_") or getattr(node, "name", "") == "__init__"
        if isinstance(node, FUNCTIONS) and is_public:
            yield from (part for part in ast.walk(node.args) if isinstance(part, ast.arg))
        elif isinstance(node, ast.ClassDef) and is_public:
            yield from (part.target for part in node.body if isinstance(part, ast.AnnAssign))
            yield from interface(node.body)


def names_in(room: str) -> list[str]:
    folder = PROJECT / room if room == "kernels" else PROJECT / "kvpage" / room
    paths = sorted(folder.rglob("*.py"))
    return [f"{path.relative_to(PROJECT)}:{name}" for path in paths for name in no_nouns(path.read_text())]


@pytest.mark.parametrize("room", ROOMS)
def test_variables_are_nouns(room: str) -> None:
    names, most = names_in(room), MOST.get(room, 0)
    rule = f"at most {most} names may hide a noun such as `request` or `num_tokens`, got {len(names)}"
    assert len(names) <= most, "\n  ".join([rule, *names])


def test_variables_are_seen_and_interfaces_are_not() -> None:
    source = """
class Public:
    found: int
    def take(self, given): held = [each for each in given]
    def _take(self, own): return lambda place: place
class _Private:
    kept: int
    def __init__(self, wanted): self.taken = wanted
def public(one, *, about=None):
    def inner(some): (mine := some)
    for _found, noun in one: pass
"""
    names = {name.partition(": ")[2] for name in no_nouns(source)}
    assert names == {"held", "each", "own", "place", "kept", "wanted", "some", "mine", "_found"}
