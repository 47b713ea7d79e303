"""Crowd: random requests to one engine. Each answer is a beginning of the known right one.

There are two namespaces, priorities, samples, stop tokens, aborts, resets and failing steps. Half of the engines decode
as on a device. A kind of engine has its own prompts, options and invariants. All that belongs to nobody is poisoned now
and then.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.cpu_graphs import as_on_a_device
from support.models import VOCAB
from support.state_engines import greedy, own_tokens
from transformers import PreTrainedModel

from kvpage.serving import Engine, RequestOutput

NUM_PROMPTS, MOST_TOKENS, MOST_WAITING = 10, 10, 6


class Crowd:
    """A life of an engine over `model`.

    figures: requests, tokens that were cached, preemptions, failed steps.
    """

    def __init__(
        self, model: PreTrainedModel, engine: Engine, prompts: Sequence[list[int]], rng: random.Random
    ) -> None:
        self.rng, self.engine, self.prompts = rng, engine, prompts
        self.expected = [own_tokens(model, prompt, MOST_TOKENS) for prompt in prompts]
        if rng.random() < 0.5:
            as_on_a_device(engine)
        self._let_fail(engine.debug.runner.view)
        self.fails = False
        self.asked: dict[str, int] = {}
        self.figures = {"requests": 0, "cached tokens": 0, "failed steps": 0, "preemptions": 0}

    def live(self, num_requests: int, advance: Callable[[int], object] = lambda count: None) -> None:
        """Send so many requests, and wait for all."""
        for _ in range(num_requests):
            self._send()
            advance(1)
            while len(self.asked) >= MOST_WAITING or (self.asked and self.rng.random() < 0.6):
                self._step()
        while self.asked:
            self._step()
        self.check_end()
        stats = self.engine.stats()
        assert stats.num_used_blocks == 0 and not self.engine.has_unfinished
        self.figures["preemptions"] = stats.num_preemptions

    def options(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Further arguments of a request."""
        return {}

    def poison(self) -> None:
        """Spoil all that belongs to nobody."""
        raise NotImplementedError

    def check_end(self) -> None:
        """AssertionError or RuntimeError unless everything has been given back."""
        raise NotImplementedError

    def _send(self) -> None:
        rng, at = self.rng, self.rng.randrange(len(self.prompts))
        prompt = self.prompts[at]
        options = self.options(prompt)
        stops = rng.sample(range(VOCAB), rng.choice((0, 0, VOCAB // 8)))
        fields = {"n": rng.choice((1, 1, 1, 2)), "retain_priority": rng.randrange(3), "stop_token_ids": stops}
        params = greedy(rng.randint(1, MOST_TOKENS), **fields)
        name = self.engine.add_request(
            prompt, params, namespace=rng.choice((b"", b"", b"a")), priority=rng.choice((0, 0, 1)), **options
        )
        self.asked[name] = at
        self.figures["requests"] += 1

    def _step(self) -> None:
        chance = self.rng.random()
        if chance < 0.02:
            name = self.rng.choice(list(self.asked))
            self._ended(self.engine.abort(name))
            return
        if chance < 0.03:
            self.engine.reset_prefix_cache()
        if chance < 0.1:
            self.poison()
            self.engine.manager.check()
        self.fails = self.rng.random() < 0.03
        try:
            outputs = self.engine.step()
        except ArithmeticError:
            self.figures["failed steps"] += 1
            return
        finally:
            self.fails = False
        for one in outputs:
            if one.output is not None:
                self._ended(one.output)

    def _ended(self, output: RequestOutput) -> None:
        expected = self.expected[self.asked.pop(output.request_id)]
        for sample in output.samples:
            assert sample.token_ids == expected[: len(sample.token_ids)]
            assert sample.finish_reason != "length" or sample.token_ids
        self.figures["cached tokens"] += output.num_cached_tokens

    def _let_fail(self, view: torch.nn.Module) -> None:
        """Let the last layer raise where it is told to: no hook, with which nothing is captured."""
        layer = list(view.model.layers if hasattr(view, "model") else view.backbone.layers)[-1]
        forward = layer.forward

        def fail(*args: object, **kwargs: object) -> object:
            if self.fails:
                raise ArithmeticError("a layer has failed")
            return forward(*args, **kwargs)

        vars(layer)["forward"] = fail
