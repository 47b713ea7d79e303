"""AttentionLibrary: one library bound to the caches of an engine. It plans once a step, and runs once a layer.

    layer 0   attend ─► rules ─► plan of the step, kept with its Sequences ─► run
    layer 1   attend ─► rules ─────────────────────────────────────────────► run      the same options: one plan
    a window  attend ─► rules ─► a second plan ────────────────────────────► run      other options

Where a step or a call is not the library's kind, `attend` returns None and kvpage's own kernel computes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from kvpage.layout.attention import Attention
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.args.sequences import Sequences
from kvpage.ops.cuda.libraries.parts import Part, parts_of
from kvpage.ops.cuda.libraries.rules import LibraryRules, option_refusal


class PlanOptions(NamedTuple):
    """All that a plan depends on besides the sequences.

    Attributes:
        num_heads: Heads of the query.
        dtype: The query's.
        scale: Factor of the products.
        sliding_window: Keys that a query sees, or None.
        softcap: As in Attention, or None.
    """

    num_heads: int
    dtype: torch.dtype
    scale: float
    sliding_window: int | None
    softcap: float | None


Run = Callable[[torch.Tensor, BoundCache, torch.Tensor | None], torch.Tensor]
"""run(query, cache, out): attention of a planned part. The result is `out` or, where a library takes none, another."""


class Kernels(Protocol):
    """The calls of one library for one kind of cache.

    decodes_only: Whether all sequences must have one query each.
    plans_in_graphs: Whether a plan may be made while a CUDA graph is captured.
    """

    decodes_only: bool
    plans_in_graphs: bool

    def plan(self, part: Part, cache: BoundCache, options: PlanOptions) -> Run:
        """Return the call for a part of a step. Lengths on the host are read now, those on the device at the call."""

    def plan_fixed(self, part: Part, cache: BoundCache, options: PlanOptions) -> "FixedRun | None":
        """Return a call whose tensors keep their memory, for a graph; None where the library has none."""


class FixedRun(Protocol):
    """A call that a CUDA graph may hold: its plan is renewed in the same memory."""

    def __call__(self, query: torch.Tensor, cache: BoundCache, out: torch.Tensor | None) -> torch.Tensor:
        """Attend as a Run does."""

    def plan_again(self, part: Part) -> None:
        """Renew the plan for other lengths of the same sequences, before a replay, on the replay's stream."""


class StepPlan:
    """The calls of a step, one a part."""

    def __init__(self, calls: Sequence[tuple[Part, Run]], value_size: int) -> None:
        self.calls, self._value_size = calls, value_size

    def run(self, query: torch.Tensor, cache: BoundCache) -> torch.Tensor:
        """Return [num_tokens, num_heads, value_size]."""
        if len(self.calls) == 1:
            return self.calls[0][1](query, cache, None)
        out = query.new_empty(*query.shape[:2], self._value_size)
        for part, call in self.calls:
            rows = out[part.rows]
            result = call(query[part.rows], cache, rows)
            if result is not rows:
                rows.copy_(result)
        return out


class AttentionLibrary:
    """One library, with its workspace, for caches of one layout. It belongs to one engine.

    Args:
        rules: The library's, which the layout fulfils.
        kernels: Its calls.
        is_named: Whether a user has named it. Then options that it does not take are errors.
    """

    def __init__(self, rules: LibraryRules, kernels: Kernels, is_named: bool) -> None:
        self.rules, self._kernels, self._is_named = rules, kernels, is_named
        self._seen: dict[PlanOptions, int] = {}  # and the size of a value

    @property
    def name(self) -> str:
        """The library's name in EngineConfig."""
        return self.rules.name

    def attend(
        self, query: torch.Tensor, cache: BoundCache, sequences: Sequences, attention: Attention
    ) -> torch.Tensor | None:
        """Return attention over blocks, or None where the library does not compute this call.

        Args:
            query: [num_tokens, num_heads, key_size], on the cache's device.
            cache: The layer's.
            sequences: The step's. Its plans are kept with it.
            attention: The options, complete.

        Returns:
            [num_tokens, num_heads, value_size] in the query's dtype, or None.

        Raises:
            ValueError: The library was named, and does not take an option of the model.
        """
        if attention.query_positions is not None:
            return None
        refusal = option_refusal(self.rules, cache, query, attention)
        if refusal is not None:
            if self._is_named:
                raise ValueError(refusal)
            return None
        assert attention.scale is not None and attention.value_size is not None, "ops.attend completes the options"
        options = PlanOptions(query.shape[1], query.dtype, attention.scale, attention.sliding_window, attention.softcap)
        plans, key = sequences.plans, (self, options)
        if key not in plans:
            plans[key] = self._plan(cache, sequences, options, attention.value_size)
        plan = plans[key]
        return None if plan is None else plan.run(query, cache)

    def _plan(self, cache: BoundCache, sequences: Sequences, options: PlanOptions, value_size: int) -> StepPlan | None:
        self._seen[options] = value_size
        parts = parts_of(sequences)
        if parts is None or (self._kernels.decodes_only and not all(part.is_decode for part in parts)):
            return None
        if cache.is_cuda and not self._kernels.plans_in_graphs and torch.cuda.is_current_stream_capturing():
            return None
        return StepPlan([(part, self._kernels.plan(part, cache, options)) for part in parts], value_size)

    def plan_for_graph(self, sequences: Sequences, cache: BoundCache) -> bool:
        """Plan decoding for a graph that will be captured and replayed, for all options that were met so far.

        Args:
            sequences: One query each. Tables and lengths stay where they are; the bound of lengths is max_seq_len.
            cache: A layer's; the others are like it.

        Returns:
            Whether the graph may hold the library's calls. Else it holds kvpage's kernel.
        """
        parts = parts_of(sequences)
        if parts is None or len(parts) != 1 or not parts[0].is_decode:
            return False
        for options, value_size in self._seen.items():
            call = self._kernels.plan_fixed(parts[0], cache, options)
            sequences.plans[self, options] = None if call is None else StepPlan([(parts[0], call)], value_size)
        return any(sequences.plans.values())

    def plan_again(self, sequences: Sequences, seq_lens: list[int]) -> None:
        """Renew the plans of `plan_for_graph` before a replay, on its stream. Tables hold the new blocks already.

        Args:
            sequences: As they were planned.
            seq_lens: Tokens of each sequence now.
        """
        for plan in filter(None, sequences.plans.values()):
            for part, call in plan.calls:
                call.plan_again(part._replace(seq_lens=seq_lens))
