"""Serves prompts through kvpage in a process of its own, with libraries preloaded: started by bench_serving.

It reads and answers lines as vllm_peer.py does, but for the room that the first line asks for, {"num_tokens": int}.

    LD_PRELOAD=... python benchmarks/kvpage_peer.py MODEL_DIR NUM_THREADS DTYPE
"""

import sys
import time
from typing import Any

import torch
import transformers as tf

import kvpage
from kvpage.benchmarks.peer_answers import answer_lines
from kvpage.benchmarks.serving_contenders import KVPageServer


def main() -> None:
    folder, num_threads, dtype = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    tf.logging.set_verbosity_error()
    tf.utils.logging.disable_progress_bar()
    model = tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
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
