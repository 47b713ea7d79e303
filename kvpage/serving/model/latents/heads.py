"""LatentHeads: K and V that one layer of MLA makes of its latents for each head, and the two ways to attend.

c: a token's latent. A, B: a head's weights.

    expanded   K = [ A c | k_rot ], V = B c                          a query costs less, all keys are expanded first
    turned     q = [ Aᵀ q_nope | q_rot ] over rows [ c | k_rot ],    a query costs more, rows are read in place
               then B (sum of p c)
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from kvpage.layout.attention import Attention
from kvpage.serving.model.dense_attention import attend

PROJECTION = "kv_b_proj"
"""The name, in every family, of the linear layer that makes K and V of heads out of latents."""
MAX_EXPANDED = 1 << 24  # numbers of K and V at once: 64 MiB in fp32


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Views of a layer's weights, taken at every call: weights that change in place are followed.

    key: A, [heads, size of k_nope, rank]. value: B, [heads, size of v, rank].
    """

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of_layer(cls, module: nn.Module, num_heads: int, value_size: int) -> "LatentHeads":
        """Return the views. ValueError, with the reason, for adapters and packed weights: they are no product."""
        name, projection = type(module).__name__, module._modules.get(PROJECTION)
        if not isinstance(projection, nn.Linear) or projection.bias is not None:
            raise ValueError(
                f"{PROJECTION} must be a torch.nn.Linear without bias for backend 'mla', that of {name} is "
                f"{projection!r}; backend 'flash' keeps expanded heads"
            )
        weight: torch.Tensor = projection.weight
        if hasattr(weight, "to_local"):  # of this rank's heads
            weight = weight.to_local()
        if weight.dim() != 2 or len(weight) % num_heads or len(weight) <= num_heads * value_size:
            raise ValueError(
                f"{PROJECTION} must make K and V, {value_size} numbers each, for {num_heads} heads, that of {name} has "
                f"a weight of {tuple(weight.shape)}"
            )
        sizes = [len(weight) // num_heads - value_size, value_size]
        return cls(*weight.unflatten(0, (num_heads, -1)).split(sizes, dim=1))

    @property
    def nope_size(self) -> int:
        return self.key.shape[1]

    @property
    def rank(self) -> int:
        return self.key.shape[2]

    def rows(self, latent: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return [ c | k_rot ] of each token, [num_tokens, 1, size], from latents [num_tokens, rank] and expanded K."""
        return torch.cat([latent, key[:, 0, self.nope_size :]], dim=1).unsqueeze(1)

    def turned(self, query: torch.Tensor) -> torch.Tensor:
        """Turn queries for heads into queries for rows: both [num_tokens, heads, size]."""
        nope, rot = torch.split(query.transpose(0, 1), [self.nope_size, query.shape[2] - self.nope_size], dim=2)
        return torch.cat([torch.bmm(nope, self.key), rot], dim=2).transpose(0, 1)

    def turned_back(self, sums: torch.Tensor) -> torch.Tensor:
        """Turn sums of latents into sums of values: both [num_tokens, heads, size]."""
        return torch.bmm(sums.transpose(0, 1), self.value.transpose(1, 2)).transpose(0, 1)

    def expanded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expand rows [num_tokens, size] to K and V of each head, [num_tokens, heads, size]."""
        latent, rot = torch.split(rows, [self.rank, rows.shape[1] - self.rank], dim=1)
        key, value = (torch.einsum("tr,hsr->ths", latent, weight) for weight in (self.key, self.value))
        return torch.cat([key, rot.unsqueeze(1).expand(-1, key.shape[1], -1)], dim=2), value

    def gains_by_expanding(self, num_queries: int) -> bool:
        """Return whether num_queries queries of a sequence pay for expanding its keys, by the number of products."""
        expanded_size = self.nope_size + self.value.shape[1]
        return num_queries * (2 * self.rank - expanded_size) > self.rank * expanded_size

    def attend_expanded(self, query: torch.Tensor, rows: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Attend from a sequence's last queries to its rows, a few expanded heads at a time.

        query: [num_queries, heads, size]. rows: [num_keys, size]. Returns [num_queries, heads, size of v].
        """
        num_heads, value_size, _ = self.value.shape
        numbers = len(rows) * (query.shape[2] + value_size)
        step, outputs = max(MAX_EXPANDED // max(numbers, 1), 1), []
        for begin in range(0, num_heads, step):
            part = slice(begin, begin + step)
            heads = LatentHeads(self.key[part], self.value[part])
            part_attention = attention if attention.sinks is None else replace(attention, sinks=attention.sinks[part])
            outputs.append(attend(query[:, part], *heads.expanded(rows), part_attention))
        return torch.cat(outputs, dim=1)
