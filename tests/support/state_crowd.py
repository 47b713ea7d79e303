"""StateCrowd: random requests to an engine over a model with states, with few blocks, few slots and a host tier."""

import random
from collections.abc import Sequence
from typing import Any

from support.crowd import NUM_PROMPTS, Crowd
from support.state_engines import B, check_nothing_held, make_engine, poison, random_prompt, states_for
from support.state_models import make_state_model


class StateCrowd(Crowd):
    """A life of an engine. Requests have marks, too."""

    def __init__(self, kind: str, seed: int) -> None:
        rng, model = random.Random(seed), make_state_model(kind)
        common = random_prompt(4 * B)
        prompts = [common[: rng.randrange(1, 4 * B)] + random_prompt(3, one) for one in range(NUM_PROMPTS)]
        small = {"num_blocks": 20, "num_host_blocks": 12, "max_num_batched_tokens": 9, "max_num_seqs": 3}
        engine = make_engine(model, **small, states=states_for(make_engine(model), 4, 3))
        super().__init__(model, engine, prompts, rng)
        self.budget = engine.stats().blocks.slots.num_slots

    def options(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Up to two marks."""
        num_marks = self.rng.choice((0, 0, 1, 2)) if len(prompt) > 1 else 0
        return {"cache_at": self.rng.sample(range(1, len(prompt) + 1), num_marks)}

    def poison(self) -> None:
        """Spoil the slots that are free."""
        poison(self.engine)

    def check_end(self) -> None:
        """Slots are free or checkpoints, and as many as at first."""
        check_nothing_held(self.engine)
        assert self.engine.stats().blocks.slots.num_slots == self.budget
