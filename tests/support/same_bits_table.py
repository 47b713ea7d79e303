"""python tests/support/same_bits_table.py docs/same_bits.md: which decoders EngineConfig(same_bits=True) takes.

It writes the table between two lines of the page. Each type that an Engine serves is tried with a tiny model in fp32.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.family import make_family_model  # noqa: E402
from support.family_configs import decoder_types  # noqa: E402

from kvpage import CacheConfig  # noqa: E402
from kvpage.checks.errors import OptionError  # noqa: E402
from kvpage.serving import Engine, EngineConfig  # noqa: E402

BEGIN, END = "<!-- types: tests/support/same_bits_table.py -->", "<!-- end of types -->"
HOLDS = "the same bits"
OWN_STEP = "a step of its own"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \|$", re.MULTILINE)


def verdict(kind: str) -> str:
    """Whether the type has the same bits, or why it is refused; empty for a type that no Engine serves."""
    config = CacheConfig(block_size=4, num_gpu_blocks=64)
    try:
        model = make_family_model(kind)
        Engine.from_model(model, EngineConfig(config))
    except Exception:  # whatever a type raises that is not served
        return ""
    try:
        Engine.from_model(model, EngineConfig(config, same_bits=True))
    except OptionError as error:
        operator = re.search(r"aten::\w+", str(error))
        return f"refused: {operator[0] if operator else OWN_STEP if 'rule of its own' in str(error) else error}"
    return HOLDS


def table(kinds: Iterable[str]) -> str:
    """The rows of the page."""
    verdicts = {kind: verdict(kind) for kind in kinds}
    rows = [f"| `{kind}` | {words} |" for kind, words in verdicts.items() if words]
    return "\n".join(["| Type | Verdict |", "|---|---|", *rows])


def written(page: Path) -> dict[str, str]:
    """The verdict of each type by the page."""
    return dict(ROW.findall(page.read_text().split(BEGIN)[1].split(END)[0]))


def main() -> None:
    page = Path(sys.argv[1])
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(decoder_types())}\n\n{END}{after}")


if __name__ == "__main__":
    main()
