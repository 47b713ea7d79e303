"""Serves prompts through kvpage in a process of its own, with libraries preloaded: started by bench_serving.

It reads and answers lines as vllm_peer.py does, but for the room that the first line asks for, {"num_tokens": int}.

    LD_PRELOAD=... python benchmarks/kvpage_peer.py MODEL_DIR NUM_THREADS DTYPE
"""

import json
import sys
import time

import torch
import transformers as tf

import kvpage
from kvpage.benchmarks.serving_contenders import KVPageServer


def main() -> None:
    folder, num_threads, dtype = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    tf.logging.set_verbosity_error()
    tf.utils.logging.disable_progress_bar()
    model = tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    print(json.dumps({"kvpage": kvpage.__version__}), flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        if "num_tokens" in given:
            server = KVPageServer(model, given["num_tokens"])
            print(json.dumps({}), flush=True)
            continue
        if given["is_first"]:
            server.forget()
        before = time.perf_counter()
        tokens = server.answer(given["prompts"], given["max_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - before, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
