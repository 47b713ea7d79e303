"""Launched: processes of servers and routers for tests, each with a log; all are gone at the end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

SECONDS = 120.0  # until a process answers, on a machine that does much else


class Launched:
    """Processes, which end with the `with` block; their logs are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, words: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a command. "python" is this Python."""
        command = [sys.executable if word == "python" else word for word in words]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder, env={**os.environ, **environment}
            )
        self._running.append(process)
        return process

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self._running:
            process.wait(120)

    def logs(self, num_lines: int = 15) -> str:
        """Return the ends of all logs, for messages."""
        ends = [
            (log.name, log.read_text(errors="replace").splitlines()[-num_lines:]) for log in self.folder.glob("*.log")
        ]
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in ends)

    def wait_for(self, is_there: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        """Wait until it is there. AssertionError with the logs if it does not come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if is_there():
                return
            if ended := [process.args for process in self._running if process.poll() not in (None, 0, -signal.SIGKILL)]:
                raise AssertionError(f"{what} did not come: {ended} has ended\n{self.logs()}")
            time.sleep(0.1)
        raise AssertionError(f"{what} did not come in {seconds} s\n{self.logs()}")


def answer(url: str) -> str:
    """Return the body at a URL; "" where nothing answers, or with an error."""
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as response:
        return str(response.read().decode())
    return ""
