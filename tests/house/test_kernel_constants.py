"""A constant of a kernel gets a name before it is compared or negated; a string or a type, before a function takes it.

    widen(rows, A.value.STORED)                  refused: compilers up to Triton 3.6 take no plain string there
    STORED: tl.constexpr = A.value.STORED
    widen(rows, STORED)                          right
    if not A.value.SHARED                        refused: compilers up to Triton 3.3 take no plain number there

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
    """Return "line: constant" of each that is compared or negated without a name, or, of these fields, handed on."""
    handed = [arg for arg in arguments_of_calls(tree) if is_constant(arg) and arg.attr in fields]
    compared = [part for node in ast.walk(tree) for part in operands_of(node) if is_constant(part)]
    return sorted(f"{part.lineno}: {ast.unparse(part)}" for part in (*handed, *compared))


def arguments_of_calls(tree: ast.Module) -> list[ast.expr]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [arg for call in calls for arg in (*call.args, *(keyword.value for keyword in call.keywords))]


def operands_of(node: ast.AST) -> list[ast.expr]:
    """Return the operands of a comparison, of `not`, `and` and `or`; none of another node."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return node.values if isinstance(node, ast.BoolOp) else []


def is_constant(part: ast.expr) -> bool:
    return isinstance(part, ast.Attribute) and isinstance(part.value, ast.Attribute) and part.value.attr == "value"


def test_kernels_name_their_constants():
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
    if not SHAPE.value.SIZE or SIZE < SHAPE.value.SIZE and ROW == "fp32":
        return SIZE and SHAPE.value.SIZE
    return store(right, KIND=SHAPE.value.PART.value.TYPE)
"""


def test_the_rule():
    tree = ast.parse(EXAMPLE)
    assert fields_to_bind(tree) == {"ROW", "TYPE"}
    assert unbound_constants(tree, fields_to_bind(tree)) == [
        "16: SHAPE.value.ROW",
        "17: SHAPE.value.SIZE",
        "17: SHAPE.value.SIZE",
        "18: SHAPE.value.SIZE",
        "19: SHAPE.value.PART.value.TYPE",
    ]
