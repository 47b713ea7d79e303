"""`help` of a native class says what its stub says, and each public name of it says something."""

import ast
import inspect
from pathlib import Path

import pytest

import kvpage
import kvpage._C as _C

STUB = ast.parse(Path(kvpage.__file__).with_name("_C.pyi").read_text(encoding="utf-8"))
CLASSES = [
    "BlockPool",
    "HotPrefix",
    "KVPart",
    "Match",
    "PartMatch",
    "PrefixTree",
    "SlotAllocator",
    "SlotPool",
    "TokenRules",
    "TreeEntry",
]


def members(name: str) -> dict[str, str | None]:
    """The stub's docstrings, by what has them."""
    (found,) = [node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == name]
    texts = {node.name: ast.get_docstring(node) for node in found.body if isinstance(node, ast.FunctionDef)}
    return {"": ast.get_docstring(found), **texts}


@pytest.mark.parametrize("name", CLASSES)
def test_help_says_what_the_stub_says(name):
    native = getattr(_C, name)
    for member, text in members(name).items():
        assert text, f"{name}.{member} of the stub says nothing"
        found = getattr(native, member) if member else native
        assert text in inspect.getdoc(found), f"{name}.{member}"


@pytest.mark.parametrize("name", CLASSES)
def test_no_public_member_is_missing_in_the_stub(name):
    public = {member for member in vars(getattr(_C, name)) if not member.startswith("_")}
    assert public == set(members(name)) - {"", "__init__"}


def test_fast_methods_have_signatures():
    signatures = {name: str(inspect.signature(getattr(_C.BlockPool, name))) for name in ("allocate", "release_one")}
    assert signatures == {"allocate": "(self, /, n)", "release_one": "(self, block_id, /)"}
