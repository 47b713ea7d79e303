"""The contenders of bench_serving: kvpage, and transformers' own ways over the same model."""

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from kvpage.benchmarks.hf_ways import batched_tokens_of, generation, has_batches, padded
from kvpage.benchmarks.serving_workloads import (
    BATCHED_TOKENS,
    BLOCK_SIZE,
    Prompts,
    Served,
    Tokens,
    Workload,
    converse,
    engine_for,
)
from kvpage.serving import SamplingParams

Contender = Callable[[], Served]
Answer = Callable[[Prompts], Tokens]


class KVPageServer:
    """An engine with room for a workload."""

    def __init__(self, model: tf.PreTrainedModel, num_tokens: int) -> None:
        """Args: num_tokens: of all requests together, at most."""
        self._engine = engine_for(model, [num_tokens], max_num_batched_tokens=BATCHED_TOKENS)

    def answer(self, prompts: Prompts, max_tokens: int) -> Tokens:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return [output.token_ids for output in self._engine.generate(prompts, params)]

    def forget(self) -> None:
        """Empty the cache."""
        self._engine.reset_prefix_cache()


def num_tokens_of(workload: Workload, max_tokens: int) -> int:
    """Return the tokens of all requests at the end, without sharing, each in whole blocks."""
    return sum(len(tokens) + max_tokens + BLOCK_SIZE for prompts in workload.turns for tokens in prompts)


def generate(model: Any, num_shared: int, max_tokens: int) -> Answer:
    """One left-padded batch a turn, from its first token on."""
    return lambda prompts: padded(model, prompts, generation(max_tokens))


def generate_kept(model: Any, num_shared: int, max_tokens: int) -> Answer:
    """One batch a turn, whose DynamicCache is kept from turn to turn. All prompts of a turn have one length."""
    cache = tf.DynamicCache()
    return lambda prompts: padded(model, prompts, generation(max_tokens), cache)


def generate_prefix(model: Any, num_shared: int, max_tokens: int) -> Answer:
    """One batch over one prefix: its cache is computed once and repeated; the tails are padded on their left."""

    def answer(prompts: Prompts) -> Tokens:
        cache = prefill(model, prompts[0][:num_shared])
        cache.batch_repeat_interleave(len(prompts))
        return padded(model, prompts, generation(max_tokens), cache, num_shared)

    return answer


def generate_copies(model: Any, num_shared: int, max_tokens: int) -> Answer:
    """One request after the other, each over the prefix's cache, whose tensors all of them read."""

    def answer(prompts: Prompts) -> Tokens:
        cache, config = prefill(model, prompts[0][:num_shared]), generation(max_tokens)
        return [padded(model, [prompt], config, shared_copy(cache))[0] for prompt in prompts]

    return answer


def generate_batch(model: Any, num_shared: int, max_tokens: int) -> Answer:
    """Continuous batching over a paged cache."""
    return lambda prompts: batched_tokens_of(model, prompts, generation(max_tokens))


def prefill(model: tf.PreTrainedModel, tokens: list[int]) -> tf.DynamicCache:
    cache = tf.DynamicCache()
    with torch.no_grad():
        model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
    return cache


def shared_copy(cache: tf.DynamicCache) -> tf.DynamicCache:
    """Return a cache over the same tensors. It grows by concatenation, so none of them is written."""
    shared = copy.copy(cache)
    shared.layers = [copy.copy(layer) for layer in cache.layers]
    return shared


def local_contenders(model: tf.PreTrainedModel, workload: Workload, max_tokens: int) -> dict[str, Contender]:
    """Return those that run in this process, by name. Each begins with what it keeps from turn to turn."""
    server = KVPageServer(model, num_tokens_of(workload, max_tokens))

    def kvpage(model: Any, num_shared: int, max_tokens: int) -> Answer:
        server.forget()
        return functools.partial(server.answer, max_tokens=max_tokens)

    ways: list[Callable[[Any, int, int], Answer]] = [kvpage, generate]
    ways += [generate_prefix, generate_copies] if workload.prefix_len else []
    ways += [generate_kept] if len(workload.turns) > 1 else []
    ways += [generate_batch] if has_batches() else []

    def serve(way: Callable[[Any, int, int], Answer]) -> Served:
        answer = way(model, workload.prefix_len, max_tokens)

        def timed(prompts: Prompts) -> tuple[Tokens, float]:
            before = time.perf_counter()
            tokens = answer(prompts)
            return tokens, time.perf_counter() - before

        return converse(workload, timed)

    return {way.__name__: functools.partial(serve, way) for way in ways}
