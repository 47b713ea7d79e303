"""vLLM in a process of its own, over the weights of a model here: the peer of bench_serving."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers as tf

PRELOADED = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
)  # what vLLM's guide for CPUs asks for, if it is there


class VLLMProcess:
    """Runs vllm_peer.py with another Python. `start` gives one that ends with its block."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version: str = self._answer()["vllm"]

    @classmethod
    @contextmanager
    def start(cls, python: Path, model: tf.PreTrainedModel, num_threads: int) -> Iterator["VLLMProcess"]:
        """Args: python: an interpreter with vLLM. model: saved to a folder that vLLM reads.

        Raises:
            RuntimeError: vLLM ended; its own words are above.
        """
        preload = [*PRELOADED, str(python.parent.parent / "lib" / "libiomp5.so")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["LD_PRELOAD"] = ":".join(path for path in preload if Path(path).exists())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            dtype = str(model.dtype).removeprefix("torch.")
            script = str(Path(__file__).with_name("vllm_peer.py"))
            with subprocess.Popen(
                [str(python), script, folder, str(num_threads), dtype], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, env=environment,
            ) as process:  # fmt: skip
                try:
                    yield cls(process)
                finally:
                    process.terminate()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt, from an empty prefix cache."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()["tokens"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with exit code {self._process.wait()}; what it printed above says why")
        return json.loads(line)
