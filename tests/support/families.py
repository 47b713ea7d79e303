"""python tests/support/families.py --write docs/families.md | --check docs/families.md [--only TYPE]: which decoders
of this transformers are served. Each type is tried with a tiny model, in a process that may be stopped; what is found
is kept in --results, so that a run that is ended goes on there.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers as tf  # noqa: E402, I001
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from support.family import CHUNK, Family  # noqa: E402
from support.family_configs import decoder_types  # noqa: E402
from support.family_table import FamilyTable  # noqa: E402
from support.family_worker import FamilyWorker  # noqa: E402

console = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare the table; 1 where it differs")
    parser.add_argument("--only", action="append", metavar="TYPE", help="try this one; may be repeated")
    parser.add_argument("--results", type=Path, help="keep what is found here, a line of JSON each, and go on from it")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one type")
    options = parser.parse_args()
    unknown = set(options.only or ()) - set(decoder_types())
    if unknown:
        parser.error(f"--only must name types of transformers {tf.__version__}, got {', '.join(sorted(unknown))}")
    if options.only and options.write:
        parser.error("--write must be without --only: the table is of all types")
    families = try_all(options.only or list(decoder_types()), options.results, options.seconds)
    table = FamilyTable.of_families(tf.__version__, families)
    if options.write:
        options.write.write_text(table.text(CHUNK))
    wrong = report(families) + (differences(table, options.check) if options.check else [])
    console.print(*wrong, sep="\n", markup=False)
    return 1 if wrong else 0


def try_all(kinds: list[str], results: Path | None, seconds: float) -> list[Family]:
    """Each type's Family, those that the file has not tried anew."""
    found = {family.kind: family for family in read_results(results)}
    missing = [kind for kind in kinds if kind not in found]
    if missing:
        worker = FamilyWorker(seconds)
        for kind in track(missing, "decoder types", console=console):
            found[kind] = worker.judge(kind)
            if results:
                with results.open("a") as file:
                    file.write(json.dumps(asdict(found[kind])) + "\n")
        worker.close()
    return [found[kind] for kind in kinds]


def read_results(results: Path | None) -> list[Family]:
    if results is None or not results.exists():
        return []
    return [Family(**json.loads(line)) for line in results.read_text().splitlines()]


def report(families: Iterable[Family]) -> list[str]:
    """Wrong tokens, which there must be none of."""
    return [f"{family.kind}: {family.engine}; {family.cache}" for family in families if family.is_wrong]


def differences(table: FamilyTable, path: Path) -> list[str]:
    """Return the lines in which the file differs."""
    written = FamilyTable.parse(path.read_text())
    if written.version != table.version:
        console.print(f"{path} is of transformers {written.version}, this is {table.version}", markup=False)
    return [
        f"{kind}: {row}, {path} says {written.rows.get(kind)}"
        for kind, row in table.rows.items()
        if written.rows.get(kind) != row
    ]


if __name__ == "__main__":
    sys.exit(main())
