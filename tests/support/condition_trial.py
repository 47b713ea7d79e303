"""ConditionTrial: one family under one condition of serving. Greedy tokens must be those of model.generate."""

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from support import state_engines
from support.state_engines import B, finished, greedy, own_tokens, random_prompt
from transformers import PreTrainedModel

from kvpage.serving import Branches, Engine

NUM_TOKENS = 32
CROWD_LENGTHS = (9, 12, 5, 14, 12, 4 * B + 3)


class ConditionTrial:
    """A model, prompts of a seed, and what model.generate gives for them.

    engines: the module of the engines of its kind, such as support.state_engines.
    """

    def __init__(self, kind: str, seed: int, model: PreTrainedModel, engines: ModuleType) -> None:
        self.kind, self.seed, self.model, self._engines = kind, seed, model, engines
        self._known: dict[tuple[int, ...], list[int]] = {}
        self.num_compared = 0

    def make_engine(self, **fields: Any) -> Engine:
        """An engine over the model. What nobody owns is poisoned."""
        return self._engines.make_engine(self.model, **fields)

    @property
    def has_states(self) -> bool:
        """Whether a prefix may end anywhere; else it ends with a block."""
        return self._engines is state_engines

    def found_at(self, position: int) -> int:
        """Return how many of that many cached tokens another prompt finds."""
        return position if self.has_states else position // B * B

    def poison(self, engine: Engine) -> None:
        """Spoil what nobody owns."""
        self._engines.poison(engine)

    def prompt(self, length: int, number: int = 0) -> list[int]:
        """Return a random prompt of the trial's seed."""
        return random_prompt(length, 1_000 * self.seed + number)

    def diverging(self, prompt: list[int], position: int) -> list[int]:
        """Return a prompt that shares so many tokens with another one."""
        return [*prompt[:position], prompt[position] % 90 + 1, 7, 9]

    def expected(self, prompt: list[int]) -> list[int]:
        """Return the tokens of model.generate."""
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = own_tokens(self.model, prompt, NUM_TOKENS)
        return self._known[key]

    def ask(self, engine: Engine, prompt: list[int], num_cached: int, **arguments: Any) -> list[int]:
        """Compare the answer, and how much of the prompt was cached. Return the answer."""
        tokens, found = self._engines.ask(engine, prompt, NUM_TOKENS, **arguments)
        self._compare(prompt, tokens)
        assert found == num_cached, f"{self.kind}, seed {self.seed}: {found} tokens were cached, not {num_cached}"
        return tokens

    def warm(self, engine: Engine, prompt: list[int], **arguments: Any) -> None:
        """Compute a prompt, and compare the first token."""
        tokens, _ = self._engines.ask(engine, prompt, 1, **arguments)
        assert tokens == self.expected(prompt)[:1], f"{self.kind}, seed {self.seed}: {prompt}"

    def ask_many(self, engine: Engine) -> None:
        """Compare the answers to prompts that come together."""
        prompts = {}
        for number, length in enumerate(CROWD_LENGTHS):
            prompt = self.prompt(length, number)
            prompts[engine.add_request(prompt, greedy(NUM_TOKENS))] = prompt
        for output in finished(engine):
            self._compare(prompts.pop(output.request_id), output.samples[0].token_ids)
        assert not prompts
        self.check(engine)

    def ask_forks(self, engine: Engine, prompt: list[int]) -> None:
        """Compare three samples of one request, and three branches whose next tokens differ."""
        engine.add_request(prompt, greedy(NUM_TOKENS, n=3))
        (output,) = finished(engine)
        for sample in output.samples:
            self._compare(prompt, sample.token_ids)
        with Branches(engine) as branches:
            trunk = branches.start(prompt)
            branches.compute([trunk])
            forks = [trunk, branches.fork(trunk), branches.fork(trunk)]
            begun = [[*prompt, token + 5, token + 1] for token in range(len(forks))]
            for branch, tokens in zip(forks, begun, strict=True):
                branch.append(tokens[len(prompt) :])
            for _ in range(NUM_TOKENS):
                chosen = branches.compute(forks).argmax(dim=-1).tolist()
                for branch, token in zip(forks, chosen, strict=True):
                    branch.append([token])
            for branch, tokens in zip(forks, begun, strict=True):
                self._compare(tokens, branch.token_ids.tolist()[len(tokens) :])
        self.check(engine)

    def compare_all(self, prompts: Iterable[list[int]], answers: Iterable[list[int]]) -> None:
        """Compare answers that came in another way."""
        for prompt, tokens in zip(prompts, answers, strict=True):
            self._compare(prompt, tokens)

    def check(self, engine: Engine) -> None:
        """Everything is free or cached."""
        self._engines.check_nothing_held(engine)

    def _compare(self, prompt: list[int], tokens: list[int]) -> None:
        expected = self.expected(prompt)
        assert tokens == expected, f"{self.kind}, seed {self.seed}, {prompt}: {tokens}, not {expected}"
        self.num_compared += 1


Condition = Callable[[ConditionTrial], None]


def trials_of(conditions: dict[str, Condition], kinds: tuple[str, ...], seed: int, count: int) -> list[tuple[str, str]]:
    """Return so many conditions, each with a family. One seed after another, each family meets each condition."""
    names = list(conditions)
    return [(names[i % len(names)], kinds[(seed + i) % len(kinds)]) for i in range(count)]
