"""Mutants of Python files that are imported already: a mutant takes the place of its function's code.

    source ─► sites ─► mutant i: compiled with site i changed ─► the code of the function, in a forked process

A mutant of a module's number takes its place in every module that has it by that name.
"""

import ast
import gc
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from mutation.mutant import Mutant, numbered
from mutation.python_sites import Site, sites

ROOT = Path(__file__).parents[3]


def source_at(path: str, root: Path = ROOT) -> Path:
    """Return the file of a path; an installed package has kernels inside, a checkout beside it."""
    file = root / path
    return file if file.exists() else root / path.removeprefix("kvpage/")


class PythonMutants:
    """paths: from the root; their modules must have been imported when a mutant is applied."""

    def __init__(self, paths: list[str], root: Path = ROOT) -> None:
        self.mutants: list[Mutant] = []
        self._how: list[Site | tuple[str, int]] = []
        self._trees: dict[str, ast.Module] = {}
        self._files = {str(source_at(path, root)): path for path in paths}
        self._reached: set[tuple[str, int]] = set()
        for path in paths:
            self._add_file(source_at(path, root), path)
        self.mutants = numbered(self.mutants)

    def _add_file(self, file: Path, path: str) -> None:
        source = file.read_text()
        lines = source.splitlines()
        tree = self._trees[path] = ast.parse(source)
        for site in sites(tree):
            line = getattr(site.new, "lineno", None) or getattr(site.holder, "lineno", None) or site.first_line
            self.mutants.append(Mutant(path, line, site.function, lines[line - 1].strip(), site.change))
            self._how.append(site)
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is int:
                name, value = ast.unparse(node.targets[0]), node.value.value
                text = lines[node.lineno - 1].strip()
                self.mutants.append(Mutant(path, node.lineno, "", text, f"{value} becomes {value + 1}"))
                self._how.append((name, value + 1))

    # --- which are reached ---

    def begin(self) -> None:
        """Until `reached` is called, what runs in any thread is followed."""
        self._reached = set()
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def reached(self) -> list[int]:
        """The mutants whose statement has run since."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        return [index for index in range(len(self.mutants)) if self._is_reached(index)]

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        path = self._files.get(frame.f_code.co_filename)
        if path is None:
            return None
        reached = self._reached

        def at_line(frame: FrameType, event: str, argument: object) -> Any:
            reached.add((path, frame.f_lineno))
            return at_line

        return at_line(frame, event, argument)

    def _is_reached(self, index: int) -> bool:
        path, how = self.mutants[index].path, self._how[index]
        if isinstance(how, Site):
            return any((path, line) in self._reached for line in range(how.first_line, how.last_line + 1))
        return any(path == reached for reached, _ in self._reached)

    # --- in a process of its own ---

    def apply(self, index: int) -> None:
        """This process has the mutant from now on."""
        gc.unfreeze()  # tests freeze what they have imported, and frozen objects cannot be listed
        path, how = self.mutants[index].path, self._how[index]
        if isinstance(how, tuple):
            return _set_number(self._name_of(path), *how)
        file = next(file for file, its in self._files.items() if its == path)
        how.put(how.new)
        made, arguments = self._made(path, file, how.outermost), how.outermost.args
        for function in _functions_of(file, made):
            function.__code__ = made
            function.__defaults__ = _defaults(function.__defaults__, arguments.defaults)
            names = [argument.arg for argument in arguments.kwonlyargs]
            for name, node in zip(names, arguments.kw_defaults, strict=True):
                if isinstance(node, ast.Constant) and function.__kwdefaults__:
                    function.__kwdefaults__[name] = node.value

    def _made(self, path: str, file: str, function: ast.FunctionDef) -> CodeType:
        """Return the function's code, which refers to its class if the function in its place does."""
        made = _code_of(compile(self._trees[path], file, "exec", dont_inherit=True), function)
        if all(each.__code__.co_freevars == made.co_freevars for each in _functions_of(file, made)):
            return made
        function.body.append(_never_named("__class__", function.body[-1]))  # the mutant has no `super()` left
        return _code_of(compile(self._trees[path], file, "exec", dont_inherit=True), function)

    def _name_of(self, path: str) -> str:
        return path.removesuffix(".py").replace("/", ".")


def _set_number(module: str, name: str, value: int) -> None:
    old = getattr(sys.modules[module], name)
    for each in list(sys.modules.values()):
        if (each.__name__ or "").split(".")[0] == module.split(".")[0] and vars(each).get(name) == old:
            setattr(each, name, value)


def _never_named(name: str, place: ast.stmt) -> ast.stmt:
    """Return a statement that refers to a name, and never runs."""
    never = ast.If(ast.Constant(False), [ast.Expr(ast.Name(name, ast.Load()))], [])
    return ast.fix_missing_locations(ast.copy_location(never, place))


def _code_of(code: CodeType, function: ast.FunctionDef) -> CodeType:
    """The function's code, within the module's."""
    first_line = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    todo = [code]
    while todo:
        inner = [const for const in todo.pop().co_consts if isinstance(const, CodeType)]
        for found in inner:
            if found.co_name == function.name and found.co_firstlineno == first_line:
                return found
        todo += inner
    raise AssertionError(f"{function.name} is not in the module's code")


def _functions_of(file: str, code: CodeType) -> list[FunctionType]:
    def is_one(found: object) -> bool:
        return (
            type(found) is FunctionType
            and found.__code__.co_filename == file
            and found.__code__.co_firstlineno == code.co_firstlineno
            and found.__code__.co_name == code.co_name
        )

    found = [each for each in gc.get_objects() if is_one(each)]
    assert found, f"{code.co_name} of {file} is in no module"
    return found


def _defaults(old: tuple[Any, ...] | None, nodes: list[ast.expr]) -> tuple[Any, ...] | None:
    if old is None:
        return None
    return tuple(
        node.value if isinstance(node, ast.Constant) else value for node, value in zip(nodes, old, strict=True)
    )
