"""Serves prompts through vLLM's CPU build, for bench_serving: run by the Python that vLLM is installed for.

Reads one line of JSON a call, {"prompts": [[token id]], "max_tokens": int, "is_first": bool}, and answers with one,
{"seconds": float, "tokens": [[token id]]}. The first call of a run empties the prefix cache. vLLM's own output goes to
the standard error.

    VENV/bin/python benchmarks/vllm_peer.py NUM_THREADS MODEL_DIR DTYPE
"""

import time
from typing import Any

from peer_answers import Answer, answer_by_vllm  # it lies beside this file

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def make(folder: str, dtype: str) -> Answer:
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

    return answer


if __name__ == "__main__":
    answer_by_vllm(make, **ENVIRONMENT)
