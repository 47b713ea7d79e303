"""StaticStep: a decode step of some number of rows, which reads all of its numbers out of static memory."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kvpage.serving.loop.graphs.static_inputs import StaticInputs
from kvpage.serving.loop.ranks.rank_caches import RankCaches
from kvpage.serving.model.states.state_pass import DecodePass
from kvpage.serving.model.step import ModelInputs, Step
from kvpage.serving.sampling.logits_check import likeliest


class Computing(Protocol):
    """Computes a model; see ModelRunner."""

    def forward(self, tokens: ModelInputs, step: Step) -> torch.Tensor:
        """Write the tokens' K and V into the step's slots, and return the logits of all."""


class StaticStep:
    """A step of the first `num_rows` rows of `inputs`, with sequences of at most max_seq_len tokens.

    logits: [num_rows, vocab_size] of the last computation; a replay of it writes them anew.
    """

    def __init__(
        self, runner: Computing, caches: RankCaches, inputs: StaticInputs, num_rows: int, max_seq_len: int
    ) -> None:
        self.num_rows = num_rows
        self.logits = torch.empty(0)
        self._runner, self._caches, self._max_seq_len = runner, caches, max_seq_len
        self._views = inputs.views(num_rows)
        self._fixed: Step | None = None
        self._library = caches.library
        if caches.full.device.type != "cpu":
            self._fixed = self._make()
            self._plan(self._fixed)

    def compute(self) -> None:
        """Compute the step. It allocates, and waits for nothing: a device can capture it."""
        views, step = self._views, self._begun()
        token_ids = torch.where(views.token_ids < 0, views.newest_tokens.clamp(min=0), views.token_ids)
        model_inputs = ModelInputs(token_ids.unsqueeze(0), views.positions.unsqueeze(0))
        self.logits = self._runner.forward(model_inputs, step)
        views.newest_tokens.copy_(likeliest(self.logits))

    def renew_plan(self, seq_lens: Sequence[int]) -> None:
        """Let a library that attends plan for these sequences, and for padding of one token after them."""
        if self._library is not None and self._fixed is not None:
            padded = [*seq_lens, *[1] * (self.num_rows - len(seq_lens))]
            self._library.plan_again(self._fixed.sequences, padded)

    def _begun(self) -> Step:
        """Return the step, of which nothing has been computed."""
        step, states = self._fixed or self._make(), self._caches.states
        step.calls.clear()
        step.use_states(None if states is None else DecodePass(states, self._views.state_slots))
        return step

    def _make(self) -> Step:
        views, groups = self._views, (self._caches.full, *self._caches.windows)
        plans = [plan if len(plan) else None for plan in views.plans]
        step, *windows = [
            Step.of_static(cache, slots, tables, views.seq_lens, self._max_seq_len, plan)
            for cache, slots, tables, plan in zip(groups, views.slots, views.tables, plans, strict=True)
        ]
        for window in windows:
            step.use_window(window)
        return step

    def _plan(self, step: Step) -> None:
        """Plan for the longest sequences, in memory that stays; nothing is planned by the host's lengths after it."""
        if self._library is not None:
            self._library.plan_for_graph(step.sequences, next(iter(step.caches.values())))
        for group in (step, *step.windows.values()):
            group.sequences.forget_host_lengths()
