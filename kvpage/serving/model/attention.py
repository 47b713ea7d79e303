"""The attention function that transformers' models call while kvpage serves them.

It writes the new K and V into the step's slots, then attends over the sequences' blocks. It is registered under the
name "kvpage" in AttentionInterface, and deliberately not in AttentionMaskInterface: so the models build no mask at all.
Causality and window are decided here, by the positions in each sequence.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from transformers import AttentionInterface

from kvpage import ops
from kvpage.layout.attention import Attention
from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops import BoundCache
from kvpage.serving.model.dense_attention import attend
from kvpage.serving.model.step import Step

IMPLEMENTATION = "kvpage"
UNCOMPILED = "kvpage_uncompiled"
"""The same function for compiled models. Compiled code ends before it, and goes on after it."""

IN_PLACE_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

current_step: ContextVar[Step | None] = ContextVar("kvpage_step", default=None)
"""The step, for models that drop keywords on the way to the attention function. Others pass the keyword `kvpage`."""


class StepMissing(RuntimeError):
    """The attention function was called without a step: the model drops keywords, or ran outside Engine.step()."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kvpage: Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from the new tokens to all of their sequences: ([1, num_tokens, heads, size of a value], None).

    query: [1, heads, num_tokens, size]. key, value: [1, kv heads, num_tokens, size]. attention_mask, dropout and other
    arguments of a model are ignored: `verify_model` has shown at load that none of them matters.
    """
    step = kvpage or current_step.get()
    if step is None:
        raise StepMissing(f"{type(module).__name__} was called with the implementation 'kvpage' outside Engine.step()")

    def compute(layer: int, step: Step) -> torch.Tensor:
        attention = Attention(scaling or query.shape[3] ** -0.5, sliding_window, softcap, s_aux, value.shape[3])
        return _attend(module, (query, key, value), layer, step, attention)

    return _in_layer(module, step, sliding_window, compute), None


def _in_layer(
    module: torch.nn.Module, step: Step, sliding_window: int | None, compute: Callable[[int, Step], torch.Tensor]
) -> torch.Tensor:
    """Compute attention of a module's layer, with the blocks that are its own: its index, and a step over them."""
    layer = getattr(module, "layer_idx", None)
    if layer not in step.caches and step.states is not None:
        layer = step.next_layer()
    if layer not in step.caches:
        raise ValueError(f"{type(module).__name__} must be of a layer with a cache, got layer_idx {layer!r}")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} of layer {layer} must be causal, is_causal is False")
    step.calls.append((layer, sliding_window))
    writes = layer not in step.sharing
    if step.arrival is not None and writes and layer not in step.windows:  # windows' blocks are moved before the step
        step.arrival.wait_layer(layer)
    of_layer = step.windows.get(layer, step)
    if step.threads is None or step.threads.caller is None:
        output = compute(layer, of_layer)
    else:
        with step.threads.lifted():
            output = compute(layer, of_layer)
    if step.written is not None and writes:
        step.written(layer)
    return output


