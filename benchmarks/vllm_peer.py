"""vLLM as a peer of several benchmarks: run by the Python that has vLLM, it answers a line of JSON with a line of JSON.

    VENV/bin/python benchmarks/vllm_peer.py KIND NUM_THREADS [ARGUMENT ...]

vLLM's own output goes to the standard error.
"""

import gc
import sys
import time
from functools import lru_cache
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from peer_answers import Answer, answer_lines, own_output  # it lies beside this file

ATTENTION_BLOCK = 128  # as its engine makes it
NUM_GENERATED = 64  # tokens of each sampled row before
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, BATCHED_TOKENS = 16, 65536, 16384, 2048  # of the scheduler


class AttentionStep:
    """The same step as bench_attention_steps.Step, over a cache as vLLM packs it."""

    def __init__(
        self, lengths: list[int], queries: list[int], shared: int, shape: list[int], dtype: str, threads: int
    ) -> None:
        from vllm import _custom_ops as vllm_ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        torch.set_num_threads(threads)
        self.ops, self.lengths, self.counts = vllm_ops, lengths, queries
        heads, group, size = shape
        kind = getattr(torch, dtype)
        self.isa = _get_attn_isa(kind, ATTENTION_BLOCK, size)
        first = shared // ATTENTION_BLOCK
        num_others = [-(-n // ATTENTION_BLOCK) - first for n in lengths]
        ids = torch.randperm(first + sum(num_others)).to(torch.int32)
        self.tables = torch.zeros(len(num_others), first + max(num_others), dtype=torch.int32)
        self.tables[:, :first] = ids[:first]
        for table, others in zip(self.tables, ids[first:].split(num_others), strict=True):
            table[first : first + len(others)] = others
        self.query = torch.randn(sum(queries), heads * group, size).to(kind)
        self.out, self.scale = torch.empty_like(self.query), size**-0.5
        self.rows = torch.randn(2, len(ids) * ATTENTION_BLOCK, heads, size).to(kind)
        cache = torch.zeros(len(ids), heads, ATTENTION_BLOCK * 2, size, dtype=kind)
        self.key, self.value = cache.chunk(2, dim=2)
        slots = torch.arange(len(ids) * ATTENTION_BLOCK)
        vllm_ops.cpu_attn_reshape_and_cache(self.rows[0], self.rows[1], self.key, self.value, slots, self.isa)
        self.starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.plan = vllm_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths), num_heads=heads * group, num_kv_heads=heads, head_dim=size,
            seq_lens=self.seq_lens, dtype=kind, query_start_loc=self.starts, causal=True, sliding_window_size=-1,
            isa=self.isa, enable_kv_split=True,
        )  # fmt: skip

    def attend(self) -> float:
        begin = time.perf_counter()
        self.ops.cpu_attention_with_kv_cache(
            query=self.query, key_cache=self.key, value_cache=self.value, output=self.out,
            query_start_loc=self.starts, seq_lens=self.seq_lens, scale=self.scale, causal=True, alibi_slopes=None,
            sliding_window=-1, block_table=self.tables, softcap=0, scheduler_metadata=self.plan, s_aux=None,
        )  # fmt: skip
        return time.perf_counter() - begin

    def check(self) -> None:
        """Compare the last sequence's first and last query with torch's own attention."""
        self.attend()
        length, num_queries = self.lengths[-1], self.counts[-1]
        slots = (self.tables[-1].long()[:, None] * ATTENTION_BLOCK + torch.arange(ATTENTION_BLOCK)).flatten()[:length]
        for query in (num_queries - 1, 0):
            keys = length - num_queries + query + 1
            key, value = (rows[slots[:keys]].transpose(0, 1).float() for rows in self.rows)
            asked = self.query[len(self.query) - num_queries + query].float().unsqueeze(1)
            want = F.scaled_dot_product_attention(asked[None], key[None], value[None], enable_gqa=True)[0, :, 0]
            got = self.out[len(self.query) - num_queries + query].float()
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def attention() -> Answer:
    """A line with a step makes and checks it, and names its instructions; an empty one runs the last step."""
    steps: list[AttentionStep] = []

    def answer(**asked: Any) -> dict[str, Any]:
        if not asked:
            return {"seconds": steps[-1].attend()}
        steps[:] = [AttentionStep(**asked)]
        steps[-1].check()
        return {"isa": steps[-1].isa}

    return answer


