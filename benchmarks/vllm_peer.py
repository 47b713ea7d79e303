"""Serves prompts through vLLM's CPU build, for bench_serving: run by the Python that vLLM is installed for.

Reads one line of JSON a call, {"prompts": [[token id]], "max_tokens": int, "is_first": bool}, and answers with one,
{"seconds": float, "tokens": [[token id]]}. The first call of a run empties the prefix cache. vLLM's own output goes to
the standard error.

    VENV/bin/python benchmarks/vllm_peer.py MODEL_DIR NUM_THREADS DTYPE
"""

import os
import sys
import time
from typing import Any

from peer_answers import answer_lines, own_output  # it lies beside this file


def main() -> None:
    folder, num_threads, dtype = sys.argv[1:]
    answers = own_output()
    os.environ |= {
        "OMP_NUM_THREADS": num_threads,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    import vllm

    llm = vllm.LLM(
        folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, enable_prefix_caching=True,
        max_model_len=2048, max_num_batched_tokens=2048, max_num_seqs=256, disable_log_stats=True,
    )  # fmt: skip

    def answer(prompts: list[list[int]], max_tokens: int, is_first: bool) -> dict[str, Any]:
        params = vllm.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        if is_first:
            llm.reset_prefix_cache()
        before = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - before
        return {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    answer_lines(answers, {"vllm": vllm.__version__}, answer)


if __name__ == "__main__":
    main()
