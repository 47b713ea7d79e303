"""Versions of a tiny model's weights, and the answers that each gives by itself."""

import copy
import inspect

import torch
from support.models import generate_each, make_model
from transformers import DynamicCache, PreTrainedModel

NOISE = 0.2


class WeightVersions:
    """A model whose weights change, and a copy of it that answers for any version."""

    def __init__(self, kind: str = "llama", num: int = 3, **fields: object) -> None:
        self.model = make_model(kind, **fields)
        self._oracle = copy.deepcopy(self.model)
        self.states = {"": copy.deepcopy(self.model.state_dict())}
        generator = torch.Generator().manual_seed(7)
        for number in range(1, num):
            noisy = {name: t + NOISE * torch.randn(t.shape, generator=generator) for name, t in self.states[""].items()}
            self.states[f"v{number}"] = noisy
        self._answers: dict[tuple, list[int]] = {}

    def load(self, version: str) -> None:
        """Change the model's weights in place."""
        self.model.load_state_dict(self.states[version])

    def of(self, version: str) -> PreTrainedModel:
        self._oracle.load_state_dict(self.states[version])
        return self._oracle

    def answer(self, version: str, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the greedy tokens of a fresh model with these weights."""
        key = version, tuple(prompt), num_tokens
        if key not in self._answers:
            tokens = generate_each(self.of(version), [prompt], num_tokens)[0] if num_tokens else []
            self._answers[key] = tokens
        return self._answers[key]

    @torch.no_grad()
    def stale_answer(self, old: str, new: str, tokens: list[int], num_computed: int, num_more: int) -> list[int]:
        """Return the greedy tokens after `tokens`, of which the first num_computed have K and V of older weights."""
        past = DynamicCache()
        argument = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        self.of(old)(input_ids=torch.tensor([tokens[:num_computed]]), **{argument: past})
        model, tokens = self.of(new), list(tokens)
        for _ in range(num_more):
            rest = torch.tensor([tokens[past.get_seq_length() :]])
            tokens.append(int(model(input_ids=rest, **{argument: past}).logits[0, -1].argmax()))
        return tokens[-num_more:] if num_more else []
