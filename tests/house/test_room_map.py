"""The page on architecture shows the rooms as they are; `python tests/house/room_map.py --write` draws them anew."""

import subprocess
import sys
from pathlib import Path

from support.import_graph import ImportGraph
from support.rooms import ROOMS, picture

PROJECT = Path(__file__).resolve().parents[2]


def arrows(**targets: str) -> ImportGraph:
    """Return a graph with one module in each room, which imports those of the rooms named."""
    module = "kvpage.{}.door".format
    imports = {module(room): {module(target) for target in targets.get(room, "").split()} for room in ROOMS}
    return ImportGraph({name: Path(name) for name in imports}, imports)


def test_the_picture_leaves_out_arrows_that_a_longer_way_implies():
    graph = arrows(tools="ops layout checks", ops="layout checks", layout="checks", store="layout")
    assert picture(graph) == ("graph TD\n  tools --> ops\n  store --> layout\n  ops --> layout\n  layout --> checks\n")


def test_the_page_embeds_what_the_script_prints():
    script = [sys.executable, PROJECT / "tests" / "house" / "room_map.py"]
    drawn = subprocess.run(script, check=True, text=True, capture_output=True).stdout
    page = (PROJECT / "docs" / "architecture.md").read_text()
    assert f"```mermaid\n{drawn}```" in page, "run `python tests/house/room_map.py --write`"
