"""python fuzz_child.py SEED COUNT JOURNAL [ONLY [ALL]]: fuzzes in a process of its own.

The journal holds the call that it is at.

What crashes the process leaves its call there. A line with a number tells how many calls more are done, the last line
is JSON: how many calls were valid, refused and taken, by target. ONLY: targets whose name contains this. ALL: go
on after a finding, and print all of them at the end, for whoever mends them.
"""

import json
import mmap
import random
import resource
import sys
import traceback
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from fuzz_case import Fuzzer  # noqa: E402
from fuzz_targets import TARGETS  # noqa: E402

JOURNAL_BYTES = 1 << 16
MAX_MEMORY = 24 << 30  # of addresses: what takes the whole machine for one argument fails here


class Journal:
    """The last call, in a file that outlives the process."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), JOURNAL_BYTES)
        self.prefix = self.last = ""

    def tell(self, call: str) -> None:
        self.last = f"{self.prefix} {call}"
        text = self.last.encode(errors="backslashreplace")[: JOURNAL_BYTES - 1]
        self._memory[: len(text) + 1] = text + b"\0"


def main(seed: int, count: int, path: str, only: str = "", everything: str = "") -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    journal, rng, figures = Journal(path), random.Random(seed), {}
    chosen = [target for target in TARGETS if only in target.name]
    findings: dict[str, str] = {}
    done = episode = 0
    while done < count:
        target = rng.choices(chosen, [target.weight for target in chosen])[0]
        episode += 1
        own = random.Random(f"{seed} {episode} {target.name}")
        journal.prefix = f"seed {seed}, episode {episode} ({target.name})"
        journal.tell("the world's beginning")
        fuzzer, calls = Fuzzer(own, journal.tell), min(target.calls, count - done)
        try:
            with target.make(own) as world:
                for _ in range(calls):
                    fuzzer.call(world)
                journal.tell("the world's end")
        except Exception as error:  # whatever it is: it is the finding
            if not everything:
                raise
            findings.setdefault(origin(error), f"{type(error).__name__}: {error}\n  {journal.last}")
        done += calls
        for name in ("valid", "refused", "taken"):
            figures[f"{name}_{target.name}"] = figures.get(f"{name}_{target.name}", 0) + getattr(fuzzer.figures, name)
        print(calls, flush=True)
    for place, finding in findings.items():
        print(f"{place}  {finding}", file=sys.stderr)
    print(json.dumps(figures), flush=True)


def origin(error: BaseException) -> str:
    """Where it was raised: what is found twice is one finding."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-3:-1])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
