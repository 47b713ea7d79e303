"""Real servers of Redis for tests: on loopback, in a directory of their own, gone with the test."""

import atexit
import contextlib
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from support.ports import free_port

MISSING = shutil.which("redis-server") is None
needs_redis = pytest.mark.skipif(MISSING, reason="needs redis-server (Debian's package redis-server)")
START_SECONDS = 120


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
            if self._answers():
                return
            assert self.process.poll() is None, (self.path / "log").read_text()
            time.sleep(0.01)
        raise AssertionError("the server did not start")

    def _answers(self) -> bool:
        """Whether it answers. Its port listens before its other ports and sockets do, and answers when all listen."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
            connection.sendall(b"PING\r\n")
            return bool(connection.recv(1))  # an error, too: it may ask for a password
        return False

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Also if it is paused, or dead."""
        self.process.kill()
        self.process.wait()


class Proxy:
    """Pass bytes on to a server, and its answer one byte each `delay` seconds, if that is not 0."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target, self.delay = self.listener.getsockname()[1], port, 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self.listener.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # the server is down
                    near.close()
                    continue
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_slow: bool) -> None:
        with contextlib.suppress(OSError), source, sink:
            while True:
                data = source.recv(1 << 16)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                while is_slow and self.delay and data:
                    time.sleep(self.delay)
                    sink.sendall(data[:1])
                    data = data[1:]
                sink.sendall(data)

    def close(self) -> None:
        self.listener.close()
