"""ImportGraph: the modules of kvpage, and which of them imports which; read from the sources, nothing is imported.

    kvpage/store/tier.py   "from kvpage.layout import config"   ─►   kvpage.store.tier ──► kvpage.layout.config

An import inside a function and one under TYPE_CHECKING are arrows like any other. An arrow to another distribution is
none. A package's `__init__.py` is a module of its own beside the others of its folder: `kvpage.store.__init__`.
"""

import ast
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = "kvpage"
KERNELS = "kernels"  # a folder of the project's own, which an install puts into the package
SCRIPTS = "benchmarks"  # likewise; scripts, no part of the library
INIT = "__init__"

Edges = Mapping[str, Set[str]]


@dataclass(frozen=True, slots=True)
class ImportGraph:
    """Modules by name, with those that each of them imports.

    The kernels are in it, as `kvpage.kernels`. The extension `kvpage._C` is not: it imports nothing of ours.
    """

    modules: Mapping[str, Path]
    imports: Edges

    def inside(self, folder: str) -> dict[str, set[str]]:
        """Return the arrows between the entries of a folder: modules and folders, by their own names."""
        arrows: dict[str, set[str]] = {}
        for module in self.modules:
            entry = entry_in(folder, module)
            if entry is not None:
                targets = {entry_in(folder, target) for target in self.imports[module]}
                arrows.setdefault(entry, set()).update(t for t in targets if t is not None and t != entry)
        return arrows

    def between(self, folder: str, a: str, b: str) -> list[str]:
        """Return the imports by which entry `a` of a folder takes from entry `b`."""
        return [
            f"{module} imports {target}"
            for module in sorted(self.modules)
            for target in sorted(self.imports[module])
            if (entry_in(folder, module), entry_in(folder, target)) == (a, b)
        ]

    def folders(self) -> list[str]:
        """Return the names of all packages, the outermost first."""
        return sorted(name.removesuffix(f".{INIT}") for name in self.modules if name.endswith(f".{INIT}"))


def entry_in(folder: str, module: str) -> str | None:
    """Return the name of the folder's own entry that `module` is or belongs to; None for a module of elsewhere."""
    return module[len(folder) + 1 :].split(".")[0] if module.startswith(f"{folder}.") else None


def read_graph(project: Path = PROJECT) -> ImportGraph:
    """Return the graph of the package and the kernels in a project's folder."""
    modules = modules_in(project / PACKAGE, PACKAGE) | modules_in(project / KERNELS, f"{PACKAGE}.{KERNELS}")
    imports = {
        module: {target for name in names_imported(path) if (target := resolve(modules, *name)) is not None} - {module}
        for module, path in modules.items()
    }
    return ImportGraph(modules, imports)


def modules_in(root: Path, package: str) -> dict[str, Path]:
    """Return the files of a package by their modules' names. Installed copies of other folders are left out."""
    found = {path.relative_to(root).with_suffix("").parts: path for path in sorted(root.rglob("*.py"))}
    return {".".join((package, *parts)): path for parts, path in found.items() if parts[0] not in (KERNELS, SCRIPTS)}


def names_imported(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield each import of kvpage's: the module, and the name that is taken from it (None for a plain import)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if is_own(alias.name))
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"imports must be absolute, got a relative one in {path}, line {node.lineno}")
            if is_own(node.module or ""):
                yield from ((node.module or "", alias.name) for alias in node.names)


def is_own(name: str) -> bool:
    return name.split(".")[0] == PACKAGE


def resolve(modules: Mapping[str, Path], module: str, name: str | None) -> str | None:
    """Return the module that an import reaches: a submodule if `name` is one, else the module that holds the name.

    None stands for the extension.
    """
    candidates = [] if name is None else [f"{module}.{name}", f"{module}.{name}.{INIT}"]
    return next((found for found in [*candidates, module, f"{module}.{INIT}"] if found in modules), None)


def circles(edges: Edges) -> list[list[str]]:
    """Return the groups of nodes that reach one another, each sorted."""
    reached = {node: reach(edges, node) for node in edges}
    groups = {frozenset(n for n in reached[node] if node in reached.get(n, ())) for node in edges}
    return sorted(sorted(group) for group in groups if group)


def rings(edges: Edges) -> list[list[str]]:
    """Return, for each arrow that is part of a circle, the shortest circle through it; each circle once."""
    found = {}
    for start in sorted(edges):
        for target in sorted(edges[start]):
            way = shortest_way(edges, target, start)
            if way:
                found.setdefault(frozenset(way), way)
    return list(found.values())


def shortest_way(edges: Edges, start: str, end: str) -> list[str]:
    """Return the nodes of a shortest way from `start` to `end`, both included; nothing if there is none."""
    ways = [[start]]
    seen = {start}
    for way in ways:
        if way[-1] == end:
            return way
        for target in sorted(edges.get(way[-1], ())):
            if target not in seen:
                seen.add(target)
                ways.append([*way, target])
    return []


def reach(edges: Edges, start: str) -> set[str]:
    """Return the nodes at the ends of all ways of one arrow or more that begin at `start`."""
    seen: set[str] = set()
    waiting = list(edges.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(edges.get(node, ()))
    return seen


def longest_way(edges: Edges) -> list[str]:
    """Return the nodes of a longest way, the uppermost first; of a graph without circles."""
    ways: dict[str, list[str]] = {}

    def way_from(node: str) -> list[str]:
        if node not in ways:
            below = [way_from(target) for target in sorted(edges.get(node, ()))]
            ways[node] = [node, *max(below, key=len, default=[])]
        return ways[node]

    return max((way_from(node) for node in sorted(edges)), key=len, default=[])
