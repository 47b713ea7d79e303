"""Rows of `generate` over a KVPageCachePool(same_bits=True), against each row alone.

The oracle computes one row by itself, in a namespace where nothing is cached.
"""

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import transformers as tf
from support.family import make_family_model
from support.generate_pools import padded
from support.models import CONFIGS, make_model
from support.same_bits import threads

from kvpage import CacheConfig
from kvpage.serving import KVPageCache, KVPageCachePool

B, NEW = 4, 5
FRESH = map("cold {}".format, count())
Result = tuple[list[int], torch.Tensor]
"""The answer of a row, and the logits of each of its tokens."""


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> tf.PreTrainedModel:
    """A model whose answers never end."""
    model = (make_model if kind in CONFIGS else make_family_model)(kind).to(dtype)
    model.generation_config.eos_token_id = None
    return model


def pool_of(model: tf.PreTrainedModel, num_blocks: int = 200, **fields: Any) -> KVPageCachePool:
    """fields: of CacheConfig."""
    if hasattr(model.config, "kv_lora_rank"):
        fields["backend"] = "mla"
    return KVPageCachePool.from_model(model, CacheConfig(B, num_blocks, **fields), same_bits=True)


def generate(
    pool: KVPageCachePool, prompts: Sequence[list[int]], namespace: bytes = b"", **options: Any
) -> list[Result]:
    """Return the answers of prompts, that are one batch, padded on the left."""
    ids, mask = padded(list(prompts))
    with KVPageCache(pool, ids, mask, namespace) as cache:
        options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options}
        output = pool.model.generate(
            ids, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options
        )
    pool.manager.check()
    logits = torch.stack(output.logits, 1)
    return [(row.tolist(), of_row) for row, of_row in zip(output.sequences[:, ids.shape[1] :], logits, strict=True)]


def alone(pool: KVPageCachePool, prompt: list[int]) -> Result:
    (result,) = generate(pool, [prompt], next(FRESH).encode())
    return result


def check(results: list[Result], expected: list[Result]) -> None:
    assert [tokens for tokens, _ in results] == [tokens for tokens, _ in expected]
    for (_, logits), (_, of_alone) in zip(results, expected, strict=True):
        assert torch.equal(logits, of_alone)


def a_life(pool: KVPageCachePool, rng: random.Random, num_calls: int, rows_each: int = 4) -> None:
    """Calls of batches whose prompts begin like earlier ones, against each prompt alone."""
    known: list[list[int]] = []
    for _ in range(num_calls):
        prompts = []
        for _ in range(rng.randint(1, rows_each)):
            prompt = [rng.randrange(3, 190) for _ in range(rng.randint(1, 40))]
            if known and rng.random() < 0.8:
                shared = rng.choice(known)
                prompt = (shared[: rng.randint(1, len(shared))] + prompt)[:50]
            prompts.append(prompt)
            known.append(prompt)
        options = {"prefill_chunk_size": rng.randint(1, 20)} if rng.random() < 0.4 else {}
        expected = [alone(pool, prompt) for prompt in prompts]
        with threads(rng.choice([1, 2, 4])):
            check(generate(pool, prompts, **options), expected)
