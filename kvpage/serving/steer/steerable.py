"""SteerableEngine: the side of an engine on which sequences are steered that belong to no request."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpage.blocks.manager import BlockManager
from kvpage.checks.tokens import Tokens
from kvpage.serving.config import EngineConfig
from kvpage.serving.model.step import BatchItem
from kvpage.serving.params.defaults import ParamDefaults


class SteerableEngine(Protocol):
    """An engine over which Branches run; `kvpage.serving.Engine` is one."""

    config: EngineConfig
    manager: BlockManager
    defaults: ParamDefaults
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def check_tokens(self, tokens: Tokens) -> npt.NDArray[np.int32]:
        """Return the tokens as an array. ValueError and TypeError for others than the vocabulary's."""

    def check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """ValueError if the model does not take so many tokens."""

    def compute(self, items: Sequence[BatchItem]) -> torch.Tensor:
        """Compute items in one forward pass; return the logits of the wanted tokens: [their number, vocab_size]."""

    def make_room(self) -> bool:
        """Preempt the youngest request that runs; False if none does."""

    def add_reclaimer(self, reclaimer: Callable[[], bool]) -> None:
        """Ask it for blocks where running requests cannot give any."""

    def remove_reclaimer(self, reclaimer: Callable[[], bool]) -> None:
        """Ask it no more."""
