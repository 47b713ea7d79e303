"""Servers in processes of their own, which end with their blocks: kvpage's, and vLLM's."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvpage.benchmarks.peer_process import recommended

START_TIMEOUT = 300.0
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
    "KMP_BLOCKTIME": "0",
}  # fmt: skip


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@contextmanager
def kvpage_server(folder: Path, num_threads: int, dtype: str, num_blocks: int, max_num_seqs: int) -> Iterator[str]:
    """Start kvpage's server; give its URL."""
    port = free_port()
    script = Path(__file__).with_name("serve_own.py")
    arguments = [str(folder), str(port), str(num_threads), dtype, str(num_blocks), str(max_num_seqs)]
    with _running([sys.executable, str(script), *arguments], {"GOMP_SPINCOUNT": "0"}, port) as url:
        yield url


@contextmanager
def vllm_server(python: Path, folder: Path, num_threads: int, dtype: str, max_num_seqs: int) -> Iterator[str]:
    """Start vLLM's server, with the libraries that its guide for CPUs names; give its URL."""
    port = free_port()
    arguments = [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "model",
        "--port", str(port), "--host", "127.0.0.1", "--dtype", {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "--max-num-seqs", str(max_num_seqs), "--max-model-len", "2048", "--max-num-batched-tokens", "2048",
        "--enforce-eager", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    environment = VLLM_ENVIRONMENT | {"OMP_NUM_THREADS": str(num_threads)}
    preload = ":".join(map(str, recommended(python)))
    if preload:
        environment["LD_PRELOAD"] = preload
    with _running([str(python), *arguments], environment, port, without=("PYTHONPATH",)) as url:
        yield url


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], port: int, without: Sequence[str] = ()
) -> Iterator[str]:
    kept = {name: value for name, value in os.environ.items() if name not in without}
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env={**kept, **environment}, start_new_session=True) as process:
        try:
            _wait_for(url, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Return once the server answers. RuntimeError if it ends, TimeoutError if it takes too long."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}; its own words are above")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"the server does not answer after {START_TIMEOUT:.0f} s")
