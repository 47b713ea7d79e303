"""WindowCrowd: random requests to an engine whose windows have few blocks of their own.

Prompts begin alike, and some are longer than several windows. Windows hold little more than one sequence needs.
"""

import random

from support.crowd import NUM_PROMPTS, Crowd
from support.models import WINDOW
from support.state_engines import random_prompt
from support.window_engines import B, check_nothing_held, make_engine, make_window_model, poison

LEAST = WINDOW // B + 2  # blocks of a window that one sequence needs


class WindowCrowd(Crowd):
    """A life of an engine. Its windows have 0 to 6 blocks more than one sequence needs."""

    def __init__(self, kind: str, seed: int) -> None:
        rng, model = random.Random(seed), make_window_model(kind)
        common = random_prompt(7 * B)
        prompts = [common[: rng.randrange(1, 7 * B)] + random_prompt(3, one) for one in range(NUM_PROMPTS)]
        engine = make_engine(
            model,
            num_blocks=rng.choice((24, 40)),
            num_window_blocks=LEAST + rng.randrange(7),
            max_num_batched_tokens=rng.choice((5, 9, 32)),
            max_num_seqs=rng.choice((2, 4)),
        )
        super().__init__(model, engine, prompts, rng)

    def poison(self) -> None:
        """Spoil the blocks that are free, in every group."""
        poison(self.engine)

    def check_end(self) -> None:
        """Blocks are free or cached."""
        check_nothing_held(self.engine)
