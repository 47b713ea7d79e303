"""FlashMLA's call, as of 1.0.0: decoding over blocks of latents.

    get_mla_metadata ─► a plan of tiles, once a step ─► flash_mla_with_kvcache, once a layer

Its first versions make the plan from the lengths; later ones make it in the first call that has it.
"""

from typing import Any

import torch

from kvpage.ops.args.bound_cache import BoundCache
from kvpage.ops.cuda.libraries.library import PlanOptions, Run
from kvpage.ops.cuda.libraries.parts import Part, on_device
from kvpage.ops.cuda.libraries.rules import LATENT_RANK


class FlashMLA:
    """flash_mla over blocks of latents.

    Args:
        library: The module flash_mla.
    """

    decodes_only = True
    plans_in_graphs = False

    def __init__(self, library: Any) -> None:
        self._library = library

    def plan(self, part: Part, cache: BoundCache, options: PlanOptions) -> Run:
        """Plan a step."""
        lengths = on_device(torch.tensor(part.seq_lens, dtype=torch.int32), part.device)
        metadata, num_splits = self._library.get_mla_metadata(lengths, options.num_heads, 1)

        def run(query: torch.Tensor, cache: BoundCache, out: torch.Tensor | None) -> torch.Tensor:
            result, _ = self._library.flash_mla_with_kvcache(
                query.contiguous().unsqueeze(1),
                cache.tensor.unsqueeze(2),
                part.block_tables,
                lengths,
                LATENT_RANK,
                metadata,
                num_splits,
                softmax_scale=options.scale,
                causal=True,
            )
            rows: torch.Tensor = result
            return rows.squeeze(1)

        return run

    def plan_fixed(self, part: Part, cache: BoundCache, options: PlanOptions) -> None:
        """Plan nothing: the tiles' plan would be that of the lengths at the capture."""
        return None
