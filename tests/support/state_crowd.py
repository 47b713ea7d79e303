"""StateCrowd: random requests to an engine over a model with states. Each answer is a beginning of the known right one.

The engine has few blocks and few slots, a host tier, several namespaces, priorities, samples, marks, aborts, resets and
failing steps. What belongs to nobody is poisoned now and then.
"""

import random
from collections.abc import Callable

import torch
from support.state_engines import (
    B,
    check_nothing_held,
    greedy,
    make_engine,
    own_tokens,
    poison,
    random_prompt,
    states_for,
)
from support.state_models import make_state_model

from kvpage.serving import RequestOutput

NUM_PROMPTS, MOST_TOKENS, MOST_WAITING = 10, 10, 6


class StateCrowd:
    """A life of an engine. figures: requests, tokens that were cached, preemptions, failed steps."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = random.Random(seed)
        model = make_state_model(kind)
        common = random_prompt(4 * B)
        self.prompts = [common[: self.rng.randrange(1, 4 * B)] + random_prompt(3, one) for one in range(NUM_PROMPTS)]
        self.expected = [own_tokens(model, prompt, MOST_TOKENS) for prompt in self.prompts]
        small = {"num_blocks": 20, "num_host_blocks": 12, "max_num_batched_tokens": 9, "max_num_seqs": 3}
        self.engine = make_engine(model, **small, states=states_for(make_engine(model), 4, 3))
        self.budget = self.engine.stats().blocks.slots.num_slots
        layers = list(model.model.layers if hasattr(model, "model") else model.backbone.layers)
        layers[-1].register_forward_pre_hook(self._fail)
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
        check_nothing_held(self.engine)
        stats = self.engine.stats()
        assert stats.blocks.slots.num_slots == self.budget
        assert stats.num_used_blocks == 0 and not self.engine.has_unfinished
        self.figures["preemptions"] = stats.num_preemptions

    def _send(self) -> None:
        rng, at = self.rng, self.rng.randrange(NUM_PROMPTS)
        prompt = self.prompts[at]
        marks = rng.sample(range(1, len(prompt) + 1), rng.choice((0, 0, 1, 2)) if len(prompt) > 1 else 0)
        params = greedy(rng.randint(1, MOST_TOKENS), n=rng.choice((1, 1, 1, 2)), priority=rng.randrange(3))
        name = self.engine.add_request(
            prompt, params, namespace=rng.choice((b"", b"", b"a")), priority=rng.choice((0, 0, 1)), cache_at=marks
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
            poison(self.engine)
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

    def _fail(self, module: torch.nn.Module, args: object) -> None:
        if self.fails:
            raise ArithmeticError("a layer has failed")