def linear() -> Answer:
    """oneDNN products on packed weights: the seconds of each round."""
    import vllm._custom_ops as custom

    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def answer(rows: int, columns: int, size: int, dtype: str, number: int, rounds: int) -> dict[str, list[float]]:
        x, w = (torch.randn(num, size).to(getattr(torch, dtype)) for num in (rows, columns))
        handler = custom.create_onednn_mm(w.t())
        custom.onednn_mm(handler, x, None)
        seconds = []
        for _ in range(rounds):
            before = clock()
            for _ in range(number):
                custom.onednn_mm(handler, x, None)
            seconds.append((clock() - before) / number)
        return {"seconds": seconds}

    return answer


def serving(folder: str, dtype: str) -> Answer:
    """Prompts through an LLM. The first line of a run empties the prefix cache."""
    import vllm

    llm = vllm.LLM(
        folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, enable_prefix_caching=True,
        max_model_len=2048, max_num_batched_tokens=2048, max_num_seqs=256, disable_log_stats=True,
    )  # fmt: skip

    def answer(prompts: list[list[int]], max_tokens: int, is_first: bool) -> dict[str, Any]:
        params = vllm.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        if is_first:
            llm.reset_prefix_cache()
        before = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - before
        return {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    return answer


def sampler() -> Answer:
    """The sampler. Rows have no seeds of their own: with seeds it draws row by row, and is slower."""
    from vllm.v1.sample.sampler import Sampler

    sample = Sampler()
    logits_of = lru_cache(1)(lambda num_rows, vocab_size: torch.randn(num_rows, vocab_size) * 2)

    def answer(num_rows: int, vocab_size: int, rules: dict[str, float], prompt: int) -> dict[str, float]:
        logits = logits_of(num_rows, vocab_size).clone()  # it changes them in place
        metadata = _sampling_metadata(num_rows, vocab_size, rules, prompt)
        before = time.perf_counter()
        with torch.inference_mode():
            sample(logits, metadata)
        return {"seconds": time.perf_counter() - before}

    return answer


def _sampling_metadata(num_rows: int, vocab_size: int, rules: dict[str, float], prompt: int) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    def of_all(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), rules.get(name, default), dtype=dtype)

    is_greedy = not rules.get("temperature")
    has_penalties = any("penalty" in name for name in rules)
    return SamplingMetadata(
        temperature=None if is_greedy else of_all("temperature", 0), all_greedy=is_greedy, all_random=not is_greedy,
        top_p=of_all("top_p", 1) if "top_p" in rules else None,
        top_k=of_all("top_k", 0, torch.int32) if "top_k" in rules else None,
        generators={}, max_num_logprobs=None, no_penalties=not has_penalties,
        prompt_token_ids=torch.randint(vocab_size, (num_rows, prompt)) if has_penalties else None,
        frequency_penalties=of_all("frequency_penalty", 0), presence_penalties=of_all("presence_penalty", 0),
        repetition_penalties=of_all("repetition_penalty", 1),
        output_token_ids=torch.randint(vocab_size, (num_rows, NUM_GENERATED)).tolist(),
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip


class SchedulerCalls:
    """Schedulers with their KV managers, without a model, by name; each has requests of its own."""

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
        """Return the seconds of a step, a mean over `number`."""
        spent = [self._step(self._schedulers[name]) for _ in range(number)]
        wall, thread = (sum(column) / number for column in zip(*spent, strict=True))
        return {"wall": wall, "thread": thread}

    def cache(self, name: str, prompt: list[int]) -> dict[str, float]:
        """Compute a prompt, so that others find it."""
        scheduler = self._schedulers[name] = self._scheduler(8)
        request = self._request(prompt, max_tokens=1)
        scheduler.add_request(request)
        while not request.is_finished():
            self._step(scheduler)
        return {}

    def admit(self, name: str, prompt: list[int]) -> dict[str, float]:
        """Return the seconds from token ids to a scheduled request, and the number of its cached tokens."""
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
        return wall + time.perf_counter() - begin, thread + time.thread_time() - own

    def _request(self, prompt: list[int], max_tokens: int = MAX_MODEL_LEN) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        most = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, detokenize=False)
        return Request(str(next(self._numbers)), prompt, params, None, block_hasher=self._hasher)

    def _scheduler(self, max_num_seqs: int) -> Any:
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = VllmConfig(
            model_config=ModelConfig(
                model=self._folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, seed=0
            ),
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


def scheduler(folder: str) -> Answer:
    """Each line asks for a method of SchedulerCalls: {"call": name, ...}."""
    calls = SchedulerCalls(folder)

    def answer(call: str, **asked: Any) -> dict[str, float]:
        gc.collect()
        gc.disable()
        try:
            return getattr(calls, call)(**asked)
        finally:
            gc.enable()

    return answer


class StateScheduler:
    """A scheduler with its KV manager, without a model, of one group of layers that attend and one with states.

    States are kept as by default: "align", at borders of blocks where a step ends. unit: tokens of a hash; None for a
    block.
    """

    def __init__(self, folder: str, block_size: int, unit: int | None, num_blocks: int) -> None:
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = VllmConfig(
            model_config=ModelConfig(
                model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, seed=0
            ),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True, prefix_match_unit=unit),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=BATCHED_TOKENS, max_model_len=MAX_MODEL_LEN,
                enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
            ),
        )  # fmt: skip
        cache = config.cache_config
        cache.num_gpu_blocks, cache.block_size = num_blocks, block_size
        cache.mamba_cache_mode, cache.mamba_block_size = "align", block_size
        rows = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        states = MambaSpec(
            block_size=block_size, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode="align",
            page_size_padded=rows.page_size_bytes,
        )  # fmt: skip
        blocks = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["rows"], rows), KVCacheGroupSpec(["states"], states)])
        scheduled, hashed = resolve_kv_cache_block_sizes(blocks, config)
        cache.hash_block_size = hashed
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hashed, sha256)
        self._scheduler = Scheduler(
            config, blocks, StructuredOutputManager(config), block_size=scheduled, hash_block_size=hashed
        )
        self._numbers = count()

    def serve(self, prompt: list[int], answer: list[int]) -> int:
        """Return how many of a prompt's tokens were found. The answer is computed, token by token."""
        from vllm import SamplingParams
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        name = str(next(self._numbers))
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True, detokenize=False)
        request = Request(name, prompt, params, None, block_hasher=self._hasher)
        self._scheduler.add_request(request)
        num_cached, num_done = -1, 0
        while self._scheduler.has_unfinished_requests():
            scheduled = self._scheduler.schedule()
            if num_cached < 0:
                num_cached = scheduled.scheduled_new_reqs[0].num_computed_tokens
            is_done = request.num_computed_tokens >= len(prompt) + num_done
            tokens = [answer[num_done]] if is_done else []
            num_done += is_done
            output = ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=[tokens])
            self._scheduler.update_from_output(scheduled, output)
        return num_cached


def states(folder: str) -> Answer:
    """Each line is a trace: prompts and answers, one after the other. The tokens found of each prompt."""

    def answer(
        prompts: list[list[int]], answers: list[list[int]], block_size: int, unit: int | None
    ) -> dict[str, list[int]]:
        num_tokens = sum(map(len, prompts)) + sum(map(len, answers))
        scheduler = StateScheduler(folder, block_size, unit, num_tokens // block_size * 3 + 64 * len(prompts))
        return {"found": [scheduler.serve(*pair) for pair in zip(prompts, answers, strict=True)]}

    return answer


KINDS = {make.__name__: make for make in (attention, linear, serving, sampler, scheduler, states)}


def main() -> None:
    answers = own_output()
    kind, num_threads, *arguments = sys.argv[1:]
    import vllm

    torch.set_num_threads(int(num_threads))
    answer_lines(answers, {"vllm": vllm.__version__}, KINDS[kind](*arguments))


if __name__ == "__main__":
    main()
