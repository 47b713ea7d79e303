"""Places of a Python file where one node can stand for another: comparisons, sums, conditions, arguments, statements.

What only words depend on is left alone: messages of errors, annotations, docstrings, assertions, `strict` of zip.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
OTHER_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LEFT_OUT = ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom


@dataclass(frozen=True, slots=True)
class Site:
    """`new` stands for the node at `holder.field`, or `holder.field[index]`."""

    holder: ast.AST
    field: str
    index: int | None
    new: ast.AST | None
    change: str
    first_line: int  # of the statement, and its last: it is reached where one of them is
    last_line: int
    function: str
    outermost: ast.FunctionDef  # at the level of the module or a class: what is replaced as a whole

    def put(self, node: ast.AST | None) -> ast.AST | None:
        """The node takes the place; returns what stood there."""
        value = getattr(self.holder, self.field)
        if self.index is None:
            setattr(self.holder, self.field, node)
            return value
        old = value[self.index]
        value[self.index] = node
        return old


def sites(tree: ast.Module) -> Iterator[Site]:
    yield from _of_scope(tree, "")


def _of_scope(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[Site]:
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            yield from _of_scope(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield from _Walk(node, prefix + node.name).all()


class _Walk:
    """One function's sites, those of what stands within it among them."""

    def __init__(self, function: ast.FunctionDef, name: str) -> None:
        self.function, self.name = function, name
        self.lines = function.lineno, function.end_lineno or function.lineno

    def all(self) -> Iterator[Site]:
        for index, default in enumerate(self.function.args.defaults):
            yield from self._replaced(self.function.args, "defaults", index, default)
        for index, given in enumerate(self.function.args.kw_defaults):
            if given is not None:
                yield from self._replaced(self.function.args, "kw_defaults", index, given)
        yield from self._children(self.function, ("body",))

    def _children(self, node: ast.AST, fields: tuple[str, ...] | None = None) -> Iterator[Site]:
        for field in fields or node._fields:
            value = getattr(node, field, None)
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST):
                    yield from self._at(node, field, index if isinstance(value, list) else None, child)

    def _at(self, holder: ast.AST, field: str, index: int | None, node: ast.AST) -> Iterator[Site]:
        if isinstance(node, LEFT_OUT) or (isinstance(node, ast.keyword) and node.arg == "strict"):
            return
        before = self.lines
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            self.lines = node.lineno, max(body[0].lineno - 1, node.lineno) if body else node.end_lineno or node.lineno
        yield from self._replaced(holder, field, index, node)
        yield from self._children(node)
        self.lines = before

    def _replaced(self, holder: ast.AST, field: str, index: int | None, node: ast.AST) -> Iterator[Site]:
        for new, change in _variants(node):
            if new is not None:
                ast.fix_missing_locations(ast.copy_location(new, node))
            yield Site(holder, field, index, new, change, *self.lines, self.name, self.function)
        if isinstance(node, ast.Call):
            yield from self._without_arguments(node)
        if isinstance(node, ast.Slice):
            for bound in ("lower", "upper"):
                if getattr(node, bound) is not None:
                    yield Site(node, bound, None, None, f"no {bound} bound", *self.lines, self.name, self.function)

    def _without_arguments(self, call: ast.Call) -> Iterator[Site]:
        if len(call.args) > 1:
            fewer = ast.copy_location(ast.Call(call.func, call.args[:-1], call.keywords), call)
            yield from self._with(call, "args", fewer.args, f"no argument {ast.unparse(call.args[-1])}")
        for keyword in call.keywords:
            if keyword.arg not in (None, "strict"):
                rest = [other for other in call.keywords if other is not keyword]
                yield from self._with(call, "keywords", rest, f"no argument {ast.unparse(keyword)}")

    def _with(self, call: ast.Call, field: str, value: object, change: str) -> Iterator[Site]:
        yield Site(call, field, None, value, change, *self.lines, self.name, self.function)  # type: ignore[arg-type]


def _variants(node: ast.AST) -> Iterator[tuple[ast.AST | None, str]]:
    if isinstance(node, ast.Compare):
        yield from _comparisons(node)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        new = OPERATORS[type(node.op)]()
        parts = {**{name: getattr(node, name) for name in node._fields}, "op": new}
        yield type(node)(**parts), f"{_word(node.op)} becomes {_word(new)}"
    elif isinstance(node, ast.BoolOp):
        yield from _logic(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand, f"no {_word(node.op)}"
    elif isinstance(node, ast.Constant):
        yield from ((ast.Constant(value), f"{node.value!r} becomes {value!r}") for value in _values(node.value))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OTHER_CALLS:
        other = OTHER_CALLS[node.func.id]
        yield ast.Call(ast.Name(other, ast.Load()), node.args, node.keywords), f"{node.func.id} becomes {other}"
    yield from _statements(node)


def _comparisons(node: ast.Compare) -> Iterator[tuple[ast.AST, str]]:
    for index, old in enumerate(node.ops):
        for new in COMPARISONS[type(old)]:
            ops = [*node.ops[:index], new(), *node.ops[index + 1 :]]
            yield ast.Compare(node.left, ops, node.comparators), f"{_word(old)} becomes {_word(new())}"


def _logic(node: ast.BoolOp) -> Iterator[tuple[ast.AST, str]]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield ast.BoolOp(other, node.values), f"{_word(node.op)} becomes {_word(other)}"
    for index, value in enumerate(node.values):
        rest = node.values[:index] + node.values[index + 1 :]
        yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest), f"no {ast.unparse(value)}"


def _values(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1] if value > 0 else [value + 1]
    return [value + b"x"] if isinstance(value, bytes) else []


def _statements(node: ast.AST) -> Iterator[tuple[ast.AST | None, str]]:
    is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    is_assigned = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
    if is_call or is_assigned or isinstance(node, ast.AugAssign | ast.Delete | ast.Continue | ast.Break):
        yield ast.Pass(), "deleted"
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield ast.Return(None), "returns None"
    elif isinstance(node, ast.If):
        for value in (True, False):
            yield ast.If(ast.Constant(value), node.body, node.orelse), f"the condition is {value}"
    elif isinstance(node, ast.IfExp):
        yield node.body, "the condition is True"
        yield node.orelse, "the condition is False"
    elif isinstance(node, ast.While):
        yield ast.While(ast.Constant(False), node.body, node.orelse), "the condition is False"
    elif isinstance(node, ast.For):
        yield ast.For(node.target, ast.Tuple([], ast.Load()), node.body, node.orelse), "over nothing"
    elif isinstance(node, ast.comprehension):
        for index, condition in enumerate(node.ifs):
            rest = node.ifs[:index] + node.ifs[index + 1 :]
            yield ast.comprehension(node.target, node.iter, rest, 0), f"no if {ast.unparse(condition)}"


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _word(operator: ast.AST) -> str:
    left, right = ast.Name("a", ast.Load()), ast.Name("b", ast.Load())
    if isinstance(operator, ast.cmpop):
        text = ast.unparse(ast.Compare(left, [operator], [right]))
    elif isinstance(operator, ast.boolop):
        text = ast.unparse(ast.BoolOp(operator, [left, right]))
    elif isinstance(operator, ast.unaryop):
        return ast.unparse(ast.UnaryOp(operator, right)).removesuffix("b").strip()
    else:
        text = ast.unparse(ast.BinOp(left, operator, right))  # type: ignore[arg-type]
    return text.removeprefix("a").removesuffix("b").strip()
