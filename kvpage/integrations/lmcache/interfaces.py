"""Interfaces of blending: a retriever finds the K and V of segments, an executor blends them with fresh ones.

    new_request(tokens) ─► task ─ result(layer) ─► K, V, the valid rows, their original positions
                                                            │
    the model's layer: fresh Q, K, V ─────────────────────► blend ─► Q, K, V to attend with, rows to go on with

The names and arguments come from the first implementation (LMCache's `lmcache.blend`, 2024).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class BlendOutput:
    """Q, K and V that a layer attends with, and the rows that go on to the next layer.

    Attributes:
        q: of the rows that are computed from here on.
        k: of all rows.
        v: of all rows.
        positions: int64, of q's rows.
        local_indices: int64, ascending: the given rows that go on; all of them in layers that choose nothing.
        query_start_loc: [num_requests + 1], the first of q's rows of each request, and the end; None if unchanged.
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

    Attributes:
        k: [num_tokens, hidden]; None if nothing was found. Invalid rows hold no meaning.
        v: likewise.
        valid_mask: bool [num_tokens], on k's device.
        original_positions: int64 [num_tokens], on k's device: the positions to which K was rotated; 0 in invalid rows.
        head_shape: (heads, head_size), whose product is hidden; None if nothing was found or the shape is unknown.
        reason: if nothing was found, a sentence on the places that were searched; otherwise None.
    """

    k: torch.Tensor | None
    v: torch.Tensor | None
    valid_mask: torch.Tensor
    original_positions: torch.Tensor
    head_shape: tuple[int, int] | None = None
    reason: str | None = None

    @property
    def k_heads(self) -> torch.Tensor | None:
        """Return a view of k, [num_tokens, heads, head_size]; None without k. Raises ValueError without head_shape."""
        return self._by_head(self.k)

    @property
    def v_heads(self) -> torch.Tensor | None:
        """Return v likewise; [num_tokens, heads, 0] where the model caches none (MLA)."""
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
        """Wait for a layer and return it.

        Args:
            layer_id: the layer, from 0.

        Returns:
            K and V of the layer, with the mask of valid rows and their original positions.

        Raises:
            ValueError: there is no such layer.
        """


class BlendRetriever(ABC):
    """Finds segments of prompts."""

    @abstractmethod
    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        """Begin a retrieval, and return at once.

        Args:
            input_tokens: integers [num_tokens], of several requests one after the other.
            query_start_loc: [num_requests + 1], the first token of each request, and the end.

        Returns:
            The task, which waits for each layer.
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
        """Blend one layer. No argument is changed, unless the executor was told to write into the retrieved K and V.

        Args:
            layer_id: the next layer, or 0 for a new forward pass.
            retrieved_k: K of all tokens, as in a BlendRetrieverResult.
            retrieved_v: V of all tokens, likewise.
            valid_mask: bool [num_tokens], likewise.
            original_positions: int64 [num_tokens], likewise.
            fresh_q: Q of the rows that are computed: all rows up to the first layer that chooses, then the rows that
                were chosen last.
            fresh_k: K of these rows.
            fresh_v: V of these rows.
            positions: int64, of these rows.
            query_start_loc: [num_requests + 1], the first retrieved row of each request, and the end.
            token_dim: the dimension of tokens in Q, K and V.

        Returns:
            Q, K and V to attend with, and the rows to go on with.
        """
