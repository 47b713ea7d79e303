"""A master of Mooncake Store on this machine, for tests; they skip where Mooncake is not installed."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from support.ports import free_port


class Master:
    """mooncake_master on a port of its own; after kill(), start() starts another one there, which is empty."""

    def __init__(self) -> None:
        self.port, self.metrics = free_port(), free_port()
        self.start()

    def start(self) -> None:
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self.metrics}", "--rpc_address=127.0.0.1"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["mooncake_master", *ports], **quiet)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?segment_size=64MiB&buffer_size=32MiB&max_record_bytes=8MiB&cooldown=0"


def running_master() -> Iterator[Master]:
    """Yield a master, or skip the test."""
    pytest.importorskip("mooncake.store", exc_type=ImportError, reason="needs mooncake, libibverbs1, librdmacm1")
    if shutil.which("mooncake_master") is None:
        pytest.skip("needs mooncake_master")
    master = Master()
    yield master
    master.kill()
