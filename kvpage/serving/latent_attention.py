"""LatentPass: attention of one forward pass over blocks that hold the latents of MLA instead of heads' K and V.

A layer of DeepSeek's kind makes K and V of all heads out of one small row a token. That row is what the blocks keep:

    hidden ─► kv_a_proj ─┬─► norm ─► latent c ─► kv_b_proj ─► k_nope = A c and v = B c of each head
                         └─► rotary ─► k_rot, one for all heads
                                                        blocks: [ c | k_rot ] a token

A head's score is q_nope · A c + q_rot · k_rot = (Aᵀ q_nope) · c + q_rot · k_rot, and its output is B (sum of p c). So
queries are brought to the latents' side, all heads read each row as it lies, and only their sums are brought back.
A sequence that begins in this pass has all of its K and V at hand, from the model itself, and is attended to by these:
a query costs less there, with heads smaller than latents.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from kvpage import ops
from kvpage.serving.attention import attend_rows, row_dtype
from kvpage.serving.dense_attention import AttentionOptions, attend
from kvpage.serving.step import Step

PROJECTION = "kv_b_proj"
"""The name, in every family, of the linear layer that makes K and V of heads out of latents."""


class HeadWeights(NamedTuple):
    """The projection's weights, views. key: [heads, size of k_nope, rank]. value: [heads, size of v, rank]."""

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of_layer(cls, module: nn.Module, num_heads: int, value_size: int) -> "HeadWeights":
        """ValueError, with the reason, for a layer of another form: adapters and packed weights are no plain product.

        They are read at every call, so that weights which change in place are followed.
        """
        projection = getattr(module, PROJECTION, None)
        if not isinstance(projection, nn.Linear) or projection.bias is not None:
            raise ValueError(
                f"backend 'mla' needs layers whose {PROJECTION} is a torch.nn.Linear without bias, "
                f"{type(module).__name__} has {projection!r}; backend 'flash' keeps the expanded heads"
            )
        weight = projection.weight
        if len(weight) % num_heads or len(weight) <= num_heads * value_size:
            raise ValueError(
                f"{PROJECTION} must make more than {value_size} numbers for each of {num_heads} heads, "
                f"{type(module).__name__} has a weight of {tuple(weight.shape)}"
            )
        key, value = weight.unflatten(0, (num_heads, -1)).split(
            [len(weight) // num_heads - value_size, value_size], dim=1
        )
        return cls(key, value)


class LatentPass:
    """One forward pass of `step`, whose blocks hold latents."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._latents: dict[nn.Module, torch.Tensor] = {}  # what each projection was given last
        lengths = list(zip(step.query_lens, step.seq_lens, strict=True))
        bounds = [0, *accumulate(step.query_lens)]
        self._rows = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        self._begun = [index for index, (new, all_) in enumerate(lengths) if new == all_]
        self._going_on = [index for index, (new, all_) in enumerate(lengths) if new < all_]

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Inside, what the model's projections are given in this thread is kept for `attend`."""
        thread = threading.get_ident()

        def keep(projection: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread and args:
                self._latents[projection] = args[0]

        modules = (getattr(module, PROJECTION, None) for module in model.modules())
        handles = [one.register_forward_pre_hook(keep) for one in modules if isinstance(one, nn.Module)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Writes the latents of a layer's rows, and attends over the blocks: [rows, heads, size of v].

        query, key, value: [rows, heads, size], as the module hands them to its attention function.
        """
        weights = HeadWeights.of_layer(module, query.shape[1], value.shape[2])
        rows = self._take_rows(module, key, weights)
        self._write(rows, layer)
        begun = self._begun if self._keeps(key.dtype) else []
        if not begun:
            return self._attend_latents(query, rows, weights, layer, options, self._step)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        for index in begun:
            part = self._rows[index]
            output[part] = attend(query[part], key[part], value[part], options)
        if self._going_on:
            at = torch.cat([torch.arange(one.start, one.stop) for one in map(self._rows.__getitem__, self._going_on)])
            at, step = at.to(query.device), self._step.of_sequences(self._going_on)
            output[at] = self._attend_latents(query[at], rows[at], weights, layer, options, step)
        return output

    def _keeps(self, dtype: torch.dtype) -> bool:
        """Whether the blocks keep every bit of the model's numbers: else all sequences read what was written."""
        return not self._step.layout.is_quantized and self._step.layout.dtype == dtype

    def _take_rows(self, module: nn.Module, key: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
        """The rows as the blocks keep them: [rows, 1, latent and rotary part]."""
        projection = getattr(module, PROJECTION)
        if projection not in self._latents:
            raise ValueError(f"{PROJECTION} must be called before attention, that of {type(module).__name__} was not")
        latent = self._latents.pop(projection).reshape(len(key), -1)
        rows = torch.cat([latent, key[:, 0, weights.key.shape[1] :]], dim=1).unsqueeze(1)
        if rows.shape[2] != self._step.layout.head_size:
            raise ValueError(
                f"a latent and its rotary part must be {self._step.layout.head_size} numbers by the model's config, "
                f"{type(module).__name__} makes {rows.shape[2]}"
            )
        return rows

    def _write(self, rows: torch.Tensor, layer: int) -> None:
        step = self._step
        rows = rows.to(row_dtype(rows.dtype, step.layout))
        ops.reshape_and_cache(rows, None, step.caches[layer], step.slot_mapping, step.layout, step.scales.get(layer))

    def _attend_latents(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        weights: HeadWeights,
        layer: int,
        options: AttentionOptions,
        step: Step,
    ) -> torch.Tensor:
        """All heads over the rows of all sequences, read where they lie."""
        size, rank = weights.key.shape[1:]
        turned = torch.bmm(query[..., :size].transpose(0, 1), weights.key)  # [heads, rows, rank]
        query = torch.cat([turned, query[..., size:].transpose(0, 1)], dim=2).transpose(0, 1)
        sums = attend_rows(query, rows, rows[..., :rank], layer, step, options)  # [rows, heads, rank]
        return torch.bmm(sums.transpose(0, 1), weights.value.transpose(1, 2)).transpose(0, 1)
