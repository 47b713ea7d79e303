"""Serves prompts through kvpage in a process of its own, with libraries preloaded: started by bench_serving.

It reads and answers lines as vllm_peer.py does, but for the room that the first line asks for, {"num_tokens": int}.

    LD_PRELOAD=... python benchmarks/kvpage_peer.py NUM_THREADS MODEL_DIR DTYPE
"""

import sys
import time
from typing import Any

import torch

import kvpage
from kvpage.benchmarks.peer_answers import answer_lines
from kvpage.benchmarks.serve_model import load_model
from kvpage.benchmarks.serving_contenders import KVPageServer


def main() -> None:
    num_threads, folder, dtype = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    model = load_model(folder, getattr(torch, dtype))
    servers: dict[str, KVPageServer] = {}

    def answer(num_tokens: int = 0, **asked: Any) -> dict[str, Any]:
        if num_tokens:
            servers["last"] = KVPageServer(model, num_tokens)
            return {}
        if asked["is_first"]:
            servers["last"].forget()
        before = time.perf_counter()
        tokens = servers["last"].answer(asked["prompts"], asked["max_tokens"])
        return {"seconds": time.perf_counter() - before, "tokens": tokens}

    answer_lines(sys.stdout, {"kvpage": kvpage.__version__}, answer)


if __name__ == "__main__":
    main()
