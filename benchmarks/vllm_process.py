"""vLLM in a process of its own, over the weights of a model here: the peer of bench_serving."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers as tf

from kvpage.benchmarks.peer_process import PeerProcess

PRELOADED = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
)  # what vLLM's guide for CPUs asks for, if it is there


class VLLMProcess:
    """Runs vllm_peer.py with another Python. `start` gives one that ends with its block."""

    def __init__(self, peer: PeerProcess) -> None:
        self._peer = peer
        self.version: str = peer.hello["vllm"]

    @classmethod
    @contextmanager
    def start(cls, python: Path, model: tf.PreTrainedModel, num_threads: int) -> Iterator["VLLMProcess"]:
        """Args: python: an interpreter with vLLM. model: saved to a folder that vLLM reads.

        Raises:
            RuntimeError: vLLM ended; its own words are above.
        """
        wanted = [Path(path) for path in (*PRELOADED, python.parent.parent / "lib" / "libiomp5.so")]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            arguments = [folder, str(num_threads), str(model.dtype).removeprefix("torch.")]
            preload = [path for path in wanted if path.exists()]
            with PeerProcess.start(python, "vllm_peer.py", arguments, preload) as peer:
                yield cls(peer)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt, from an empty prefix cache."""
        tokens: list[list[int]] = self._peer.ask(prompts=prompts, max_tokens=max_tokens)["tokens"]
        return tokens
