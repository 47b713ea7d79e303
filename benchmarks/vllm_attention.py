"""vLLM's attention for CPUs in a process of its own: the peer of bench_attention_steps."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpage.benchmarks.vllm_process import PRELOADED


class AttentionProcess:
    """Runs vllm_attention_peer.py with another Python. `start` gives one that ends with its block."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._seconds: list[float] = []

    @classmethod
    @contextmanager
    def start(cls, python: Path) -> Iterator["AttentionProcess"]:
        """Args: python: an interpreter with vLLM."""
        preload = [*PRELOADED, str(python.parent.parent / "lib" / "libiomp5.so")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["LD_PRELOAD"] = ":".join(path for path in preload if Path(path).exists())
        script = str(Path(__file__).with_name("vllm_attention_peer.py"))
        with subprocess.Popen(
            [str(python), script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                yield cls(process)
            finally:
                process.terminate()

    def prepare(
        self,
        lengths: Sequence[int],
        queries: Sequence[int],
        shared: int,
        shape: Sequence[int],
        dtype: str,
        threads: int,
    ) -> None:
        """Make a step there, and compare its result with torch's.

        Args:
            lengths: Tokens of each sequence.
            queries: Queries of each sequence.
            shared: Tokens that all sequences have in common, in the same blocks.
            shape: KV heads, query heads of each, head size.
            dtype: The name of torch's dtype.
            threads: Threads of the operation.

        Raises:
            RuntimeError: vLLM ended; its own words are above.
        """
        self._seconds.clear()
        self._ask({
            "lengths": list(lengths), "queries": list(queries), "shared": shared, "shape": list(shape),
            "dtype": dtype, "threads": threads,
        })  # fmt: skip

    def attend(self) -> None:
        """Run the step once."""
        self._seconds.append(self._ask({})["seconds"])

    def seconds(self) -> list[float]:
        """Return the seconds of each run since the step was made, measured around the operation itself."""
        return list(self._seconds)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("vLLM ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer
