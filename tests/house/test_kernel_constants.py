"""A string or a type of a kernel's constants gets a name before a function of a kernel takes it.

    widen(rows, A.value.STORED)                  refused: compilers up to Triton 3.6 take no plain string there
    STORED: tl.constexpr = A.value.STORED
    widen(rows, STORED)                          right

The rule goes by the text: nothing is compiled.
"""

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"
COMPILED_TYPES = ("int", "bool")  # of fields that every compiler takes as they are


def fields_to_bind(tree: ast.Module) -> set[str]:
    """Return the fields of Constants that are neither integers nor structures: their names are in capitals."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    constants = [node for node in classes if any(ast.unparse(base) == "Constants" for base in node.bases)]
    structures = {node.name for node in constants}
    return {
        ast.unparse(line.target)
        for node in constants
        for line in node.body
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.annotation) not in (*COMPILED_TYPES, *structures)
    }


def unbound_constants(tree: ast.Module, fields: set[str]) -> list[str]:
    """Return "line: argument" of each such field that a call of a kernel's function takes without a name."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    arguments = [arg for call in calls for arg in (*call.args, *(keyword.value for keyword in call.keywords))]
    return sorted(f"{arg.lineno}: {ast.unparse(arg)}" for arg in arguments if is_unbound(arg, fields))


def is_unbound(argument: ast.expr, fields: set[str]) -> bool:
    if not isinstance(argument, ast.Attribute) or not isinstance(argument.value, ast.Attribute):
        return False
    return argument.attr in fields and argument.value.attr == "value"


def test_kernels_bind_strings_and_types():
    trees = {path: ast.parse(path.read_text()) for path in sorted(KERNELS.glob("*.py"))}
    fields = set().union(*(fields_to_bind(tree) for tree in trees.values()))
    assert {"STORED", "COMPUTE", "PRECISION", "ROW", "CODE"} <= fields and "BLOCK_SIZE" not in fields
    unbound = [f"{path.name}:{text}" for path, tree in trees.items() for text in unbound_constants(tree, fields)]
    assert not unbound, f"bind it to a name of tl.constexpr first: {unbound}"


EXAMPLE = """
class Shape(Constants):
    SIZE: int
    ROW: str
    PART: Other

class Other(Constants):
    TYPE: Any

class Plain:
    CODE: str

def kernel(row_ptr, SHAPE: tl.constexpr):
    ROW: tl.constexpr = SHAPE.value.ROW
    right = load(row_ptr, ROW, SHAPE.value.SIZE).to(SHAPE.value.ROW)
    load(row_ptr, SHAPE.value.ROW)
    return store(right, KIND=SHAPE.value.PART.value.TYPE)
"""


def test_the_rule():
    tree = ast.parse(EXAMPLE)
    assert fields_to_bind(tree) == {"ROW", "TYPE"}
    assert unbound_constants(tree, fields_to_bind(tree)) == [
        "16: SHAPE.value.ROW",
        "17: SHAPE.value.PART.value.TYPE",
    ]
