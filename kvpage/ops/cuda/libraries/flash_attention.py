"""FlashAttention's calls: of flash_attn 2.7 and 2.8, and of flash_attn_3 3.0.

    flash_attn     decodes   flash_attn_with_kvcache, one query each      the rest   flash_attn_varlen_func
    flash_attn_3   all       flash_attn_with_kvcache, queries of each sequence bounded by cu_seqlens_q

Their plan is a few tensors on the device: int32 lengths, and bounds of the queries.
"""

from typing import Any

import torch

from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.cuda.libraries.library import PlanOptions, Run
from kvpage.ops.cuda.libraries.parts import Part, indptr, on_device


class FixedCall:
    """A decode whose lengths keep their memory.

    Args:
        lengths: int32, on the device.
        run: The call that reads them.
    """

    def __init__(self, lengths: torch.Tensor, run: Run) -> None:
        self._lengths, self._run = lengths, run

    def __call__(self, query: torch.Tensor, cache: BoundCache, out: torch.Tensor | None) -> torch.Tensor:
        """Attend."""
        return self._run(query, cache, out)

    def plan_again(self, part: Part) -> None:
        """Write other lengths."""
        self._lengths.copy_(on_device(_int32(part.seq_lens), part.device))


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _options(options: PlanOptions) -> dict[str, Any]:
    """The keywords that all of the calls have. A window of n keys reaches n - 1 to the left."""
    reach = -1 if options.sliding_window is None else options.sliding_window - 1
    return {
        "softmax_scale": options.scale,
        "causal": True,
        "window_size": (reach, -1 if reach < 0 else 0),
        "softcap": options.softcap or 0.0,
    }


def _rows(cache: BoundCache) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [num_blocks, block_size, num_kv_heads, head_size], strided."""
    assert cache.value is not None
    return cache.key.rows.squeeze(3), cache.value.rows.squeeze(3)


class FlashAttention2:
    """flash_attn over blocks of K and V.

    Args:
        library: The module flash_attn.
    """

    decodes_only = False
    plans_in_graphs = False

    def __init__(self, library: Any) -> None:
        self._library = library

    def plan(self, part: Part, cache: BoundCache, options: PlanOptions) -> Run:
        """Plan a part of a step."""
        lengths = on_device(_int32(part.seq_lens), part.device)
        return self._decode(part, lengths, options) if part.is_decode else self._rest(part, options)

    def plan_fixed(self, part: Part, cache: BoundCache, options: PlanOptions) -> FixedCall:
        """Plan decodes whose lengths keep their memory."""
        lengths = on_device(_int32(part.seq_lens), part.device).clone()
        return FixedCall(lengths, self._decode(part, lengths, options))

    def _decode(self, part: Part, lengths: torch.Tensor, options: PlanOptions) -> Run:
        keywords = {**_options(options), "cache_seqlens": lengths, "block_table": part.block_tables}

        def run(query: torch.Tensor, cache: BoundCache, out: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = self._library.flash_attn_with_kvcache(query.unsqueeze(1), *_rows(cache), **keywords)
            return result.squeeze(1)

        return run

    def _rest(self, part: Part, options: PlanOptions) -> Run:
        bounds = [on_device(indptr(lengths), part.device) for lengths in (part.query_lens, part.seq_lens)]
        most = max(part.query_lens), max(part.seq_lens)
        keywords = {**_options(options), "block_table": part.block_tables}

        def run(query: torch.Tensor, cache: BoundCache, out: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = self._library.flash_attn_varlen_func(
                query, *_rows(cache), *bounds, *most, **keywords
            )
            return result

        return run


class FlashAttention3:
    """flash_attn_3 over blocks of K and V.

    Args:
        library: The module flash_attn_interface.
    """

    decodes_only = False
    plans_in_graphs = False

    def __init__(self, library: Any) -> None:
        self._library = library

    def plan(self, part: Part, cache: BoundCache, options: PlanOptions) -> Run:
        """Plan a part of a step."""
        return self._call(part, on_device(_int32(part.seq_lens), part.device), options)

    def plan_fixed(self, part: Part, cache: BoundCache, options: PlanOptions) -> FixedCall:
        """Plan decodes whose lengths keep their memory."""
        lengths = on_device(_int32(part.seq_lens), part.device).clone()
        return FixedCall(lengths, self._call(part, lengths, options))

    def _call(self, part: Part, lengths: torch.Tensor, options: PlanOptions) -> Run:
        keywords = {
            **_options(options),
            "cache_seqlens": lengths,
            "page_table": part.block_tables,
            "cu_seqlens_q": on_device(indptr(part.query_lens), part.device),
            "max_seqlen_q": max(part.query_lens),
        }

        def run(query: torch.Tensor, cache: BoundCache, out: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = self._library.flash_attn_with_kvcache(query, *_rows(cache), **keywords)
            return result

        return run
