"""The rooms of kvpage, in the order of their arrows, and the picture of them.

checks < layout < blocks < ... < integrations < tools        a room imports only rooms before it
"""

from support.import_graph import PACKAGE, Edges, ImportGraph, reach

ROOMS = (
    "checks", "layout", "blocks", "observe", "kernels", "ops", "cache", "store", "blend", "serving", "extras",
    "server", "integrations", "tools",
)  # fmt: skip


def room_of(module: str) -> str:
    """Return the name of a module's room: the part after the package's name."""
    return module.split(".")[1]


def upward(graph: ImportGraph) -> list[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second, though the second comes after it."""
    order = {room: index for index, room in enumerate(ROOMS)}
    arrows = graph.inside(PACKAGE)
    pairs = ((a, b) for a in ROOMS for b in arrows.get(a, ()) if b in order)
    return sorted((a, b) for a, b in pairs if order[b] > order[a])


def picture(graph: ImportGraph) -> str:
    """Return the rooms and their arrows as a mermaid graph, the uppermost room first.

    An arrow is left out where a longer way says the same: tools ─► ops, if tools ─► serving ─► ops.
    """
    arrows = {a: {b for b in targets if b in ROOMS} for a, targets in graph.inside(PACKAGE).items() if a in ROOMS}
    lines = ["graph TD"]
    for room in reversed(ROOMS):
        lines += [f"  {room} --> {target}" for target in sorted(shortest(arrows, room), key=ROOMS.index, reverse=True)]
    return "\n".join(lines) + "\n"


def shortest(arrows: Edges, room: str) -> set[str]:
    """Return the targets of a room that it does not also reach by way of another."""
    return {target for target in arrows[room] if not any(target in reach(arrows, b) for b in arrows[room] - {target})}
