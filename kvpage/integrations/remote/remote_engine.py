"""RemoteEngine: the side of an engine that an AsyncEngine uses, where workers elsewhere compute.

A model without weights checks requests as the workers' own engines do.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpage.blocks.manager import BlockManager
from kvpage.checks.tokens import Tokens
from kvpage.checks.values import check_at_least
from kvpage.integrations.remote.remote_loop import RemoteLoop
from kvpage.integrations.remote.summed import summed
from kvpage.observe.telemetry import Telemetry
from kvpage.serving.config import EngineConfig
from kvpage.serving.loop.intake import Intake, Prompt
from kvpage.serving.loop.request import Request
from kvpage.serving.model.limits import limited_model_len
from kvpage.serving.params.defaults import ParamDefaults
from kvpage.serving.stats.engine_stats import EngineStats
from kvpage.serving.stats.request_state import RequestState


@dataclass(frozen=True, slots=True)
class NoCache:
    """The cache of an engine that has none here. num_gpu_blocks: of each worker."""

    num_gpu_blocks: int
    device: torch.device


class RemoteEngine:
    """An engine for AsyncEngine, whose requests go to workers. A request that a lost worker had begins anew elsewhere.

    Args:
        model: The workers' model; its weights are not used, and may be on the device "meta".
        config: The settings of the workers' engines.
        loop: Where requests go.
        tokenizer: The workers' tokenizer, for parameters that speak of text; None refuses these.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        loop: RemoteLoop,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        cache = config.cache_config
        self.config, self.loop = config, loop
        self.cache: Any = NoCache(cache.num_gpu_blocks, torch.device("cpu"))
        self.manager = BlockManager(cache.num_gpu_blocks, cache.block_size)  # empty, for its numbers
        self.telemetry = Telemetry(self.manager.tree, None, 0.0)
        self.defaults = ParamDefaults.of_model(model, config.generation_config)
        self.max_model_len = limited_model_len(model, config.max_model_len)
        self._intake = Intake(model, self.manager, self.defaults, self.max_model_len, tokenizer)
        self.vocab_size, self.eos_token_ids = self._intake.vocab_size, self._intake.eos_token_ids
        self._worker_stats: Sequence[EngineStats] = ()

    @property
    def has_unfinished(self) -> bool:
        """Whether there are requests under way."""
        return bool(self.loop.requests)

    def kv_namespace(self, namespace: bytes = b"", adapter: str | None = None) -> bytes:
        """Return a caller's namespace as it is: versions and adapters are the workers'.

        Args:
            namespace: The caller's.
            adapter: None.

        Raises:
            ValueError: An adapter is named.
        """
        if adapter is not None:
            raise ValueError(f"adapter must be None for workers elsewhere, got {adapter!r}")
        return namespace

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
        return self._intake.check_tokens(tokens)

    def prepare(self, prompt: Prompt, request_id: str) -> Request:
        """Check a prompt, and make a request of it.

        Args:
            prompt: The prompt.
            request_id: Its id.

        Returns:
            The request.

        Raises:
            ValueError, TypeError: As Engine.add_request. It asks for segments, which workers do not take.
        """
        return self._intake.request(prompt, request_id)

    def stats(self) -> EngineStats:
        """Return the sums of the workers' last numbers; zeros before there are any.

        Returns:
            The numbers.
        """
        return summed(self._worker_stats) if self._worker_stats else self._no_stats()

    def take_stats(self, worker_stats: Sequence[EngineStats]) -> None:
        """Take the workers' latest numbers; `stats` returns their sum.

        Args:
            worker_stats: Of each worker that has told them.
        """
        self._worker_stats = tuple(worker_stats)

    def request_states(self, limit: int) -> list[RequestState]:
        """Return how far the unfinished requests are, as Engine.request_states does.

        The workers do not tell how much of a prompt they have cached or computed: it is 0 before the first token, and
        all of it is computed from then on.

        Args:
            limit: The largest number of states.

        Returns:
            The states: of requests with tokens first, then of requests that wait for their first one.

        Raises:
            ValueError: `limit` is negative.
        """
        check_at_least("limit", limit, 0)
        return self.loop.states(limit)

    def _no_stats(self) -> EngineStats:
        return EngineStats(
            num_steps=0,
            num_computed_tokens=0,
            num_prompt_tokens=0,
            num_cached_tokens=0,
            num_generated_tokens=0,
            num_preemptions=0,
            num_swaps=0,
            num_finished=0,
            num_running=0,
            num_waiting=0,
            num_used_blocks=0,
            num_blocks=self.manager.num_blocks,
            blocks=self.manager.stats(),
            transfers={},
            residency=None,
            num_lost_events=None,
            store=None,
            blend=None,
        )

    def saves_under_way(self) -> "list[Future[int]]":
        """Return nothing: the workers have the stores.

        Returns:
            An empty list.
        """
        return []

    def close(self) -> None:
        """End all streams. A second call does nothing."""
        self.loop.close()
        self.telemetry.close()
