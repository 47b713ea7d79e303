"""python tests/reliability [--hours H | --scale S] [--only NAME] [--seed N]: the batteries in their long form.

Each runs in rounds with a seed of its own, until its long count is reached (times `--scale`) or its share of `--hours`
is over. A failure names battery and seed, and the others go on. Ends in a table of figures and one line of JSON.
"""

import argparse
import json
import logging
import math
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from batteries import all_batteries  # noqa: E402, I001 -- the first, which makes the others findable
from support import pwritev_hook  # noqa: E402
from battery import Battery, Figures  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402
from rich.table import Table  # noqa: E402

console = Console(stderr=True)


@dataclass(slots=True)
class Outcome:
    battery: Battery
    num_done: int = 0
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return self.battery.needs or (f"{len(self.failures)} failures" if self.failures else "passed")


def run(battery: Battery, target: int, seconds: float | None, seed: int, progress: Progress) -> Outcome:
    """Rounds of at most the short count, or `longest`. A figure is added up over them; of max_... the largest
    counts.
    """
    outcome, began = Outcome(battery), time.monotonic()
    deadline = math.inf if seconds is None else began + seconds

    def advance(count: int) -> bool:
        progress.advance(task, count)
        return time.monotonic() < deadline

    task = progress.add_task(battery.name, total=target)
    while outcome.num_done < target and not outcome.failures and time.monotonic() < deadline:
        count = min(battery.longest or battery.short, target - outcome.num_done)
        try:
            figures = battery.run(seed, count, advance)
        except Exception:  # whatever it is: it is the finding
            outcome.failures.append(f"{battery.name}, seed {seed}, count {count}:\n{traceback.format_exc()}")
            break
        for name, value in figures.items():
            before = outcome.figures.get(name, 0)
            outcome.figures[name] = max(before, value) if name.startswith("max_") else before + value
        outcome.num_done += int(figures.get(battery.unit, count))
        seed += 1
    for name, limit in battery.limits.items():
        if outcome.figures.get(name, 0) > limit:
            outcome.failures.append(f"{battery.name}: {name} must be at most {limit}, got {outcome.figures[name]}")
    outcome.seconds = time.monotonic() - began
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hours", type=float, help="for all together, shared equally; default: until all counts are reached"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the long counts")
    parser.add_argument(
        "--only", action="append", default=[], help="batteries whose name contains this; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("reliability").setLevel(logging.INFO)
    logging.getLogger("kvpage").setLevel(logging.ERROR)  # tiers in trouble, as they are meant to be
    chosen = [b for b in all_batteries() if not options.only or any(text in b.name for text in options.only)]
    if not chosen:
        parser.error(f"--only must name batteries, got {options.only}: {', '.join(b.name for b in all_batteries())}")
    able = [battery for battery in chosen if battery.needs is None]
    share = None if options.hours is None else options.hours * 3600 / max(len(able), 1)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    outcomes = []
    with Progress(*columns, console=console) as progress:
        for battery in chosen:
            target = max(int(battery.long * options.scale), 1)
            done = run(battery, target, share, options.seed, progress) if battery in able else Outcome(battery)
            outcomes.append(done)
    report(outcomes)
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def report(outcomes: list[Outcome]) -> None:
    table = Table("battery", "done", "unit", "seconds", "figures", "verdict")
    for outcome in outcomes:
        figures = ", ".join(f"{name} {value:,}" for name, value in outcome.figures.items())
        battery = outcome.battery
        table.add_row(
            battery.name, f"{outcome.num_done:,}", battery.unit, f"{outcome.seconds:,.0f}", figures, outcome.verdict
        )
        for failure in outcome.failures:
            console.print(failure, markup=False)
    Console().print(table)
    rows = [
        {
            "name": o.battery.name,
            "done": o.num_done,
            "seconds": round(o.seconds, 1),
            "figures": o.figures,
            "verdict": o.verdict,
        }
        for o in outcomes
    ]
    print(json.dumps({"batteries": rows}))


def begin_again_with_hook() -> None:
    """With the library by which the native writer's calls can be made to fail, where there is a compiler to make it."""
    if pwritev_hook.was_asked_for():
        pwritev_hook.forget()
    elif pwritev_hook.missing() is None:
        os.execve(sys.executable, sys.orig_argv, pwritev_hook.environment())


if __name__ == "__main__":
    begin_again_with_hook()
    sys.exit(main())
