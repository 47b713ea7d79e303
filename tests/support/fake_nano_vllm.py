"""Modules with the names of nano-vllm that examples/nano_vllm.py uses, written for tests.

fake_nano_vllm.installed(monkeypatch)      import nanovllm.engine.llm_engine, ...
"""

import enum
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn

NAMES = ("engine", "engine.llm_engine", "models", "models.qwen3", "utils", "utils.context", "utils.loader")


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class FakeSequence:
    """As nanovllm.engine.sequence.Sequence."""

    ids = itertools.count()

    def __init__(self, token_ids: list[int], params: SimpleNamespace) -> None:
        self.seq_id, self.status, self.token_ids = next(self.ids), Status.WAITING, list(token_ids)
        self.num_prompt_tokens, self.num_cached_tokens = len(token_ids), 0
        self.temperature, self.max_tokens, self.ignore_eos = params.temperature, params.max_tokens, params.ignore_eos

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append_token(self, token: int) -> None:
        self.token_ids.append(token)


class FakeLayer(nn.Module):
    """A layer of a Qwen3 without a rotation of its own: `turn` gives cosines and sines of positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        made = sys.modules["nanovllm.models.qwen3"]
        hidden, size = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.self_attn, self.mlp = size, nn.Module(), nn.Module()
        for name, num in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            setattr(self.self_attn, name, nn.Linear(hidden, num * size, bias=False))
        self.self_attn.o_proj = nn.Linear(heads * size, hidden, bias=False)
        self.self_attn.q_norm, self.self_attn.k_norm = (made.RMSNorm(size, config.rms_norm_eps) for _ in "qk")
        self.self_attn.attn = made.Attention(heads, size, size**-0.5, kv_heads)
        for name in ("gate_proj", "up_proj"):
            setattr(self.mlp, name, nn.Linear(hidden, config.intermediate_size, bias=False))
        self.mlp.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.input_layernorm = made.RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = made.RMSNorm(hidden, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, residual: Any, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        own, normed = self.self_attn, self.input_layernorm
        x, residual = (normed(x), x) if residual is None else normed(x, residual)
        query, key, value = (part(x).view(len(x), -1, self.size) for part in (own.q_proj, own.k_proj, own.v_proj))
        query, key = turned(own.q_norm(query), cos, sin), turned(own.k_norm(key), cos, sin)
        x = own.o_proj(own.attn(query, key, value).flatten(1))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp.down_proj(nn.functional.silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x)), residual


class FakeQwen3(nn.Module):
    """As nanovllm.models.qwen3.Qwen3ForCausalLM, with the weights' names of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.theta, self.size, self.model = config.rope_theta, config.head_dim, nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(FakeLayer(config) for _ in range(config.num_hidden_layers))
        self.model.norm = sys.modules["nanovllm.models.qwen3"].RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * self.theta ** (-torch.arange(0, self.size, 2) / self.size)
        x, residual = self.model.embed_tokens(token_ids), None
        for layer in self.model.layers:
            x, residual = layer(x, residual, angles.cos()[:, None], angles.sin()[:, None])
        return self.model.norm(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden[sys.modules["nanovllm.utils.context"].get_context().cu_seqlens_q[1:] - 1])


class FakeLLM:
    """As nanovllm.LLM."""

    def __init__(self, folder: str, **settings: Any) -> None:
        engine = sys.modules["nanovllm.engine.llm_engine"]
        config = SimpleNamespace(model=folder, hf_config=tf.AutoConfig.from_pretrained(folder), tensor_parallel_size=1)
        vars(config).update(settings, eos=-1)
        self.model_runner = engine.ModelRunner(config, 0, [])
        self.scheduler = engine.Scheduler(config)

    def generate(self, prompts: list[list[int]], params: SimpleNamespace) -> list[dict[str, Any]]:
        sequences = [FakeSequence(prompt, params) for prompt in prompts]
        for one in sequences:
            self.scheduler.add(one)
        while not self.scheduler.is_finished():
            batch, is_prefill = self.scheduler.schedule()
            self.scheduler.postprocess(batch, self.model_runner.call("run", batch, is_prefill))
        self.model_runner.call("exit")
        return [{"token_ids": one.token_ids[one.num_prompt_tokens :]} for one in sequences]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the modules in place for one test."""
    made = {name: ModuleType(f"nanovllm.{name}") for name in NAMES} | {"": ModuleType("nanovllm")}
    held: dict[str, Any] = {}
    vars(made[""]).update(LLM=FakeLLM, SamplingParams=SimpleNamespace)
    vars(made["models.qwen3"]).update(Qwen3ForCausalLM=FakeQwen3, Attention=None, RMSNorm=None)
    vars(made["engine.llm_engine"]).update(ModelRunner=None, Scheduler=None)
    made["utils.loader"].load_model = lambda model, path: model.load_state_dict(
        load_file(Path(path) / "model.safetensors")
    )
    vars(made["utils.context"]).update(
        set_context=lambda is_prefill, **fields: held.update(now=SimpleNamespace(is_prefill=is_prefill, **fields)),
        get_context=lambda: held["now"],
        reset_context=held.clear,
    )
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, f"nanovllm.{name}".rstrip("."), module)
