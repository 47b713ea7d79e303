"""REFUSED: vLLM's operations on caches that are not served here, and why."""

from collections.abc import Mapping
from types import MappingProxyType

_FUSED = "it computes norms of one model's projections; write its rows with reshape_and_cache_flash"
_HISPARSE = "it moves entries between vLLM's own host and device tables; kvpage.CacheEngine swaps blocks"
_CPU = "it is of vLLM's CPU backend; the operations here work on the CPU under their usual names"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "amx_mla_concat_and_cache": _CPU,
        "cp_gather_and_upconvert_nvfp4_kv_cache": "kvpage keeps no 4-bit floats; vLLM's needs a GPU of SM100",
        "cpu_attention_with_kv_cache": "it attends; kvpage.ops.paged_attention does",
        "cpu_attn_reshape_and_cache": _CPU,
        "fused_minimax_m3_qknorm_rope_kv_insert": _FUSED,
        "fused_muse_spark_qknorm_rope_kv_insert": _FUSED,
        "fused_qknorm_rope_cache": _FUSED,
        "gather_mla_context_cache_cpu": _CPU,
        "hisparse_gather_compact": _HISPARSE,
        "hisparse_gather_plan": _HISPARSE,
        "hisparse_invalidate_written_slots": _HISPARSE,
        "hisparse_resolve_residency": _HISPARSE,
        "mla_decode_kvcache_cpu": "it attends; kvpage.ops.paged_attention does",
        "paged_attention_rocm": "it attends, on ROCm; kvpage.ops.paged_attention attends on CUDA and the CPU",
    }
)


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module lacks, with the reason where it is a refused operation."""
    reason = REFUSED.get(name)
    why = f": this operation of vLLM is not served, {reason}" if reason else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{why}", name=name)
