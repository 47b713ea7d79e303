"""Shard: which part of which model's K and V a rank of SGLang has. Records of one part are read by its owners only."""

import json
from dataclasses import dataclass
from typing import Any

from kvpage.integrations.sglang.weights import ServedModel
from kvpage.store.bytes.header import Value

FORMAT = 2
"""Of the records that this integration writes. Another number finds none of them."""

REPLICATED = ("kv", "indexer", "draft_indexer")
REPLICATED_CLASSES = ("MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool")
FACTS = (
    "dtype", "layout", "page_size", "logical_page_size", "size_per_token", "layer_num", "head_num", "head_dim",
    "v_head_dim", "kv_cache_dim", "start_layer", "end_layer", "dcp_size", "storage_format_tag",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank, and whether all ranks of its group have the same K and V, as with latents.

    Attributes:
        model: The name by which SGLang serves the model.
        is_replicated: Whether tensor-parallel ranks have the same pages. One of them writes.
        tp: Rank and size of the tensor-parallel group.
        pp: The same of pipeline stages.
        cp: The same of the context-parallel group.
        dcp: The same of the group that shares out a decode step's context.
        dp: Rank among replicas; they have the same parts.
    """

    model: str | None
    is_replicated: bool
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)
    dp: int = 0

    @classmethod
    def of(cls, config: Any) -> "Shard":
        """Read a rank from SGLang.

        Args:
            config: Its HiCacheStorageConfig.

        Returns:
            The rank.
        """
        return cls(
            config.model_name,
            config.is_mla_model,
            (config.tp_rank, config.tp_size),
            (config.pp_rank, config.pp_size),
            (config.attn_cp_rank, config.attn_cp_size),
            (config.dcp_rank, config.dcp_size),
            config.dp_rank,
        )

    @property
    def name(self) -> str:
        """The rank's own name, for its folder."""
        return f"dp{self.dp}-pp{self.pp[0]}-cp{self.cp[0]}-tp{self.tp[0]}"

    def header(
        self, model: str | None, kv_cache_dtype: str | None, version: str, served: ServedModel
    ) -> dict[str, Value]:
        """Return the facts that all records of a store depend on.

        Args:
            model: A name that the user gave the weights. None for one by their files.
            kv_cache_dtype: See HiCacheSettings. None for SGLang's own.
            version: Of SGLang.
            served: Its configuration.

        Returns:
            A header for a ByteStore.

        Raises:
            ValueError: The settings do not name the weights, and SGLang does not tell where they are.
            OSError: A file of theirs cannot be read.
        """
        return {
            "engine": "sglang",
            "version": version,
            "format": FORMAT,
            "model": model or self.model,
            "weights": "named" if model else served.weights(),
            "settings": served.settings(),
            "kv_cache_dtype": kv_cache_dtype or served.kv_cache_dtype,
        }

    def scope(self, name: str, pool: Any, way: str) -> bytes:
        """Return the facts that the records of a pool depend on besides the header, as the beginning of their keys.

        Args:
            name: The pool's name, such as "kv" or "mamba".
            pool: The HostKVCache, or another with its attributes.
            way: How its pages become bytes.

        Returns:
            The encoding; other facts have another.
        """
        facts = {fact: str(getattr(pool, fact, None)) for fact in FACTS}
        group = None if self._all_have(name, pool) else self.tp
        parts = [name, way, type(pool).__name__, facts, group, self.pp, self.cp, self.dcp]
        return json.dumps(parts, sort_keys=True).encode() + b"\0"

    def _all_have(self, name: str, pool: Any) -> bool:
        """Whether all tensor-parallel ranks have the pool's pages. Where that is not known, each has its own."""
        if not self.is_replicated or name == "mamba":
            return False
        classes = {base.__name__ for base in type(pool).__mro__}
        return name in REPLICATED or not classes.isdisjoint(REPLICATED_CLASSES)