class HeadAttention:
    """Attention of layers whose heads are written before attention by one operation, which norms and rotates, too."""

    def step_of(self, module: torch.nn.Module, function: object, step: Step | None) -> Step | None:
        """Return the step of a module's layer, if it would write all rows and attend over blocks; else None.

        Args:
            module: Has the layer's index.
            function: The attention function that the module would call.
            step: The argument `kvpage` of its forward; None without.
        """
        step = step or current_step.get()
        layer = getattr(module, "layer_idx", None)
        if step is None or function is not paged_attention or layer not in step.caches or layer in step.sharing:
            return None
        of_layer = step.windows.get(layer, step)
        is_plain = of_layer.takes_all_rows and of_layer.blend is None and of_layer.latents is None
        return step if is_plain else None

    def attend(
        self,
        module: torch.nn.Module,
        step: Step,
        attention: Attention,
        write: Callable[[BoundCache, torch.Tensor], torch.Tensor | None],
        rows: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Write K and V and attend, as paged_attention does: [1, num_tokens, heads, value_size].

        Args:
            module: Of a layer that `step_of` takes.
            step: The one that it returned.
            attention: The options.
            write: Writes K and V to slots of a cache, and returns queries [num_tokens, heads, size]. None: it did
                nothing, and does not take such a cache.
            rows: Returns query, key and value, as paged_attention gets them. Called after a None.
        """

        def compute(layer: int, step: Step) -> torch.Tensor:
            cache = step.caches[layer]
            query = write(cache, step.slot_mapping)
            if query is None:
                return _attend(module, rows(), layer, step, attention)
            return ops.attend(query, cache, step.sequences, attention).unsqueeze(0)

        return _in_layer(module, step, attention.sliding_window, compute)


def _attend(
    module: torch.nn.Module,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layer: int,
    step: Step,
    attention: Attention,
) -> torch.Tensor:
    """Write K and V and attend, in the way of the step. rows: query, key and value, as paged_attention gets them."""
    query, key, value = rows
    cache, writes = step.caches[layer], layer not in step.sharing
    is_plain = writes and step.blend is None and step.latents is None
    if is_plain and step.takes_all_rows and query.dtype == key.dtype == value.dtype and key.dtype in cache.row_dtypes:
        _check_heads(key.shape[1], cache)
        return ops.write_and_attend(query, key, value, cache, step.slot_mapping, step.sequences, attention)
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if step.blend is not None:
        return step.blend.attend(query, key, value, layer, attention).unsqueeze(0)
    if step.latents is not None:
        return step.latents.attend(module, query, key, value, layer, attention).unsqueeze(0)
    if writes:
        write_rows(key, value, layer, step, step.slot_mapping)
    return attend_rows(query, key, value, layer, step, attention).unsqueeze(0)


def write_rows(key: torch.Tensor, value: torch.Tensor | None, layer: int, step: Step, slots: torch.Tensor) -> None:
    """Write row i of key and value, [rows, kv heads, size], into slots[i] of the layer's blocks."""
    cache = step.caches[layer]
    _check_heads(key.shape[1], cache)
    if key.dtype not in cache.row_dtypes:
        key = key.to(cache.row_dtypes[0])
    if value is not None and value.dtype != key.dtype:
        value = value.to(key.dtype)
    ops.reshape_and_cache(key, value, cache, slots)


def _check_heads(num_heads: int, cache: ops.BoundCache) -> None:
    if num_heads != cache.layout.num_kv_heads:
        raise ValueError(f"the layer must have {cache.layout.num_kv_heads} KV heads, as at load, got {num_heads}")


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, step: Step, attention: Attention
) -> torch.Tensor:
    """Attend from the step's rows, whose K and V are written, to their sequences: [rows, heads, value size]."""
    if step.device_query_positions is not None:
        attention = replace(attention, query_positions=step.device_query_positions)
    if query.dtype not in IN_PLACE_DTYPES or not step.attends_in_place:
        return _attend_gathered(query, key, value, layer, step, attention)
    cache = step.caches[layer]
    rows = query if query.dtype in cache.row_dtypes else query.float()
    output = ops.attend(rows, cache, step.sequences, attention)
    return output if rows is query else output.to(query.dtype)


def row_dtype(dtype: torch.dtype, layout: CacheLayout) -> torch.dtype:
    """Return the dtype of rows that a cache takes and gives: its own or, where it quantises, the model's."""
    if not layout.is_quantized:
        return layout.dtype
    return dtype if dtype in IN_PLACE_DTYPES else torch.float32


def _attend_gathered(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: Step,
    attention: Attention,
) -> torch.Tensor:
    """Attend sequence by sequence, over K and V copied out of the blocks as far as the window reaches.

    A sequence that begins needs no copy: its K and V are at hand.
    """
    layout, outputs, begin = step.layout, [], 0
    for index, (num_queries, num_keys) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
        rows = slice(begin, begin + num_queries)
        keys, values = key[rows], value[rows]
        positions = None if step.query_positions is None else step.query_positions[rows].numpy()
        if num_keys > num_queries or layout.dtype != key.dtype:
            tables, dtype = step.block_tables[index : index + 1], row_dtype(key.dtype, layout)
            first = num_keys - num_queries if positions is None else int(positions[0])
            start = 0 if attention.sliding_window is None else max(first - attention.sliding_window + 1, 0)
            positions = None if positions is None else positions - start
            gathered = ops.gather_cache(step.caches[layer], tables, [num_keys - start], seq_starts=[start], dtype=dtype)
            pair = gathered[0], gathered[0] if gathered[1] is None else gathered[1]  # V of latents is where K is
            keys, values = (
                part[..., : rows.shape[-1]].to(rows.dtype) for part, rows in zip(pair, (key, value), strict=True)
            )
        outputs.append(attend(query[rows], keys, values, attention, positions))
        begin += num_queries
    return torch.cat(outputs)


def register() -> None:
    """Make both names known to transformers; it may be called any number of times."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    uncompiled = torch.compiler.disable(paged_attention)  # type: ignore[no-untyped-call, unused-ignore]
    AttentionInterface.register(UNCOMPILED, uncompiled)
