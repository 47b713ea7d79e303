"""StateLoop: packed steps of a model with states, over ModelRunner alone. Tests name every slot."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import transformers as tf
from support.models import VOCAB

from kvpage import CacheConfig
from kvpage.cache.cache_engine import CacheEngine
from kvpage.cache.state_cache import StateCache
from kvpage.serving import EngineConfig
from kvpage.serving.assembly.parts import check_servable, make_cache
from kvpage.serving.model.states.state_pass import StatePass, StateRow
from kvpage.serving.model.step import PackedTokens, Step

BLOCK_SIZE = 4
POISON = 0xFF  # NaN in each float dtype


class Portion(NamedTuple):
    """Positions [start, end) of a sequence, computed with a slot.

    marks: (position, slot) each. num_prompt: see StateRow.
    """

    seq: int
    start: int
    end: int
    slot: int
    marks: tuple[tuple[int, int], ...] = ()
    num_prompt: int | None = None


class StateLoop:
    """A model, blocks and slots, both poisoned. Sequence i has blocks of its own, not in order.

    sequences: the tokens of each.
    """

    def __init__(self, model: tf.PreTrainedModel, sequences: Sequence[list[int]], num_slots: int) -> None:
        self.sequences = [list(tokens) for tokens in sequences]
        width = 12
        num_blocks = width * len(sequences)
        config = EngineConfig(CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks))
        servable = check_servable(model, config)
        assert servable.states is not None
        self.runner, self.layout = servable.runner, servable.states.layout
        self.cache: CacheEngine = make_cache(servable, config)
        self.states = StateCache(self.layout, num_slots)
        self.states.slots.fill_(POISON)
        for layer in self.cache.gpu_cache:
            layer.fill_(torch.nan)
        self._tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(-1, width)

    def step(self, portions: Sequence[Portion]) -> list[torch.Tensor]:
        """Compute these portions in one packed row. Return the logits of each, [tokens, vocab]."""
        logits = self.runner.forward(self._packed(portions), self.step_of(portions))
        return list(torch.split(logits, [one.end - one.start for one in portions]))

    def step_of(self, portions: Sequence[Portion]) -> Step:
        """Return the step, with states."""
        tables = self._tables[[one.seq for one in portions]]
        slots = []
        for one, table in zip(portions, tables, strict=True):
            at = np.arange(one.start, one.end)
            slots.append(table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE)
        starts, ends = [one.start for one in portions], [one.end for one in portions]
        step = Step.make(self.cache, np.concatenate(slots), tables, starts, ends)
        rows = [StateRow(one.slot, one.start, one.end, one.marks, one.num_prompt) for one in portions]
        step.use_states(StatePass(self.states, rows))
        return step

    def packed(self, portions: Sequence[Portion]) -> PackedTokens:
        """Return the tokens of a step, of which all logits are wanted."""
        return self._packed(portions)

    def _packed(self, portions: Sequence[Portion]) -> PackedTokens:
        tokens = [self.sequences[one.seq][one.start : one.end] for one in portions]
        token_ids = np.array([token for part in tokens for token in part], np.int32)
        starts, ends = [one.start for one in portions], [one.end for one in portions]
        return PackedTokens(token_ids, starts, ends, np.arange(len(token_ids)))


def random_tokens(*lengths: int) -> list[list[int]]:
    """Some sequences, always the same."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def own_logits(model: tf.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """The logits of the model's own forward over the whole sequence."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding: 1e-5, relative."""
    assert found.shape == expected.shape
    error = float((found - expected).norm() / expected.norm())
    assert error <= 1e-5, error
