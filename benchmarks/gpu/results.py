"""What the parts have left: a log each, plots, a line of JSON each, and the summary; all of it in one archive.

results.jsonl    a line a part: exit code, seconds, and the JSON that it printed
summary.txt      a row a target
NAME.txt, *.png  what a part printed and plotted
"""

import os
import tarfile
from pathlib import Path

from .part import Outcome
from .summary import summary_of

ARCHIVE = "results.tar.gz"


class Results:
    """Collects outcomes. The archive, in `out`, is the only file outside of the working folder, and is whole at any
    time.
    """

    def __init__(self, out: Path, work: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.archive, self.work = out / ARCHIVE, work
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """Keep the outcome of a part that has just ended, and write the archive anew."""
        self.outcomes.append(outcome)
        with (self.work / "results.jsonl").open("a") as lines:
            lines.write(outcome.line() + "\n")
        self.write_archive()

    def write_archive(self) -> None:
        """Put all files into the archive; an interrupt leaves the one before."""
        (self.work / "summary.txt").write_text(summary_of(self.outcomes))
        unfinished = self.archive.with_suffix(".unfinished")
        with tarfile.open(unfinished, "w:gz") as archive:
            for path in sorted(self.work.iterdir()):
                if path.is_file():
                    archive.add(path, path.name)
        os.replace(unfinished, self.archive)
