"""LatentPass: attention of one forward pass over blocks that hold the latents of MLA instead of heads' K and V.

A layer of DeepSeek's kind makes K and V of all heads out of one small row a token. That row is what the blocks keep:

    hidden ─► kv_a_proj ─┬─► norm ─► latent c ─► kv_b_proj ─► k_nope and v of each head
                         └─► rotary ─► k_rot, one for all heads
                                                              blocks: [ c | k_rot ] a token

    a sequence that begins      by its K and V, which the model has just made
    a long piece of another     by K and V expanded from its rows, which many queries share
    all else: decode            over the rows in place, each read once for all heads
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from kvpage import ops
from kvpage.layout.attention import Attention
from kvpage.serving.model.attention import attend_rows, row_dtype, write_rows
from kvpage.serving.model.attribute_patch import AttributePatch
from kvpage.serving.model.dense_attention import attend
from kvpage.serving.model.latents.heads import PROJECTION, LatentHeads
from kvpage.serving.model.step import Step


class _Ways(NamedTuple):
    """The sequences of each way. rows_in_place: the rows of the last way, int64; None if these are all."""

    begun: list[int]
    expanded: list[int]
    in_place: list[int]
    rows_in_place: torch.Tensor | None
    step_in_place: Step


class LatentPass:
    """One forward pass of `step`, whose blocks hold latents."""

    def __init__(self, step: Step, all_in_place: bool = False) -> None:
        """Args: all_in_place: every sequence takes the last way, so that no cut of it changes a bit."""
        self._step, self._all_in_place = step, all_in_place
        self._latents: dict[nn.Module, torch.Tensor] = {}  # the input of each layer's projection
        bounds = [0, *accumulate(step.query_lens)]
        self._rows = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        self._ways: _Ways | None = None

    def listening(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep for `attend`, inside, the latents that the layers of `model` give to their projections.

        The layers call a function in their projection's place. The projections, which others may share, do not change.
        """
        layers = [module for module in model.modules() if PROJECTION in module._modules]
        return AttributePatch(PROJECTION, {layer: self._listener(layer) for layer in layers})

    def _listener(self, layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        projection = layer._modules[PROJECTION]
        assert projection is not None

        def project(latent: torch.Tensor) -> torch.Tensor:
            self._latents[layer] = latent
            heads: torch.Tensor = projection(latent)
            return heads

        return project

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        attention: Attention,
    ) -> torch.Tensor:
        """Write the latents of a layer's rows, and attend over the blocks: [rows, heads, size of v].

        query, key, value: [rows, heads, size], as the module hands them to its attention function. A module of another
        form raises ValueError with the reason.
        """
        heads = LatentHeads.of_layer(module, key.shape[1], value.shape[2])
        rows = heads.rows(self._take_latent(module, len(key)), key)
        self._write(module, rows, layer)
        self._ways = ways = self._ways or self._choose_ways(heads, key)
        if ways.rows_in_place is None:
            return self._attend_in_place(query, rows, heads, layer, attention, self._step)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        for index in ways.begun:
            part = self._rows[index]
            output[part] = attend(query[part], key[part], value[part], attention)
        for index in ways.expanded:
            part = self._rows[index]
            output[part] = heads.attend_expanded(query[part], self._gather(index, layer, attention, query), attention)
        if ways.in_place:
            at = ways.rows_in_place
            output[at] = self._attend_in_place(query[at], rows[at], heads, layer, attention, ways.step_in_place)
        return output

    def _choose_ways(self, heads: LatentHeads, key: torch.Tensor) -> _Ways:
        step = self._step
        # Blocks may not keep every bit. Then all sequences see the written rows, so that no cut changes the result.
        keeps_bits = step.layout.dtype == key.dtype and not step.layout.is_quantized
        begun, expanded, in_place = [], [], []
        for index, (num_queries, num_keys) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
            if self._all_in_place:
                in_place.append(index)
            elif num_queries == num_keys and keeps_bits:
                begun.append(index)
            elif heads.gains_by_expanding(num_queries):
                expanded.append(index)
            else:
                in_place.append(index)
        if not begun and not expanded:
            return _Ways(begun, expanded, in_place, None, step)
        rows = _concatenated([self._rows[index] for index in in_place]).to(key.device)
        return _Ways(begun, expanded, in_place, rows, step.of_sequences(in_place) if in_place else step)

    def _take_latent(self, module: nn.Module, num_rows: int) -> torch.Tensor:
        """Return the input of the module's projection, [num_rows, rank]."""
        latent = self._latents.pop(module, None)
        if latent is None:
            raise ValueError(f"{PROJECTION} must be called before attention, that of {type(module).__name__} was not")
        return latent.reshape(num_rows, -1)

    def _write(self, module: nn.Module, rows: torch.Tensor, layer: int) -> None:
        step = self._step
        if rows.shape[2] != step.layout.head_size:
            raise ValueError(
                f"a latent and its rotary part must be {step.layout.head_size} numbers by the model's config, "
                f"{type(module).__name__} makes {rows.shape[2]}"
            )
        write_rows(rows, None, layer, step, step.slot_mapping)

    def _gather(self, index: int, layer: int, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Return a sequence's rows, [num_keys, size], as far as the window reaches, in the query's dtype."""
        step = self._step
        num_queries, num_keys = step.query_lens[index], step.seq_lens[index]
        start = 0 if attention.sliding_window is None else max(num_keys - num_queries - attention.sliding_window + 1, 0)
        table, dtype = step.block_tables[index : index + 1], row_dtype(query.dtype, step.layout)
        rows, _ = ops.gather_cache(step.caches[layer], table, [num_keys - start], seq_starts=[start], dtype=dtype)
        return rows.squeeze(1).to(query.dtype)

    def _attend_in_place(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        heads: LatentHeads,
        layer: int,
        attention: Attention,
        step: Step,
    ) -> torch.Tensor:
        """Attend from all of the step's queries to the rows of their sequences, in place."""
        attention = replace(attention, value_size=heads.rank)
        sums = attend_rows(heads.turned(query), rows, rows[..., : heads.rank], layer, step, attention)
        return heads.turned_back(sums)


def _concatenated(parts: Sequence[slice]) -> torch.Tensor:
    """Return the indices of all parts, int64."""
    return torch.cat([torch.arange(part.start, part.stop) for part in parts] or [torch.empty(0, dtype=torch.int64)])
