"""An attribute is assigned only by the module of its class, by the folder of a record, or for an object just made.

    self.num_steps = 0                 the object's own
    load.future = None                 `future` is declared by a class of this module
    seq.num_tokens += 1                SequenceState is a record, a dataclass of this folder
    made = object.__new__(cls)
    made.key = key                     made in this function
    scheduler.is_held = connectors.holds      refused: pass it when the scheduler is made, or call a method

So an object always tells by its own module how it changes. The rule goes by the attribute's name and by the text alone,
and it counts `+=`, `del`, tuples, loop variables and `setattr` as assignments, too.
"""

import ast
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvpage"
OWN = ("self", "cls")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
RECORD = "a record of this folder's modules, though no dataclass"
ALLOWED: dict[str, tuple[tuple[str, ...], str]] = {
    "kvpage/extras/token_trie/dynamic.py": (("use.",), RECORD),
    "kvpage/store/disk/allocator.py": (("entry.", "self._index.forgotten"), RECORD),
    "kvpage/store/disk/directory.py": (("other.drive.num_errors",), RECORD),
    "kvpage/store/disk/disk_tier.py": (("entry.", "self._allocator.lock"), RECORD),
    "kvpage/store/disk/index.py": (("entry.", "space."), RECORD),
    "kvpage/observe/events/publisher.py": (("taker.", "giver.", "self._pub.", "self._router."), "options of sockets"),
    "kvpage/integrations/ray/gateway.py": (("model.generation_config",), "of a model made there, without weights"),
    "kvpage/serving/generate/kv_page_cache.py": (("self._finalizer.atexit",), "weakref.finalize asks for it"),
    "kvpage/store/load/result_pool.py": (("finalizer.atexit",), "weakref.finalize asks for it"),
    "kvpage/server/app.py": (("app.state.",), "starlette's place for the parts of an application"),
    "kvpage/serving/assembly/parts.py": (("cache.numerics",), "of caches made there"),
    "kvpage/serving/generate/cache_pool.py": (("engine.numerics",), "of a cache made there"),
    "kvpage/store/disk/segment.py": (("call.argtypes",), "ctypes' way to declare a call"),
    "kvpage/serving/assembly/model_files.py": (("tokenizer.chat_template",), "of a tokenizer made there"),
    "kvpage/serving/model/native/joined.py": (
        ("parameter.data", "parameter.joined_at"),
        "torch's way to give a parameter other memory; and where",
    ),
    "kvpage/serving/model/view.py": (("config._attn_implementation_internal",), "of a copy of the model's config"),
    "kvpage/tools/cli.py": (("sys.argv",), "a script that runs another"),
    "kvpage/tools/demo.py": (("model.generation_config.",), "of a model of the demo's own"),
}
"""For a module, the targets that it may assign all the same, by how they begin, and why."""


def outside_assignments(source: str, records: Set[str] = frozenset()) -> list[str]:
    """Return "line: target" of each assignment to an attribute of another module's object.

    records: the fields of the dataclasses of the module's folder.
    """
    tree = ast.parse(source)
    declared = declared_attributes(tree) | records
    found = []
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))]:
        made = names_made(scope)
        for target in assigned_attributes(scope):
            base = target.value
            is_own = isinstance(base, ast.Name) and (base.id in OWN or base.id in made)
            if not is_own and target.attr not in declared:
                found.append((target.lineno, f"{target.lineno}: {ast.unparse(target)}"))
    return [text for _, text in sorted(set(found))]


@cache
def fields_of_records(folder: Path) -> set[str]:
    """Return the names of the fields of all dataclasses in a folder's modules."""
    fields: set[str] = set()
    for path in folder.glob("*.py"):
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        for cls in classes:
            if any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
                fields |= {
                    n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
    return fields


def assignments_of(path: Path) -> list[str]:
    """Return the outside assignments of a module of the package."""
    return outside_assignments(path.read_text(), fields_of_records(path.parent))


def declared_attributes(tree: ast.Module) -> set[str]:
    """Return the attributes that the module's classes declare: fields, slots, and those that `self` is given."""
    declared: set[str] = set()
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in cls.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                declared.add(node.target.id)
        declared |= {t.attr for t in assigned_attributes(cls) if isinstance(t.value, ast.Name) and t.value.id in OWN}
        for function in (node for node in ast.walk(cls) if isinstance(node, FUNCTIONS)):
            attributes = assigned_attributes(function)
            declared |= {t.attr for t in attributes if isinstance(t.value, ast.Name) and t.value.id in OWN}
    return declared


def names_made(scope: ast.AST) -> set[str]:
    """Return the local names whose every value is the result of a call of a class, or of `__new__` or `copy`."""
    made: set[str] = set()
    for node in statements(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            (made.add if is_making(node.value) else made.discard)(node.targets[0].id)
    return made


def is_making(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    called = ast.unparse(value.func).split(".")[-1]
    return called in ("cls", "copy", "__new__", "replace") or called.lstrip("_")[:1].isupper()


def assigned_attributes(scope: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that the scope assigns, without those of functions within it."""
    for node in statements(scope):
        for target in targets_of(node):
            yield from (one for one in parts_of(target) if isinstance(one, ast.Attribute))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) == 3:
            name = node.args[1]
            attribute = name.value if isinstance(name, ast.Constant) else "any"
            yield ast.Attribute(node.args[0], str(attribute), ast.Store(), lineno=node.lineno, col_offset=0)


def targets_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        return list(node.targets)
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr | ast.comprehension):
        return [node.target]
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        return [node.optional_vars]
    return []


def parts_of(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from parts_of(one)
    elif isinstance(target, ast.Starred):
        yield from parts_of(target.value)
    else:
        yield target


def statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of functions and classes within it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            waiting[:0] = list(ast.iter_child_nodes(node))


ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists() and not path.is_symlink())


@pytest.mark.parametrize("room", ROOMS)
def test_no_attribute_of_another_object_is_assigned_from_outside(room):
    lines = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        name = path.relative_to(PACKAGE.parent).as_posix()
        beginnings, _ = ALLOWED.get(name, ((), ""))
        found = assignments_of(path)
        lines += [f"{name}:{line}" for line in found if not line.split(": ")[1].startswith(beginnings)]
    assert not lines, "an attribute must be assigned by its own module:\n  " + "\n  ".join(lines)


def test_exceptions_are_of_modules_that_need_them():
    for name, (beginnings, _) in ALLOWED.items():
        found = [line.split(": ")[1] for line in assignments_of(PACKAGE.parent / name)]
        assert [one for one in beginnings if not any(target.startswith(one) for target in found)] == [], name
