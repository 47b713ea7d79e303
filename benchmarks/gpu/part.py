"""A part of the run: a command under a limit. What it prints is shown at once, and goes into a file."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

GRACE = 15.0
"""Seconds from the interrupt to the kill: pytest and the benchmarks report on what they have until then."""
TOO_LONG, NOT_THERE = 124, 127
"""Exit codes, as of `timeout` and of a shell."""


@dataclass(frozen=True, slots=True)
class Part:
    """A command of the run. name: of its files, too. seconds: after which it is interrupted. must_pass: whether the run
    ends where it fails."""

    name: str
    seconds: float
    command: tuple[str, ...]
    must_pass: bool = False

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")
        if not self.command:
            raise ValueError("command must name a program, got none")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part went. code: None where no time was left to begin. result: its last line of JSON, if it printed one."""

    part: str
    seconds: float
    code: int | None
    last_line: str
    result: dict[str, Any] | None

    @property
    def has_failed(self) -> bool:
        """Whether its exit code is another than 0, or it never began."""
        return self.code != 0

    def line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))


def run_part(part: Part, limit: float, log: Path, environment: Mapping[str, str]) -> Outcome:
    """Run a part, and end what it leaves running. It never raises for a command that fails.

    limit: seconds that are left for it, at most its own. log: takes what it prints.
    """
    if limit <= 0:
        log.write_text("no time left\n")
        return Outcome(part.name, 0.0, None, "no time left", None)
    begin = time.monotonic()
    code = _run(part.command, limit, log, environment)
    lines = log.read_text(errors="replace").splitlines()
    return Outcome(part.name, time.monotonic() - begin, code, lines[-1] if lines else "", last_json(lines))


def last_json(lines: list[str]) -> dict[str, Any] | None:
    """Return the last line that is a JSON object, or None where there is none."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # a line that begins like an object
            parsed = json.loads(line) if line.startswith("{") else None
            if isinstance(parsed, dict):
                return parsed
    return None


def _run(command: tuple[str, ...], limit: float, log: Path, environment: Mapping[str, str]) -> int:
    """Return the exit code. The command is the leader of its own group, so that its children are reached, too."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    except OSError as error:
        log.write_text(f"{error}\n")
        return NOT_THERE
    with log.open("wb") as file:
        reader = threading.Thread(target=_show, args=(process.stdout, file))
        reader.start()
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return TOO_LONG
        finally:
            _end(process)
            reader.join()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt the command if it still runs, as Ctrl-C would, and kill all that is left of its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            print(f"it did not end within {GRACE:.0f} s of its interrupt, and is killed")
    with contextlib.suppress(ProcessLookupError):  # where all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _show(source: IO[bytes], file: IO[bytes]) -> None:
    for line in source:
        file.write(line)
        sys.stdout.buffer.write(line)
        sys.stdout.flush()
