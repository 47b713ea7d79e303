"""Docstrings of public names as tests read them: their sections, and those that their signatures ask for."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator

SECTIONS = ("Args", "Returns", "Yields", "Raises")
RESULT_VERBS = ("Return ", "Yield ", "Iterate ")
NO_RESULT = (None, inspect.Signature.empty, "None", "Never", "NoReturn")


def sections(text: str) -> dict[str, str]:
    """Return the text of each section of a docstring in Google style, by its heading."""
    found: dict[str, str] = {}
    for part in re.split(r"\n(?=\S)", inspect.cleandoc(text)):
        heading, _, rest = part.partition(":")
        if heading in SECTIONS:
            found[heading] = rest
    return found


def public_methods(kind: type) -> Iterator[tuple[str, Callable]]:
    """Yield the methods that a class and its bases in kvpage define for callers, by name.

    One without a docstring has that of the base: the base's definition is yielded.
    """
    own, members = [base for base in reversed(kind.__mro__) if base.__module__.startswith("kvpage")], {}
    for base in own:
        members |= {name: member for name, member in vars(base).items() if name not in members or member.__doc__}
    for name, member in members.items():
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, inspect.unwrap(function)


def parameters(function: Callable) -> list[str]:
    """Return the names of a function's parameters, without `self` and `cls`."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def raises(function: Callable) -> bool:
    """Return whether the function's own body raises."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return False
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def lacking(function: Callable) -> Iterator[str]:
    """Yield the sections that a public function's docstring lacks, and the arguments that it leaves out.

    A summary may do without a section: "Return the length of `tokens`." names the result and an argument.
    """
    written = function.__doc__ or ""
    found, summary = sections(written), inspect.cleandoc(written).partition("\n\n")[0]
    if not written:
        yield "a docstring"
    missing = [name for name in parameters(function) if not _describes(found.get("Args", ""), summary, name)]
    if missing:
        yield f"Args: {', '.join(missing)}"
    result = inspect.signature(function).return_annotation
    says_result = {"Returns", "Yields"} & found.keys() or summary.startswith(RESULT_VERBS)
    if result not in NO_RESULT and not says_result:
        yield "Returns"
    if raises(function) and "Raises" not in found:
        yield "Raises"


def lacking_of_class(kind: type) -> Iterator[str]:
    """Yield the arguments of a class that neither its docstring nor that of `__init__` describes."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("kvpage")]
    written = "\n".join(part for base in bases for part in (base.__doc__, base.__init__.__doc__) if part)
    if not kind.__doc__:
        yield "a docstring"
    if getattr(kind, "_is_protocol", False):
        names = []
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.init and not field.name.startswith("_")]
    elif inspect.isfunction(vars(kind).get("__init__")):
        names = parameters(vars(kind)["__init__"])
    else:
        names = []
    missing = [name for name in names if not _mentions(written, name)]
    if missing:
        yield f"Args: {', '.join(missing)}"


def _describes(args: str, summary: str, name: str) -> bool:
    """Return whether an argument is described, in its section or by the summary: "the sequence" describes seq_id."""
    said = "sequence" if name in ("seq_id", "seq_ids") else name
    return _mentions(args, name) or _mentions(summary, said) or _mentions(summary, f"{said}s")


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name.strip('*'))}\b", text) is not None
