"""A peer in a process of its own, run by another Python: it answers a line of JSON with a line of JSON."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

TCMALLOC = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
HIDDEN = ("PYTHONPATH", "PYTHONSAFEPATH", "LD_PRELOAD")
"""Of the environment, what a peer does not see: it finds its own packages, and peer_answers.py beside its script."""
VLLM_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


class PeerProcess:
    """A script beside this file. `start` gives one that ends with its block.

    hello: the script's first line, which it prints when it is ready.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.hello = self._answer()

    @classmethod
    @contextmanager
    def start(
        cls,
        python: Path,
        script: str,
        arguments: Sequence[str],
        preload: Sequence[Path] = (),
        added: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator["PeerProcess"]:
        """Start a script of this folder. preload: libraries to load before others. added: to its environment.

        Raises:
            RuntimeError: The script ended; its own words are above.
        """
        environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
        environment |= {"KMP_BLOCKTIME": "0", **added}  # threads of Intel's OpenMP sleep while others are measured
        if preload:
            environment["LD_PRELOAD"] = ":".join(map(str, preload))
        command = [str(python), str(Path(__file__).parent / script), *arguments]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                yield cls(process)
            finally:
                process.terminate()

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Give it a line, and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with exit code {self._process.wait()}; its words above say why")
        return json.loads(line)


@contextmanager
def vllm_peer(
    python: Path | None, kind: str, num_threads: int, *arguments: str, preloads: bool = False
) -> Iterator[PeerProcess | None]:
    """Give a peer of a kind in vllm_peer.py, and None without an interpreter that has vLLM.

    preloads: whether it has the libraries that vLLM's guide has its users preload.
    """
    if python is None:
        yield None
        return
    libraries, added = (
        recommended(python) if preloads else [],
        {**VLLM_ENVIRONMENT, "OMP_NUM_THREADS": str(num_threads)},
    )
    with PeerProcess.start(python, "vllm_peer.py", [kind, str(num_threads), *arguments], libraries, added) as peer:
        yield peer


def recommended(python: Path) -> list[Path]:
    """Return those of the libraries that vLLM's guide for CPUs has its users preload that are in the environment."""
    libraries = [Path(TCMALLOC), python.parent.parent / "lib" / "libiomp5.so"]
    return [path for path in libraries if path.exists()]
