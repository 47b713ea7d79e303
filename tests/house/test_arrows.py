"""The rooms of kvpage and the arrows between them: downward, without circles, few floors, few entries in a folder."""

from pathlib import Path

import pytest
from support.import_graph import INIT, PACKAGE, ImportGraph, circles, longest_way, read_graph, rings
from support.rooms import ROOMS, room_of, upward

MAX_FLOORS = 10
MAX_ENTRIES = 12
MORE_ENTRIES = {
    "kvpage.checks": (13, "each kind of check, and of lock, has a file"),
    "kvpage.blocks": (14, "each kind of cache group has a folder; the options have a file"),
    "kvpage": (len(ROOMS) + 1, "the rooms, and source_folder, which runs before any of them can be found"),
    "kvpage.serving.generate": (14, "each part of one Cache has a file; its states and its view have folders"),
    "kvpage.serving": (15, "each thing that an engine does has a folder"),
    "kvpage.store": (20, "a store is one noun with many parts"),
    "kvpage.layout": (19, "each part of a cache's description has a file"),
    "kvpage.serving.model": (23, "each feature of a model family has a file"),
    "kvpage.serving.model.native": (16, "each kind of layer has a file, and each trial of a shape"),
    "kvpage.ops.cuda": (13, "each kind of kernel has a file, as have the ways to launch it"),
    "kvpage.kernels": (32, "Triton finds helpers only by their module's globals; folders would hide them"),
}
NO_ENTRY = (INIT, "__main__")


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return read_graph()


def listed(lines: list[str]) -> str:
    return "\n  ".join(["", *lines])


def test_every_module_is_in_a_room(graph):
    rooms = {room_of(module) for module in graph.modules if module.count(".") > 1}
    assert rooms == set(ROOMS)
    assert [module for module in graph.modules if module.count(".") == 1] == [
        "kvpage.__init__",
        "kvpage.__main__",
        "kvpage.source_folder",
    ]


def test_arrows_go_down(graph):
    lines = [line for a, b in upward(graph) for line in graph.between(PACKAGE, a, b)]
    assert not lines, f"a room must import only rooms before it, in the order {' < '.join(ROOMS)}:{listed(lines)}"


def test_no_circle_in_any_folder(graph):
    lines = []
    for folder in graph.folders():
        for ring in rings(graph.inside(folder)):
            lines.append(f"in {folder}: {' > '.join([*ring, ring[0]])}")
            lines += [
                f"  {line}"
                for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)
                for line in graph.between(folder, a, b)
            ]
    assert not lines, f"entries of a folder must not import each other in a circle:{listed(lines)}"


def test_only_ops_imports_kernels(graph):
    lines = [
        f"{module} imports {target}"
        for module, targets in graph.imports.items()
        for target in sorted(targets)
        if room_of(target) == "kernels" and room_of(module) not in ("ops", "kernels")
    ]
    assert not lines, f"kvpage.ops must be the only room that imports kvpage.kernels:{listed(lines)}"


def test_nothing_is_taken_by_way_of_the_package_itself(graph):
    """`import kvpage._C as _C` reaches the extension; `from kvpage import _C` would ask `kvpage/__init__.py` for it."""
    lines = [module for module, targets in graph.imports.items() if f"{PACKAGE}.{INIT}" in targets]
    assert not lines, f"modules must import from the module that holds a name, not from kvpage:{listed(lines)}"


def test_at_most_ten_floors(graph):
    lines = []
    for folder in (PACKAGE, *(f"{PACKAGE}.{room}" for room in ROOMS)):
        way = floors_of(graph, folder)
        if len(way) > MAX_FLOORS:
            lines.append(f"{folder}: {len(way)} floors: {' > '.join(way)}")
    assert not lines, f"a chain of imports must have at most {MAX_FLOORS} floors:{listed(lines)}"


def floors_of(graph: ImportGraph, folder: str) -> list[str]:
    """Return a longest chain: of rooms in the package itself, of modules in a room. Doors (`__init__`) are no floor."""
    if folder == PACKAGE:
        arrows = {a: {b for b in targets if b in ROOMS} for a, targets in graph.inside(folder).items() if a in ROOMS}
        return longest_way(without_circles(arrows))
    inside = [m for m in graph.modules if m.startswith(f"{folder}.") and not m.endswith(INIT)]
    return longest_way(without_circles({m: {t for t in graph.imports[m] if t in inside} for m in inside}))


