"""Engines over tiny models whose windows have blocks of their own."""

from collections.abc import Sequence

import torch
import transformers as tf
from support.engines import PATIENCE
from support.family_configs import make_config
from support.models import make_model
from support.state_engines import finished, greedy

from kvpage import CacheConfig
from kvpage._C import BlockPool
from kvpage.serving import Engine, EngineConfig

B = 4
KINDS = "cohere2", "gemma2", "gemma3", "gpt_oss", "mistral"  # the last one without full layers


def make_window_model(kind: str) -> tf.PreTrainedModel:
    """A tiny model in which some layers, or all of them, attend over WINDOW tokens."""
    if kind != "cohere2":
        return make_model(kind)
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(make_config(kind)).eval()


def make_engine(
    model: tf.PreTrainedModel,
    num_blocks: int = 96,
    num_window_blocks: int | None = 64,
    num_host_blocks: int = 0,
    **fields,
) -> Engine:
    """An engine whose blocks are poisoned. num_window_blocks: None for one table of all layers."""
    cache = CacheConfig(B, num_blocks, num_cpu_blocks=num_host_blocks)
    config = EngineConfig(cache, num_window_blocks=num_window_blocks, **{"max_num_seqs": 4, **PATIENCE, **fields})
    engine = Engine.from_model(model, config)
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    """Fill with NaN what belongs to nobody: free blocks of windows and of the table, on the device and on the host."""
    manager = engine.manager
    windows = [window.blocks for window in manager.windows]
    for blocks, cache in zip(windows, engine.window_caches, strict=True):
        blocks.do_moves(cache.do_move)
        _fill(cache.gpu_cache, blocks.pool)
        _fill(cache.cpu_cache, blocks.host_pool)
    if not manager.space.has_moves:
        _fill(engine.cache.gpu_cache, manager.pool)
        _fill(engine.cache.cpu_cache, manager.space.host_pool)


def _fill(layers: Sequence[torch.Tensor], pool: BlockPool) -> None:
    free = [block for block in range(pool.num_blocks) if not pool.ref_count(block)]
    for layer in layers:  # [2, num_blocks, ...]
        layer[:, free] = torch.nan


def ask(engine: Engine, prompt: Sequence[int], num_tokens: int, **arguments) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt were cached. What nobody owns is poisoned before each step."""
    engine.add_request(list(prompt), greedy(num_tokens), **arguments)
    output = None
    while engine.has_unfinished:
        poison(engine)
        output = next((one.output for one in engine.step() if one.output is not None), None)
    return output.samples[0].token_ids, output.num_cached_tokens


def check_nothing_held(engine: Engine) -> None:
    """Each block is free or cached."""
    engine.manager.check()
    for stats in engine.stats().windows:
        assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks


__all__ = [
    "KINDS",
    "B",
    "ask",
    "check_nothing_held",
    "finished",
    "greedy",
    "make_engine",
    "make_window_model",
    "poison",
]
