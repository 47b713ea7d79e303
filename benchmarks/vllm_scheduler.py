"""vLLM's scheduler and KV manager without a model, for bench_engine_overhead: run by the Python that has vLLM.

Each line asks for one call of Calls, {"call": name, ...}, and is answered with one line. vLLM's own output goes to the
standard error.

    VENV/bin/python benchmarks/vllm_scheduler.py NUM_THREADS MODEL_DIR
"""

import gc
import time
from itertools import count
from typing import Any

from peer_answers import Answer, answer_by_vllm  # it lies beside this file

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, BATCHED_TOKENS = 16, 65536, 16384, 2048


class Calls:
    """Schedulers by name, each with requests of its own."""

    def __init__(self, folder: str) -> None:
        self._folder, self._numbers = folder, count()
        self._schedulers: dict[str, Any] = {}
        self._hasher: Any = None

    def make(self, name: str, prompts: list[list[int]], num_seqs: int) -> dict[str, float]:
        """Run num_seqs of the prompts up to their first token; the others wait."""
        scheduler = self._schedulers[name] = self._scheduler(num_seqs)
        for prompt in prompts:
            scheduler.add_request(self._request(prompt))
        while sum(request.num_output_tokens > 0 for request in scheduler.running) < num_seqs:
            self._step(scheduler)
        return {}

    def steps(self, name: str, number: int) -> dict[str, float]:
        """Seconds of a step, a mean over `number`: of the clock on the wall, and of the thread's own."""
        wall = thread = 0.0
        for _ in range(number):
            spent = self._step(self._schedulers[name])
            wall, thread = wall + spent[0], thread + spent[1]
        return {"wall": wall / number, "thread": thread / number}

    def cache(self, name: str, prompt: list[int]) -> dict[str, float]:
        """Compute a prompt, so that others find it."""
        scheduler = self._schedulers[name] = self._scheduler(8)
        request = self._request(prompt, max_tokens=1)
        scheduler.add_request(request)
        while not request.is_finished():
            self._step(scheduler)
        return {}

    def admit(self, name: str, prompt: list[int]) -> dict[str, float]:
        """Seconds from a list of token ids to a scheduled request; and how many of its tokens were found."""
        from vllm.v1.request import RequestStatus

        scheduler = self._schedulers[name]
        before, own = time.perf_counter(), time.thread_time()
        request = self._request(prompt)
        scheduler.add_request(request)
        scheduled = scheduler.schedule()
        thread, wall = time.thread_time() - own, time.perf_counter() - before
        num_cached = scheduled.scheduled_new_reqs[0].num_computed_tokens
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        scheduler.schedule()
        return {"wall": wall, "thread": thread, "num_cached": num_cached}

    def _step(self, scheduler: Any) -> tuple[float, float]:
        """Schedule, make up an output (not timed), update. Return the seconds: on the wall, and the thread's own."""
        from vllm.v1.outputs import ModelRunnerOutput

        begin, own = time.perf_counter(), time.thread_time()
        scheduled = scheduler.schedule()
        thread, wall = time.thread_time() - own, time.perf_counter() - begin
        requests = [scheduler.requests[name] for name in scheduled.num_scheduled_tokens]
        is_done = [request.num_computed_tokens >= request.num_tokens for request in requests]
        output = ModelRunnerOutput(
            req_ids=[request.request_id for request in requests],
            req_id_to_index={request.request_id: index for index, request in enumerate(requests)},
            sampled_token_ids=[[7] if done else [] for done in is_done],
        )
        begin, own = time.perf_counter(), time.thread_time()
        scheduler.update_from_output(scheduled, output)
        thread, wall = thread + time.thread_time() - own, wall + time.perf_counter() - begin
        return wall, thread

    def _request(self, prompt: list[int], max_tokens: int = MAX_MODEL_LEN) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            max_tokens=min(max_tokens, MAX_MODEL_LEN - len(prompt)), temperature=0, ignore_eos=True, detokenize=False
        )
        return Request(str(next(self._numbers)), prompt, params, None, block_hasher=self._hasher)

    def _scheduler(self, max_num_seqs: int) -> Any:
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        model = ModelConfig(
            model=self._folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, seed=0
        )
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=BATCHED_TOKENS, max_model_len=MAX_MODEL_LEN,
                enable_chunked_prefill=True, is_encoder_decoder=False,
            ),
        )  # fmt: skip
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        blocks = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        if self._hasher is None:
            hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        return Scheduler(config, blocks, StructuredOutputManager(config), BLOCK_SIZE)


def make(folder: str) -> Answer:
    calls = Calls(folder)

    def answer(call: str, **asked: Any) -> dict[str, float]:
        gc.collect()
        gc.disable()
        try:
            return getattr(calls, call)(**asked)
        finally:
            gc.enable()

    return answer


if __name__ == "__main__":
    answer_by_vllm(make)
