"""Pools and calls of `model.generate` for the tests of KVPageCache, over tiny models that are made once."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import transformers as tf
from support.insides import cached_rows
from support.models import COMMON, CONFIGS, make_model

from kvpage import CacheConfig
from kvpage.serving import KVPageCache, KVPageCachePool

B = 4
NEW = 10
KINDS = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "deepseek_v2", "deepseek_v3"]
LAYOUTS = [
    {"backend": backend, "kv_layout": kv_layout, "layer_layout": layer_layout}
    for backend, kv_layout in (
        ("flash", "NHD"), ("flash", "HND"), ("flashinfer", "NHD"), ("flashinfer", "HND"), ("paged", "NHD"),
    )
    for layer_layout in ("separate", "packed")
]  # fmt: skip


@functools.cache
def model_of(kind: str) -> tf.PreTrainedModel:
    if kind in CONFIGS:
        return make_model(kind)
    torch.manual_seed(0)
    config = tf.DeepseekV2Config(
        **{**COMMON, "num_key_value_heads": 4}, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy",
    )  # fmt: skip
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


@functools.cache
def hands_latents(kind: str) -> bool:
    """Return whether this version's model gives its cache latents: one head, of other sizes than the attention's."""
    model = model_of(kind)
    if not hasattr(model.config, "kv_lora_rank"):
        return False
    shapes = []

    class Seen(tf.DynamicCache):
        def update(self, key_states: torch.Tensor, *args: object, **kwargs: object) -> object:
            shapes.append(tuple(key_states.shape))
            return super().update(key_states, *args, **kwargs)

    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), past_key_values=Seen(), use_cache=True)
    return shapes[0] == (1, 1, 3, model.config.kv_lora_rank)


def make_pool(
    kind: str,
    num_blocks: int = 64,
    num_host_blocks: int = 0,
    max_working_bytes: int | None = None,
    **fields: object,
) -> KVPageCachePool:
    """A pool whose blocks hold NaN where nothing has been written. fields: of its CacheConfig."""
    if hands_latents(kind):
        fields["backend"] = "mla"
    config = CacheConfig(block_size=B, num_gpu_blocks=num_blocks, num_cpu_blocks=num_host_blocks, **fields)
    pool = KVPageCachePool.from_model(model_of(kind), config, max_working_bytes=max_working_bytes)
    if not pool.engine.layout.has_token_scales:
        for cache in (*pool.engine.gpu_cache, *pool.engine.cpu_cache):
            cache.fill_(float("nan"))
    return pool


def rows_of(*prompts: list[int]) -> torch.Tensor:
    return torch.tensor(prompts)


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and their mask."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def generate(kind: str, ids: torch.Tensor, cache: KVPageCache | None = None, **options: object) -> torch.Tensor:
    """Return the tokens of `model.generate`. Those without a cache are computed once for all tests of a run."""
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **options}
    if cache is not None:
        return _generated(kind, ids, past_key_values=cache, **options)
    mask = options.pop("attention_mask")
    rows, shown = (tuple(map(tuple, given.tolist())) for given in (ids, mask))
    return _generated_without_cache(kind, rows, shown, tuple(sorted(options.items()))).clone()


@functools.cache
def _generated_without_cache(kind: str, rows: tuple, shown: tuple, options: tuple) -> torch.Tensor:
    return _generated(kind, torch.tensor(rows), attention_mask=torch.tensor(shown), **dict(options))


def _generated(kind: str, ids: torch.Tensor, **options: object) -> torch.Tensor:
    torch.manual_seed(1)
    return model_of(kind).generate(ids, pad_token_id=0, **options)


@contextmanager
def counted(kind: str) -> Iterator[list[int]]:
    """Return the tokens of each forward: rows times columns of the embedding's argument."""
    counts: list[int] = []
    embedding = model_of(kind).get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    yield counts
    hook.remove()


def check_drained(pool: KVPageCachePool) -> None:
    pool.manager.check()
    assert pool.manager.stats().num_used_blocks == 0
    assert not has_hooks(pool.model)


def has_hooks(model: tf.PreTrainedModel) -> bool:
    return any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def count_calls(cache: KVPageCache, name: str) -> list[tuple]:
    calls: list[tuple] = []
    method = getattr(cache, name)
    setattr(cache, name, lambda *args: (calls.append(args), method(*args)))
    return calls


def logits_of(kind: str, ids: torch.Tensor, cache: tf.Cache | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model_of(kind)(ids, past_key_values=cache).logits


def state(cache: KVPageCache) -> tuple:
    pool, rows = cache._pool, cached_rows(cache)
    kept = [(row.seq_id, row.is_private, pool.manager.block_ids(row.seq_id).tolist()) for row in rows._rows]
    return rows.length, rows._tokens.tolist(), kept, pool.manager.stats().num_used_blocks


def raises(error: type) -> Callable[[torch.nn.Module, tuple], None]:
    def hook(module: torch.nn.Module, args: tuple) -> None:
        raise error("broken")

    return hook


def broken(module: torch.nn.Module, args: tuple) -> None:
    raise RuntimeError("broken")
