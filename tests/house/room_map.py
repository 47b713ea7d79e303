"""Print the rooms of kvpage and the arrows between them, as a mermaid graph; `docs/architecture.md` embeds it.

python tests/house/room_map.py            print it
python tests/house/room_map.py --write    put it into the page, in place of the graph that is there
"""

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "tests"))

from support.import_graph import read_graph  # noqa: E402
from support.rooms import picture  # noqa: E402

PAGE = PROJECT / "docs" / "architecture.md"
GRAPH = re.compile(r"(?<=```mermaid\n)graph TD\n.*?(?=```)", re.DOTALL)


def main(arguments: list[str]) -> int:
    drawn = picture(read_graph(PROJECT))
    if arguments == ["--write"]:
        page, found = GRAPH.subn(lambda _: drawn, PAGE.read_text(), count=1)
        if not found:
            print(f"{PAGE} must have a block that begins with ```mermaid and `graph TD`", file=sys.stderr)
            return 1
        PAGE.write_text(page)
    else:
        print(drawn, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
