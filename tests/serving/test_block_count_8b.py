"""As many blocks as fit beside a model of 8B parameters on 24 GB: by its true shapes, on tensors without memory.

free: 24 GB less what CUDA's context takes
weights ─► steps, by a forward on the meta device ─► captures and a library, as much as they may take ─► blocks
"""

import contextlib
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from support.device_memory import LiveBytes, Memory
from transformers import LlamaConfig, LlamaForCausalLM

from kvpage import CacheConfig, CacheEngine
from kvpage.layout.config import DeviceConfig, ModelConfig
from kvpage.serving import EngineConfig
from kvpage.serving.assembly import block_count
from kvpage.serving.assembly.block_count import with_blocks
from kvpage.serving.assembly.parts import ChosenAttention, ServableModel
from kvpage.serving.loop.graphs import warmup
from kvpage.serving.model import attention
from kvpage.serving.model.runner import ModelRunner
from kvpage.serving.model.step import ModelInputs

MIB = 2**20
FREE = 24 * 10**9 - 500 * MIB
LIBRARY = 256 * MIB  # of FlashInfer's sums
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2  # K and V, layers, KV heads, elements, bf16
LLAMA_3_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    dtype=torch.bfloat16,
)


def make_servable() -> ServableModel:
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_3_8B).bfloat16().eval()
    return ServableModel(ModelRunner(model), ModelConfig.from_hf(LLAMA_3_8B), ChosenAttention(None, {}), 8)


@dataclass
class Graphs:
    """Captures that keep all that they may."""

    memory: Memory
    num_bytes: int

    def capture(self) -> None:
        self.memory.keep(self.num_bytes)

    def forget(self, reason: str) -> None:
        self.memory.used -= self.num_bytes


def let_it_run_on_numbers(patch: pytest.MonkeyPatch, memory: Memory) -> LiveBytes:
    """Replace what needs a device: steps are computed on the meta device, and take their tensors' bytes."""
    compute, inputs_of, live = block_count.prepare_steps, ModelInputs.of, LiveBytes()

    def make_cache(servable, config):
        return CacheEngine(config.cache_config, servable.config, device_config=DeviceConfig(torch.device("cpu")))

    def prepare_steps(steps, limits):
        with live:
            compute(steps, limits)
        memory.take(live.most)
        memory.beside += LIBRARY

    def attend(query, *rest):
        return query.new_empty(query.transpose(1, 2).shape)

    def graphs_of(runner, cache, capturer, config, longest):
        return Graphs(memory, config.cudagraph_max_bytes)

    for place, name, value in (
        (block_count, "is_host", lambda device: False),
        (block_count, "without_autocast", lambda device: contextlib.nullcontext()),
        (block_count, "make_cache", make_cache),
        (block_count, "prepare_steps", prepare_steps),
        (block_count, "graphs_of", graphs_of),
        (attention.ops, "write_and_attend", attend),
        (warmup, "choose_for_nobody", lambda logits: None),
        (ModelInputs, "of", lambda *of: ModelInputs(*(tensor.to("meta") for tensor in inputs_of(*of)))),
    ):
        patch.setattr(place, name, value)
    return live


def test_an_8b_model_has_blocks_of_thousands_of_tokens_on_24_gb(monkeypatch) -> None:
    servable, memory, config = make_servable(), Memory(monkeypatch, FREE), EngineConfig(CacheConfig(16))
    weights = sum(tensor.nbytes for tensor in servable.runner.model.parameters())
    assert weights == 8_030_261_248 * 2
    memory.keep(weights)
    live = let_it_run_on_numbers(monkeypatch, memory)
    num_tokens = 16 * with_blocks(servable, config, make_capturer=mock.Mock()).cache_config.num_gpu_blocks
    left = FREE - weights - live.most - LIBRARY - config.cudagraph_max_bytes
    assert num_tokens == int(left * 0.9) // (16 * TOKEN_BYTES) * 16
    assert 100 * MIB < live.most < 1000 * MIB  # a step of 2,048 tokens: no less than an MLP's rows
    assert num_tokens > 30_000
