"""Whim: a rule of loading that decides anyhow."""

import random

from kvpage.blocks.load_or_compute import LoadOrCompute


class Whim(LoadOrCompute):
    def __init__(self, seed: int, block_size: int) -> None:
        super().__init__(1, block_size)
        self.rng = random.Random(seed)

    @property
    def fewest_to_load(self) -> int | None:
        return 0 if self.rng.random() < 0.7 else None

    def should_load(self, num_blocks: int, num_tokens: int | None = None) -> bool:
        return self.rng.random() < 0.7

    def should_store(self) -> bool:
        return self.rng.random() < 0.9
