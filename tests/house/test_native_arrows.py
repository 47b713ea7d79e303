"""The rooms of csrc and the arrows between them: includes go down the list of rooms, without circles between files."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
MAX_ENTRIES = 20
SOURCES = (".h", ".cpp", ".cu")
GENERATED = ("docs.h",)  # made from kvpage/_C.pyi when the extension is built

# A room includes only itself and rooms before it.
ROOMS = {
    "base": "checks, threads, bytes and token arrays, which every other room uses",
    "cuda": "devices, streams and errors of CUDA, which know nothing of blocks",
    "pool": "block ids and the references on them",
    "pool/eviction": "what it is worth to keep an entry of a cache, and the order of a store's records",
    "tree/nodes": "the nodes of a prefix tree, and where their children are found",
    "tree/eviction": "the order in which nodes give up their blocks",
    "tree": "the prefix tree, which knows nothing of memory",
    "sequences": "block tables and lengths of sequences, over the pool and the tree",
    "slots": "whole-sequence slots, a tree of their own",
    "states": "state slots, and the cached blocks that checkpoints stand on",
    "copy/plan": "the bytes that a swap or a copy of blocks moves",
    "copy/host": "executor 1 of a plan: threads of the host",
    "copy/copy_engine": "executor 2 of a plan: the copy engines of a device",
    "copy/sm_kernel": "executor 3 of a plan: a kernel on a device's multiprocessors",
    "copy/copier": "the choice among the three executors",
    "simd": "vectors, transpositions, and the choice of an instruction set",
    "hash": "XXH3 of bytes on their way",
    "codec": "floats in fewer bytes, without loss",
    "quantize": "numbers to 8-bit codes and back",
    "tokens": "rows of tokens into blocks and out of them, of any layout",
    "chunks": "the store's unit between blocks and records: tokens and hashes",
    "attention": "attention that reads blocks in place: tokens and codes",
    "blend": "rows of tokens rotated and mixed",
    "sampling": "one token for each row of logits",
    "linear/tiles": "the tile registers of AMX, or a model of them, and a block of products by them",
    "linear": "rows times weights",
    "linear/norms": "norms of rows, as products take theirs",
    "linear/experts": "rows times the weights of their groups, as they lie",
    "recurrence": "tokens through linear recurrences, one by one",
    "bindings": "the only room that knows Python",
}


def files() -> list[str]:
    return sorted(path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*") if path.suffix in SOURCES)


def room_of(file: str) -> str:
    return file.rpartition("/")[0]


def unit_of(file: str) -> str:
    """A header and the source of the same name are one."""
    return file.rpartition(".")[0]


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)


@pytest.fixture(scope="module")
def graph() -> dict[str, list[str]]:
    """Return what each file includes of csrc."""
    return {file: [each for each in includes((CSRC / file).read_text()) if each not in GENERATED] for file in files()}


def upward(graph: dict[str, list[str]], order: list[str]) -> list[str]:
    place = {room: i for i, room in enumerate(order)}
    return [
        f"{file} includes {target}"
        for file, targets in graph.items()
        for target in targets
        if place[room_of(target)] > place[room_of(file)]
    ]


def circle(graph: dict[str, list[str]]) -> list[str]:
    """Return a circle of units that include each other, or an empty list."""
    units: dict[str, set[str]] = {}
    for file, targets in graph.items():
        units.setdefault(unit_of(file), set()).update(unit_of(target) for target in targets)
    done: set[str] = set()

    def visit(unit: str, way: list[str]) -> list[str]:
        if unit in way:
            return [*way[way.index(unit) :], unit]
        if unit not in done:
            for target in sorted(units.get(unit, set()) - {unit}):
                if found := visit(target, [*way, unit]):
                    return found
        done.add(unit)
        return []

    return next((found for unit in sorted(units) if (found := visit(unit, []))), [])


def test_every_file_is_in_a_room(graph):
    assert {room_of(file) for file in graph} == set(ROOMS)


def test_includes_are_paths_from_csrc(graph):
    arrows = [(file, target) for file, targets in graph.items() for target in targets]
    lines = [f"{file} includes {target}" for file, target in arrows if target not in graph]
    assert not lines, f"an include must be a path from csrc/: {lines}"


def test_arrows_go_down(graph):
    assert not upward(graph, list(ROOMS)), f"a room must include only rooms before it: {upward(graph, list(ROOMS))}"


def test_no_circle_between_files(graph):
    assert not circle(graph), f"files must not include each other in a circle: {' > '.join(circle(graph))}"


def test_at_most_twenty_entries_in_a_folder():
    folders = [CSRC, *(path for path in CSRC.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    many = {str(each): num for each in folders if (num := sum(1 for _ in each.iterdir())) > MAX_ENTRIES}
    assert not many, f"a folder must have at most {MAX_ENTRIES} entries: {many}"


def test_only_the_bindings_know_python_and_only_cu_files_know_cuda():
    for file in files():
        text = (CSRC / file).read_text()
        system = re.findall(r"^\s*#\s*include\s+<([^>]+)>", text, re.MULTILINE)
        knows_python = any(re.match(r"pybind11|Python\.h", each) for each in system)
        assert room_of(file) == "bindings" or not knows_python, file
        knows_cuda = [each for each in system if each.startswith("cuda")] and room_of(file) != "cuda"
        assert file.endswith(".cu") or not knows_cuda, file


def test_an_arrow_upward_and_a_circle_are_found():
    graph = {"low/a.h": ["high/b.h"], "high/b.h": [], "high/b.cpp": ["high/b.h", "low/a.h"]}
    assert upward(graph, ["low", "high"]) == ["low/a.h includes high/b.h"]
    assert circle(graph) == ["high/b", "low/a", "high/b"]
    assert circle({"low/a.h": [], "low/a.cpp": ["low/a.h"], "high/b.h": ["low/a.h"]}) == []
