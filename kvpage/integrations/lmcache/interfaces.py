"""What blending consists of: a retriever finds the K and V of segments, an executor blends them with fresh ones.

    new_request(tokens) ─► task ─ result(layer) ─► K, V, which rows are valid, where they stood
                                                            │
    the model's layer: fresh Q, K, V ─────────────────────► blend ─► Q, K, V to attend with, rows to go on with

The names and arguments are those of the first implementation (LMCache's `lmcache.blend`, 2024).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class BlendOutput:
    """What a layer attends with, and what it goes on with.

    q: of the rows that are computed from here on. k, v: of all rows. positions: of q's rows.
    local_indices: int64, which of the rows that came in go on, ascending; all of them in layers that choose nothing.
    query_start_loc: where each request's rows of q begin, and the end; None where it has not changed.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    local_indices: torch.Tensor
    query_start_loc: torch.Tensor | None


@dataclass(slots=True)
class BlendRetrieverResult:
    """One layer's K and V of the input tokens, the task's own tensors.

    k, v: [num_tokens, hidden] each; None if nothing was found. What stands in invalid rows means nothing.
    valid_mask: bool [num_tokens], on k's device. original_positions: int64 [num_tokens] there: where each row's K was
        rotated to; 0 for invalid rows. head_shape: (heads, head_size), of which hidden is the product; None if nothing
        was found, or the retriever does not know. reason: where nothing was found, where it was looked for; else None.
    """

    k: torch.Tensor | None
    v: torch.Tensor | None
    valid_mask: torch.Tensor
    original_positions: torch.Tensor
    head_shape: tuple[int, int] | None = None
    reason: str | None = None

    @property
    def k_heads(self) -> torch.Tensor | None:
        """k as [num_tokens, heads, head_size]: a view. ValueError without a head_shape."""
        return self._by_head(self.k)

    @property
    def v_heads(self) -> torch.Tensor | None:
        """v likewise; [num_tokens, heads, 0] where the model caches none (MLA)."""
        return self._by_head(self.v)

    def _by_head(self, rows: torch.Tensor | None) -> torch.Tensor | None:
        if rows is None:
            return None
        if self.head_shape is None:
            raise ValueError("head_shape must be known to view rows by head, got None")
        heads, head_size = self.head_shape
        return rows.view(len(rows), heads, head_size if rows.shape[1] else 0)


class BlendRetrieverTask(ABC):
    """A retrieval under way."""

    @abstractmethod
    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Waits for the layer. ValueError for a layer that there is not."""


class BlendRetriever(ABC):
    """Finds segments of prompts."""

    @abstractmethod
    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        """Begins a retrieval, and returns at once.

        input_tokens: integers [num_tokens], of several requests one after the other.
        query_start_loc: [num_requests + 1], where each begins, and the end.
        """


class BlendExecutor(ABC):
    """Blends layer by layer, in order; layer 0 begins a new forward pass."""

    @abstractmethod
    def blend(
        self,
        layer_id: int,
        retrieved_k: torch.Tensor,
        retrieved_v: torch.Tensor,
        valid_mask: torch.Tensor,
        original_positions: torch.Tensor,
        fresh_q: torch.Tensor,
        fresh_k: torch.Tensor,
        fresh_v: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        token_dim: int,
    ) -> BlendOutput:
        """retrieved_k, retrieved_v, valid_mask, original_positions: as a BlendRetrieverResult has them.

        fresh_q, fresh_k, fresh_v: of the rows that are computed, their tokens in dimension `token_dim`; positions:
            theirs. As many as retrieved ones up to the first layer that chooses, behind it those chosen last.
        query_start_loc: of the retrieved rows.

        Nothing that is given is changed.
        """
