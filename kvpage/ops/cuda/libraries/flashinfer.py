"""FlashInfer's calls, as of 0.2.14 to 0.7.2: wrappers that are planned for the lengths of a step, then run.

    decodes   BatchDecodeWithPagedKVCacheWrapper        the rest   BatchPrefillWithPagedKVCacheWrapper
    latents   BatchMLAPagedAttentionWrapper, for both

A wrapper is kept for each set of options and each layout, since it owns 8 MiB on the device and as much pinned. Another
step may have planned it meanwhile: then a run plans again.
"""

from collections.abc import Callable
from typing import Any

import torch

from kvpage.layout.cache_layout import CacheLayout
from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.cuda.libraries.library import PlanOptions
from kvpage.ops.cuda.libraries.parts import Part, indptr, num_blocks_of, used_block_ids
from kvpage.ops.cuda.libraries.rules import LATENT_RANK, LATENT_SIZE

WORKSPACE_BYTES = 256 << 20
GROUPS_OF_DECODE = (1, 2)  # query heads of a KV head; for more of them, tensor cores are faster, or the only way


class PlannedWrapper:
    """A wrapper of FlashInfer, and the number of its plan.

    Args:
        wrapper: FlashInfer's.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper, self.number = wrapper, 0
        self._uploaded: torch.cuda.Event | None = None

    def plan(self, device: torch.device, *args: Any, **options: Any) -> int:
        """Plan, and return the plan's number. A plan is written to pinned memory that the last one may still leave."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        self.wrapper.plan(*args, **options)
        if device.type == "cuda":
            self._uploaded = torch.cuda.current_stream(device).record_event()
        self.number += 1
        return self.number


class PlannedCall:
    """A part of a step, planned in a wrapper.

    Args:
        wrapper: Of the part's options.
        plan: Plans the wrapper for a part, and returns the plan's number.
        run: Runs the wrapper on (query, cache, out).
        part: The sequences.
    """

    def __init__(
        self,
        wrapper: PlannedWrapper,
        plan: Callable[[Part], int],
        run: Callable[[torch.Tensor, BoundCache, torch.Tensor | None], torch.Tensor],
        part: Part,
    ) -> None:
        self._wrapper, self._plan, self._run, self._part = wrapper, plan, run, part
        self._number = plan(part)

    def __call__(self, query: torch.Tensor, cache: BoundCache, out: torch.Tensor | None) -> torch.Tensor:
        """Attend; another step's plan in the wrapper is replaced before."""
        if self._number != self._wrapper.number:
            self._number = self._plan(self._part)
        return self._run(query, cache, out)

    def plan_again(self, part: Part) -> None:
        """Renew the plan for other lengths."""
        self._part, self._number = part, self._plan(part)


