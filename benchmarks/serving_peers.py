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
        self._peer, self._needs_room = peer, needs_room
        self.hello = peer.hello

    def prepare(self, workload: Workload, max_tokens: int) -> None:
        """Make room for a workload."""
        if self._needs_room:
            self._peer.ask(num_tokens=num_tokens_of(workload, max_tokens))

    def serve(self, workload: Workload, max_tokens: int) -> Served:
        """Answer all turns, from an empty cache. The seconds are the other process's own."""
        is_first = True

        def answer(prompts: Prompts) -> tuple[Tokens, float]:
            nonlocal is_first
            said = self._peer.ask(prompts=prompts, max_tokens=max_tokens, is_first=is_first)
            is_first = False
            return said["tokens"], said["seconds"]

        return converse(workload, answer)


@contextmanager
def serving_peers(
    model: tf.PreTrainedModel, num_threads: int, vllm: Path | None, preload: Sequence[Path]
) -> Iterator[dict[str, ServingPeer]]:
    """Start the peers over a model's weights, and end them with the block. RuntimeError: one ended; its own words are
    above.

    vllm: an interpreter; None to leave it out. preload: libraries for a kvpage of its own process; none to leave it
    out.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arguments = [str(num_threads), folder, str(model.dtype).removeprefix("torch.")]
        found: dict[str, ServingPeer] = {}
        if preload or vllm:
            model.save_pretrained(folder)
        if preload:
            own = PeerProcess.start(
                Path(sys.executable), "kvpage_peer.py", arguments, preload, os.environ.get("PYTHONPATH")
            )
            found["kvpage_preloaded"] = ServingPeer(stack.enter_context(own), needs_room=True)
        if other := stack.enter_context(vllm_peer(vllm, "vllm_peer.py", *arguments, preloads=True)):
            found["vllm"] = ServingPeer(other, needs_room=False)
        yield found
