"""Servers in processes of their own, which end with their stack: kvpage's, and vLLM's."""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvpage.benchmarks.peer_process import VLLM_ENVIRONMENT, recommended

START_TIMEOUT = 300.0


def start_servers(options: argparse.Namespace, num_blocks: int, num_seqs: int, stack: ExitStack) -> dict[str, str]:
    """Start kvpage's server over a random model, and vLLM's with --vllm, until the stack ends; return their URLs."""
    from kvpage.benchmarks.serve_model import save_model
    from kvpage.benchmarks.serving_workloads import MODELS, Shape

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    save_model(Path(folder), {**MODELS, "tiny": Shape(2, 64, 128, 4, 2)}[options.serve], options.dtype)
    script = str(Path(__file__).with_name("serve_own.py"))
    port = free_port()
    numbers = map(str, (port, options.threads, options.dtype, num_blocks, num_seqs))
    own = running([sys.executable, script, folder, *numbers], {**os.environ, "GOMP_SPINCOUNT": "0"}, port)
    found = {"kvpage": stack.enter_context(own)}
    if options.vllm:
        found["vllm"] = stack.enter_context(vllm_server(options, folder, num_seqs))
    return found


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@contextmanager
def vllm_server(
    options: argparse.Namespace, folder: str, num_seqs: int, max_model_len: int = 2048, added: Sequence[str] = ()
) -> Iterator[str]:
    """Start vLLM's server, with the libraries that its guide for CPUs names; give its URL. added: to its arguments."""
    port = free_port()
    arguments = [
        "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "model",
        "--port", str(port), "--host", "127.0.0.1", "--dtype", {"fp32": "float32", "bf16": "bfloat16"}[options.dtype],
        "--max-num-seqs", str(num_seqs), "--max-model-len", str(max_model_len), "--max-num-batched-tokens", "2048",
        "--enforce-eager", "--disable-uvicorn-access-log", *added,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {**VLLM_ENVIRONMENT, "KMP_BLOCKTIME": "0", "OMP_NUM_THREADS": str(options.threads)}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # the server has processes of its own
    if preload := ":".join(map(str, recommended(options.vllm))):
        environment["LD_PRELOAD"] = preload
    with running([str(options.vllm), *arguments], environment, port) as url:
        yield url


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], port: int) -> Iterator[str]:
    """Start a server that listens on a port of this machine; give its URL once it answers, and end it afterwards."""
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
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
