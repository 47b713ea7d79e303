"""vLLM's sampler on a CPU, for bench_sampling: run by the Python that has vLLM.

Each line asks for one call, {"num_rows": int, "vocab_size": int, "rules": {name: number}, "prompt": int}, and is
answered with {"seconds": float}. Its rows have no seeds of their own: with seeds it draws row by row, and is slower.
vLLM's own output goes to the standard error.

    VENV/bin/python benchmarks/vllm_sampler.py NUM_THREADS
"""

import time
from functools import lru_cache
from typing import Any

from peer_answers import Answer, answer_by_vllm  # it lies beside this file

NUM_GENERATED = 64


def make_metadata(num_rows: int, vocab_size: int, rules: dict[str, float], prompt: int) -> Any:
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    def of_all(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), rules.get(name, default), dtype=dtype)

    is_greedy = not rules.get("temperature")
    has_penalties = any("penalty" in name for name in rules)
    generated = torch.randint(vocab_size, (num_rows, NUM_GENERATED))
    return SamplingMetadata(
        temperature=None if is_greedy else of_all("temperature", 0),
        all_greedy=is_greedy,
        all_random=not is_greedy,
        top_p=of_all("top_p", 1) if "top_p" in rules else None,
        top_k=of_all("top_k", 0, torch.int32) if "top_k" in rules else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=not has_penalties,
        prompt_token_ids=torch.randint(vocab_size, (num_rows, prompt)) if has_penalties else None,
        frequency_penalties=of_all("frequency_penalty", 0),
        presence_penalties=of_all("presence_penalty", 0),
        repetition_penalties=of_all("repetition_penalty", 1),
        output_token_ids=generated.tolist(),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def make() -> Answer:
    import torch
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler()
    logits_of = lru_cache(1)(lambda num_rows, vocab_size: torch.randn(num_rows, vocab_size) * 2)

    def answer(num_rows: int, vocab_size: int, rules: dict[str, float], prompt: int) -> dict[str, float]:
        logits = logits_of(num_rows, vocab_size).clone()  # it changes them in place
        metadata = make_metadata(num_rows, vocab_size, rules, prompt)
        before = time.perf_counter()
        with torch.inference_mode():
            sampler(logits, metadata)
        return {"seconds": time.perf_counter() - before}

    return answer


if __name__ == "__main__":
    answer_by_vllm(make)
