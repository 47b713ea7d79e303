"""Servers of bench_serving in processes of their own, over the weights of a model here: vLLM, and kvpage preloaded."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import transformers as tf

from kvpage.benchmarks.peer_process import PeerProcess, vllm_peer
from kvpage.benchmarks.serving_contenders import num_tokens_of
from kvpage.benchmarks.serving_workloads import Prompts, Served, Tokens, Workload, converse


class ServingPeer:
    """A process that answers prompts. hello: its first line, with its version."""

    def __init__(self, peer: PeerProcess, needs_room: bool) -> None:
        self._peer, self._needs_room, self.hello = peer, needs_room, peer.hello

    def prepare(self, workload: Workload, max_tokens: int) -> None:
        """Make room for a workload."""
        if self._needs_room:
            self._peer.ask(num_tokens=num_tokens_of(workload, max_tokens))

    def serve(self, workload: Workload, max_tokens: int) -> Served:
        """Answer all turns, from an empty cache. The seconds are the other process's own."""
        is_first = True

        def answer(prompts: Prompts) -> tuple[Tokens, float]:
            nonlocal is_first
            answers = self._peer.ask(prompts=prompts, max_tokens=max_tokens, is_first=is_first)
            is_first = False
            return answers["tokens"], answers["seconds"]

        return converse(workload, answer)


@contextmanager
def serving_peers(
    model: tf.PreTrainedModel, num_threads: int, vllm: Path | None, preload: Sequence[Path]
) -> Iterator[dict[str, ServingPeer]]:
    """Start the peers over a model's weights, and end them with the block. RuntimeError: one ended.

    vllm: an interpreter that has it; None without vLLM. preload: libraries of kvpage's own process; none without it.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        dtype, peers = str(model.dtype).removeprefix("torch."), dict[str, ServingPeer]()
        if preload or vllm:
            model.save_pretrained(folder)
        if preload:
            path = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
            arguments = [str(num_threads), folder, dtype]
            process = PeerProcess.start(Path(sys.executable), "kvpage_peer.py", arguments, preload, path)
            peers["kvpage_preloaded"] = ServingPeer(stack.enter_context(process), needs_room=True)
        if peer := stack.enter_context(vllm_peer(vllm, "serving", num_threads, folder, dtype, preloads=True)):
            peers["vllm"] = ServingPeer(peer, needs_room=False)
        yield peers
