"""Real servers of Redis for tests: on loopback, in a directory of their own, gone with the test."""

import atexit
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

MISSING = shutil.which("redis-server") is None
needs_redis = pytest.mark.skipif(MISSING, reason="needs redis-server (Debian's package redis-server)")
START_SECONDS = 20


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


class RedisServer:
    """A process, started at once; `arguments` as on its command line. port: the same over restarts."""

    def __init__(self, path: Path, *arguments: str, port: int | None = None, is_sentinel: bool = False) -> None:
        self.path, self.port, self.is_sentinel = path, port or free_port(), is_sentinel
        self.arguments = arguments
        path.mkdir(parents=True, exist_ok=True)
        atexit.register(self.kill)  # whatever becomes of the test
        self.start()

    def start(self) -> None:
        """Empty: nothing is saved."""
        common = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.path)]
        config = [str(self.path / "sentinel.conf")] if self.is_sentinel else ["--save", ""]
        with (self.path / "log").open("ab") as log:
            command = ["redis-server", *config, *common, *self.arguments, *["--sentinel"] * self.is_sentinel]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self._await()

    def _await(self) -> None:
        for _ in range(START_SECONDS * 100):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, (self.path / "log").read_text()
                time.sleep(0.01)
        raise AssertionError("the server did not start")

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Also if it is paused, or dead."""
        self.process.kill()
        self.process.wait()
