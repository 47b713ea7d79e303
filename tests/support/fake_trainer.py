"""The part of TRL's GRPOTrainer that rollouts use, over any model and without TRL."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import transformers as tf


class FakeAccelerator:
    """As accelerate's Accelerator, of one process. Counts how often its autocast was entered."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(deepspeed_plugin=None)
        self.num_autocasts = 0

    def unwrap_model(self, model: Any) -> Any:
        return getattr(model, "wrapped", model)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        self.num_autocasts += 1
        yield


class FakeTrainer:
    """As a GRPOTrainer: prompts are texts of token ids, such as "3 14 15"."""

    def __init__(self, model: tf.PreTrainedModel, eos_token_ids: list[int] | None = None, **generation: Any) -> None:
        self.accelerator = FakeAccelerator()
        self.model_wrapped = SimpleNamespace(wrapped=model)
        self.use_vllm = self.use_transformers_continuous_batching = self.is_fsdp_enabled = False
        self.temperature = generation.get("temperature", 1.0)
        self.eos_token_ids = eos_token_ids or []
        settings = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": eos_token_ids}
        self.generation_config = tf.GenerationConfig(**{**settings, **generation})

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], Any, dict[str, Any]]:
        return [[int(word) for word in prompt.split()] for prompt in prompts], None, {}


@torch.no_grad()
def change_weights(model: tf.PreTrainedModel, seed: int) -> None:
    """Change all weights in place, as an optimiser does."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=generator)
