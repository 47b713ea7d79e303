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
        """Check token ids.

        Args:
            tokens: Token ids, at least one.

        Returns:
            The same as int32 [num_tokens].

        Raises:
            ValueError: There are none, or ids outside of the vocabulary.
            TypeError: They are text.
        """

    def kv_namespace(self, namespace: bytes = b"", adapter: str | None = None) -> bytes:
        """Return the namespace under which K and V of now are cached.

        Args:
            namespace: The caller's.
            adapter: The name of an adapter; None for the base model.

        Returns:
            The whole namespace.

        Raises:
            ValueError: No such adapter is loaded, or the whole is too long.
        """

    def check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Check that the model takes a sequence of some length.

        Args:
            num_prompt_tokens: Tokens of the prompt.
            max_tokens: Tokens after it.

        Raises:
            ValueError: The sum is more than max_model_len.
        """

    def compute(self, items: Sequence[BatchItem]) -> torch.Tensor:
        """Compute tokens of sequences that belong to no request, in one forward pass.

        Args:
            items: The tokens. The manager has given room for them, and the caller commits them.

        Returns:
            The logits of the wanted tokens: [their number, vocab_size].

        Raises:
            RuntimeError: A step is under way.
            ValueError: The model is in training mode.
        """

    def preempt_or_reclaim(self) -> bool:
        """Preempt the request that runs and is last in order. Where none runs, wait for blocks that a store is given.

        Returns:
            False if none runs, and no store holds blocks.
        """

    def add_reclaimer(self, reclaimer: Callable[[], bool]) -> None:
        """Ask one more for blocks, where running requests cannot give any.

        Args:
            reclaimer: Gives back some blocks; returns False if it cannot.
        """

    def remove_reclaimer(self, reclaimer: Callable[[], bool]) -> None:
        """Ask a reclaimer no more. Removing one that is not there does nothing.

        Args:
            reclaimer: As it was added.
        """
