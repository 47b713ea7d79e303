"""A loop like GRPO's: an optimizer's step, rollouts, the next step. Every token is one of the weights of its version.

`KVPAGE_TEST_UPDATES=10000 pytest -s tests/serving/weights/test_grpo_loop.py` runs the long form, and prints counts.
"""

import copy
import os
from itertools import cycle

import torch
from support.models import make_model, make_prompts
from support.seeds import seed_of
from torch import nn

from kvpage import CacheConfig
from kvpage.serving import Engine, EngineConfig, RequestOutput, SamplingParams

B, NUM_UPDATES = 4, int(os.environ.get("KVPAGE_TEST_UPDATES", "12"))
GREEDY = SamplingParams(max_tokens=5)
DRAWN = SamplingParams(max_tokens=5, temperature=1.0, top_k=0, n=3, logprobs=0)
STEM = make_prompts([3 * B], seed=1)[0]
PROMPTS = [STEM + tail for tail in make_prompts([1, B], seed=2)]
NEAR = 1e-3  # of logits: two ways to compute them differ by less, two versions by more


class Trainer:
    """A policy whose weights wander: each step moves all of them by about a tenth."""

    def __init__(self) -> None:
        self.model, generator = make_model("llama"), torch.Generator().manual_seed(seed_of(1))
        self.last = copy.deepcopy(self.model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, weight_decay=0.05)
        self._generator = generator

    def step(self) -> None:
        self.last.load_state_dict(self.model.state_dict())
        for parameter in self.model.parameters():
            parameter.grad = 0.3 * torch.randn(parameter.shape, generator=self._generator)
        self._optimizer.step()


@torch.no_grad()
def num_wrong(model: nn.Module, output: RequestOutput, num_fixed: int = 0) -> int:
    """Return how many tokens after the first `num_fixed` are not those of the model by itself."""
    wrong = 0
    for sample in output.samples:
        tokens, first = sample.token_ids, len(output.prompt_token_ids)
        logits = model(torch.tensor([[*output.prompt_token_ids, *tokens]])).logits[0, first - 1 : -1]
        if sample.logprobs is not None:
            expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
            distances = (torch.tensor([one.logprob for one in sample.logprobs]) - expected).abs()
        else:
            distances = logits.amax(-1) - logits[range(len(tokens)), tokens]
        wrong += int((distances[num_fixed:] > NEAR).sum())
    return wrong


def finish(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished:
        outputs += [one.output for one in engine.step() if one.output]
    return outputs


def test_no_rollout_is_stale() -> None:
    trainer = Trainer()
    engine = Engine.from_model(trainer.model, EngineConfig(CacheConfig(B, 48)))
    num_stale = num_rollouts = num_tokens = num_shared = 0
    for number, running in zip(range(NUM_UPDATES), cycle(["finish", "restart"]), strict=False):
        engine.add_request(STEM, GREEDY)
        for _ in range(number % 4):
            engine.step()
        has_begun = engine.loop.num_begun > 0
        num_fixed = sum(request.num_generated for request in engine.loop.requests.values())
        engine.update_weights(f"step-{number}", trainer.step, running=running)
        (partial,) = finish(engine)
        is_old = running == "finish" and has_begun
        num_stale += num_wrong(trainer.last if is_old else trainer.model, partial, 0 if is_old else num_fixed)
        if number >= 2:
            engine.drop_version(f"step-{number - 2}")
        for params in (GREEDY, DRAWN):
            outputs = engine.generate(PROMPTS, params)
            num_stale += sum(num_wrong(trainer.model, output) for output in outputs)
            num_shared += sum(output.num_cached_tokens for output in outputs)
            num_tokens += sum(len(sample.token_ids) for output in outputs for sample in output.samples)
            num_rollouts += sum(len(output.samples) for output in outputs)
    print(f"{NUM_UPDATES} updates, {num_rollouts} rollouts of {num_tokens} tokens, {num_stale} stale")
    assert num_stale == 0 and num_shared > NUM_UPDATES * len(STEM)
    engine.manager.check()


def test_the_loop_notices_stale_rollouts() -> None:
    """Weights that change without a new version, and unnoticed, leave K and V that the oracle tells apart."""
    trainer = Trainer()
    engine = Engine.from_model(trainer.model, EngineConfig(CacheConfig(B, 48)))
    engine.loop.watch_weights(lambda may_admit: None)
    engine.generate(PROMPTS, GREEDY)
    trainer.step()
    assert sum(num_wrong(trainer.model, output) for output in engine.generate(PROMPTS, DRAWN)) > 0