def _paging(part: Part, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bounds of each sequence's blocks, the block ids, and the tokens in each last block: int32."""
    bounds = indptr(num_blocks_of(part, block_size))
    last = torch.tensor([(length - 1) % block_size + 1 for length in part.seq_lens], dtype=torch.int32)
    return bounds, used_block_ids(part, block_size), last


def _pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values of the host that a plan uploads without a wait."""
    return values.pin_memory() if device.type == "cuda" else values


class FlashInferHeads:
    """FlashInfer over blocks of K and V.

    Args:
        library: The module flashinfer.
        device: The caches'.
    """

    decodes_only = False
    plans_in_graphs = False

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[bool, PlanOptions, CacheLayout], PlannedWrapper] = {}

    def plan(self, part: Part, cache: BoundCache, options: PlanOptions) -> PlannedCall:
        """Plan a part of a step."""
        key = part.is_decode, options, cache.layout
        if key not in self._wrappers:
            make = self._make_decode if part.is_decode else self._make_prefill
            self._wrappers[key] = PlannedWrapper(make(cache, options))
        return self._planned(self._wrappers[key], part, cache, options)

    def plan_fixed(self, part: Part, cache: BoundCache, options: PlanOptions) -> PlannedCall:
        """Plan decodes in tensors of their own that keep their memory."""
        num_seqs, max_blocks = part.block_tables.shape
        sizes = {"indptr": num_seqs + 1, "indices": num_seqs * max_blocks, "last_page_len": num_seqs}
        buffers = {
            f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=cache.device)
            for name, size in sizes.items()
        }
        wrapper = PlannedWrapper(self._make_decode(cache, options, use_cuda_graph=True, **buffers))
        return self._planned(wrapper, part, cache, options)

    def _make_decode(self, cache: BoundCache, options: PlanOptions, **fixed: Any) -> Any:
        group = options.num_heads // cache.layout.num_kv_heads
        with_tensor_cores = group not in GROUPS_OF_DECODE or cache.layout.is_quantized
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, cache.layout.kv_layout, use_tensor_cores=with_tensor_cores, **fixed
        )

    def _make_prefill(self, cache: BoundCache, options: PlanOptions) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, cache.layout.kv_layout)

    def _planned(self, wrapper: PlannedWrapper, part: Part, cache: BoundCache, options: PlanOptions) -> PlannedCall:
        layout, device = cache.layout, cache.device
        sizes = options.num_heads, layout.num_kv_heads, layout.head_size, layout.block_size
        numbers = {
            "window_left": -1 if options.sliding_window is None else options.sliding_window - 1,
            "logits_soft_cap": options.softcap,
            "q_data_type": options.dtype,
            "kv_data_type": layout.dtype,
            "sm_scale": options.scale,
            "non_blocking": True,
        }

        def plan(part: Part) -> int:
            bounds, block_ids, last = _paging(part, layout.block_size)
            pages = _pinned(bounds, device), block_ids, _pinned(last, device)
            if part.is_decode:
                return wrapper.plan(device, *pages, *sizes, **numbers)
            queries = _pinned(indptr(part.query_lens), device)
            return wrapper.plan(device, queries, *pages, *sizes, causal=True, **numbers)

        def run(query: torch.Tensor, cache: BoundCache, out: torch.Tensor | None) -> torch.Tensor:
            scales = cache.scale_numbers
            factors = {} if scales is None else {"k_scale": scales[0], "v_scale": scales[1]}
            result: torch.Tensor = wrapper.wrapper.run(query, _pages(cache), out=out, **factors)
            return result if out is None else out

        return PlannedCall(wrapper, plan, run, part)


def _pages(cache: BoundCache) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as FlashInfer's layouts have them: blocks, then tokens and heads (NHD) or heads and tokens (HND)."""
    assert cache.value is not None
    rows = cache.key.rows.squeeze(3), cache.value.rows.squeeze(3)
    return rows if cache.layout.kv_layout == "NHD" else (rows[0].transpose(1, 2), rows[1].transpose(1, 2))


class FlashInferLatents:
    """FlashInfer over blocks of latents.

    Args:
        library: The module flashinfer.
        device: The caches'.
    """

    decodes_only = False
    plans_in_graphs = False

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[bool, PlanOptions, CacheLayout], PlannedWrapper] = {}

    def plan(self, part: Part, cache: BoundCache, options: PlanOptions) -> PlannedCall:
        """Plan a part of a step."""
        key = part.is_decode, options, cache.layout
        if key not in self._wrappers:
            self._wrappers[key] = PlannedWrapper(self._library.mla.BatchMLAPagedAttentionWrapper(self._workspace))
        return self._planned(self._wrappers[key], part, cache, options)

    def plan_fixed(self, part: Part, cache: BoundCache, options: PlanOptions) -> PlannedCall:
        """Plan decodes in tensors of their own that keep their memory."""
        num_seqs, max_blocks = part.block_tables.shape
        sizes = {"qo_indptr": num_seqs + 1, "kv_indptr": num_seqs + 1, "kv_indices": num_seqs * max_blocks}
        buffers = {
            name: torch.zeros(size, dtype=torch.int32, device=cache.device)
            for name, size in {**sizes, "kv_len_arr": num_seqs}.items()
        }
        make = self._library.mla.BatchMLAPagedAttentionWrapper
        wrapper = PlannedWrapper(make(self._workspace, use_cuda_graph=True, **buffers))
        return self._planned(wrapper, part, cache, options)

    def _planned(self, wrapper: PlannedWrapper, part: Part, cache: BoundCache, options: PlanOptions) -> PlannedCall:
        layout, device = cache.layout, cache.device

        def plan(part: Part) -> int:
            bounds, block_ids, _ = _paging(part, layout.block_size)
            lengths = torch.tensor(part.seq_lens, dtype=torch.int32)
            return wrapper.plan(
                device,
                _pinned(indptr(part.query_lens), device),
                _pinned(bounds, device),
                block_ids,
                _pinned(lengths, device),
                options.num_heads,
                LATENT_RANK,
                LATENT_SIZE - LATENT_RANK,
                layout.block_size,
                True,
                options.scale,
                options.dtype,
                layout.dtype,
            )

        def run(query: torch.Tensor, cache: BoundCache, out: torch.Tensor | None) -> torch.Tensor:
            both = query, cache.tensor
            (latent, latents), (rotary, rotaries) = (
                tuple(rows[..., part] for rows in both)
                for part in (slice(LATENT_RANK), slice(LATENT_RANK, LATENT_SIZE))
            )
            result: torch.Tensor = wrapper.wrapper.run(latent, rotary, latents, rotaries, out=out)
            return result if out is None else out

        return PlannedCall(wrapper, plan, run, part)