def without_circles(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the edges that are part of no circle; another test reports the circles."""
    inner = {(a, b) for circle in circles(edges) for a in circle for b in circle}
    return {a: {b for b in targets if (a, b) not in inner} for a, targets in edges.items()}


def test_few_entries_beside_each_other(graph):
    lines = []
    for folder in graph.folders():
        most = MORE_ENTRIES.get(folder, (MAX_ENTRIES, ""))[0]
        entries = sorted(entry for entry in graph.inside(folder) if entry not in NO_ENTRY)
        if len(entries) > most:
            lines.append(f"{folder}: {len(entries)} of at most {most}: {', '.join(entries)}")
    assert not lines, f"a folder must not hold too many modules and folders:{listed(lines)}"
    assert set(MORE_ENTRIES) <= set(graph.folders()), "MORE_ENTRIES must name only folders that exist"


SMALL = {
    "kvpage/__init__.py": "import kvpage._C as _C\nfrom kvpage.layout.config import Config\n",
    "kvpage/source_folder.py": "",
    "kvpage/checks/__init__.py": "",
    "kvpage/checks/values.py": "import torch\nfrom kvpage import _C\n",
    "kvpage/layout/__init__.py": "from kvpage.layout.config import Config\n",
    "kvpage/layout/config.py": "from kvpage.checks import values\ndef f():\n    from kvpage.layout.view import View\n",
    "kvpage/layout/view.py": "if TYPE_CHECKING:\n    from kvpage.layout import Config\n",
    "kvpage/kernels/__init__.py": "a copy that an editable install has linked here",
    "kernels/__init__.py": "",
    "kernels/rows.py": "from kvpage.kernels import tiles\n",
    "kernels/tiles.py": "import kvpage.layout.view\n",
}


@pytest.fixture
def small(tmp_path: Path) -> ImportGraph:
    for name, text in SMALL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return read_graph(tmp_path)


def test_the_graph_counts_lazy_imports_and_those_of_type_checkers(small):
    assert small.imports == {
        "kvpage.__init__": {"kvpage.layout.config"},
        "kvpage.source_folder": set(),
        "kvpage.checks.__init__": set(),
        "kvpage.checks.values": {"kvpage.__init__"},
        "kvpage.layout.__init__": {"kvpage.layout.config"},
        "kvpage.layout.config": {"kvpage.checks.values", "kvpage.layout.view"},
        "kvpage.layout.view": {"kvpage.layout.__init__"},
        "kvpage.kernels.__init__": set(),
        "kvpage.kernels.rows": {"kvpage.kernels.tiles"},
        "kvpage.kernels.tiles": {"kvpage.layout.view"},
    }


def test_the_graph_finds_circles(small):
    assert circles(small.inside("kvpage.layout")) == [[INIT, "config", "view"]]
    assert rings(small.inside("kvpage.layout")) == [["config", "view", INIT]]
    assert circles(small.inside("kvpage")) == [[INIT, "checks", "layout"]]
    assert circles(small.inside("kvpage.kernels")) == []
    assert small.between("kvpage", "layout", "checks") == ["kvpage.layout.config imports kvpage.checks.values"]


def test_the_graph_refuses_relative_imports(tmp_path):
    (tmp_path / "kvpage").mkdir()
    (tmp_path / "kvpage" / "odd.py").write_text("from . import even\n")
    with pytest.raises(ValueError, match=r"imports must be absolute, got a relative one in .*odd\.py, line 1"):
        read_graph(tmp_path)


def test_rings_are_the_shortest_circles():
    edges = {"a": {"b", "e"}, "b": {"a", "c"}, "c": {"d"}, "d": {"b"}, "e": set()}
    assert rings(edges) == [["b", "a"], ["c", "d", "b"]]
    assert rings({"a": {"b"}, "b": set()}) == []


def test_the_longest_way_of_a_small_graph():
    edges = {"a": {"b", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert longest_way(edges) == ["a", "b", "c", "d"]
    assert longest_way({}) == []
    assert without_circles({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == {"a": set(), "b": {"c"}, "c": set()}
