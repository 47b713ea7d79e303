"""The contenders of bench_serving: kvpage, and transformers' own ways over the same model."""

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from kvpage import CacheConfig
from kvpage.benchmarks.hf_ways import batched_tokens_of, generation, has_batches, padded
from kvpage.benchmarks.serving_workloads import BATCHED_TOKENS, BLOCK_SIZE, Prompts, Served, Tokens, Workload, converse
from kvpage.serving import Engine, EngineConfig, SamplingParams

Contender = Callable[[], Served]


class KVPageServer:
    """An engine with room for a workload."""

    def __init__(self, model: tf.PreTrainedModel, num_tokens: int) -> None:
        """Args: num_tokens: of all requests together, at most."""
        config = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_tokens // BLOCK_SIZE)
        self._engine = Engine.from_model(model, EngineConfig(config, max_num_batched_tokens=BATCHED_TOKENS))

    def answer(self, prompts: Prompts, max_tokens: int) -> Tokens:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return [output.token_ids for output in self._engine.generate(prompts, params)]

    def forget(self) -> None:
        """Empty the cache."""
        self._engine.reset_prefix_cache()


def num_tokens_of(workload: Workload, max_tokens: int) -> int:
    """Return the tokens of all requests at the end, without sharing, each in whole blocks."""
    inputs = (len(tokens) + max_tokens + BLOCK_SIZE for prompts in workload.turns for tokens in prompts)
    return sum(inputs)


def in_time(answer: Callable[[Prompts], Tokens]) -> Callable[[Prompts], tuple[Tokens, float]]:
    """Return the same with its seconds."""

    def timed(prompts: Prompts) -> tuple[Tokens, float]:
        before = time.perf_counter()
        tokens = answer(prompts)
        return tokens, time.perf_counter() - before

    return timed


def serve_kvpage(server: KVPageServer, workload: Workload, max_tokens: int) -> Served:
    server.forget()
    return converse(workload, in_time(functools.partial(server.answer, max_tokens=max_tokens)))


def serve_generate(model: Any, workload: Workload, max_tokens: int) -> Served:
    """One left-padded batch a turn, from its first token on."""
    return converse(workload, in_time(lambda prompts: padded(model, prompts, generation(max_tokens))))


def serve_generate_kept(model: Any, workload: Workload, max_tokens: int) -> Served:
    """One batch a turn, whose DynamicCache is kept from turn to turn. All prompts of a turn have one length."""
    cache = tf.DynamicCache()
    return converse(workload, in_time(lambda prompts: padded(model, prompts, generation(max_tokens), cache)))


def serve_generate_prefix(model: Any, workload: Workload, max_tokens: int) -> Served:
    """One batch over one prefix: its cache is computed once and repeated; the tails are padded on their left."""
    num_shared = workload.prefix_len

    def answer(prompts: Prompts) -> Tokens:
        cache = prefill(model, prompts[0][:num_shared])
        cache.batch_repeat_interleave(len(prompts))
        return padded(model, prompts, generation(max_tokens), cache, num_shared)

    return converse(workload, in_time(answer))


def serve_generate_copies(model: Any, workload: Workload, max_tokens: int) -> Served:
    """One request after the other, each over the prefix's cache, whose tensors all of them read."""

    def answer(prompts: Prompts) -> Tokens:
        cache, config = prefill(model, prompts[0][: workload.prefix_len]), generation(max_tokens)
        return [padded(model, [prompt], config, shared_copy(cache))[0] for prompt in prompts]

    return converse(workload, in_time(answer))


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


def serve_generate_batch(model: Any, workload: Workload, max_tokens: int) -> Served:
    """Continuous batching over a paged cache."""
    return converse(workload, in_time(lambda prompts: batched_tokens_of(model, prompts, generation(max_tokens))))


def local_contenders(model: tf.PreTrainedModel, workload: Workload, max_tokens: int) -> dict[str, Contender]:
    """Return those that run in this process, by name."""
    server = KVPageServer(model, num_tokens_of(workload, max_tokens))
    found: dict[str, Contender] = {"kvpage": functools.partial(serve_kvpage, server, workload, max_tokens)}
    ways = {"generate": serve_generate}
    if workload.prefix_len:
        ways |= {"generate_prefix": serve_generate_prefix, "generate_copies": serve_generate_copies}
    if len(workload.turns) > 1:
        ways["generate_kept"] = serve_generate_kept
    if has_batches():
        ways["generate_batch"] = serve_generate_batch
    return found | {name: functools.partial(way, model, workload, max_tokens) for name, way in ways.items()}
