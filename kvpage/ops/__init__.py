"""The door to every operation: blocks are moved, rows written and gathered, attended over, blended.

Each operation validates its arguments and picks the implementation: `cpu`, `cuda`, or the plain torch of `reference`.
No other package of kvpage comes near a kernel. `_operation` declares an operation for torch, with all that it writes.
In code that torch.compile or a dispatch mode of torch (fake tensors) traces, it then stands for its operator in
torch.ops.kvpage, which does the same at run time. The operations of blending are not traced: kvpage never compiles the
code that calls them. Products and norms (`linear`, `rms_norm`) are torch's own in traced code.
"""

import torch

from kvpage.layout.attention import Attention as Attention
from kvpage.layout.rotation import Rotation as Rotation
from kvpage.layout.sampling_record import RECORD_WORDS as SAMPLING_RECORD_WORDS
from kvpage.layout.sampling_record import SAMPLING_RECORD as SAMPLING_RECORD
from kvpage.ops import attention as _attention
from kvpage.ops import chunks as _chunks
from kvpage.ops import copies as _copies
from kvpage.ops import layer as _layer
from kvpage.ops import rows as _rows
from kvpage.ops.args.bound_cache import BoundCache as BoundCache
from kvpage.ops.args.sequences import Sequences as Sequences
from kvpage.ops.blend import mix_rows as mix_rows
from kvpage.ops.blend import row_deviation as row_deviation
from kvpage.ops.copies import BlockCopier as BlockCopier
from kvpage.ops.cpu.linear import gated_linear as gated_linear
from kvpage.ops.cpu.linear import has_fast_linear as has_fast_linear
from kvpage.ops.cpu.linear import linear as linear
from kvpage.ops.cpu.norm import add_rms_norm as add_rms_norm
from kvpage.ops.cpu.norm import rms_norm as rms_norm
from kvpage.ops.cuda import sampling as _sampling
from kvpage.ops.cuda.attention import attends_in_place as attends_in_place
from kvpage.ops.cuda.rows import check_device as check_device
from kvpage.ops.cuda.sampling import SamplingMemory as SamplingMemory
from kvpage.ops.cuda.sampling import can_sample_rows as can_sample_rows
from kvpage.ops.operation import operation as _operation
from kvpage.ops.operation import or_traced as _or_traced
from kvpage.ops.shared_prefixes import shared_prefixes as shared_prefixes

__all__ = [
    "SAMPLING_RECORD",
    "SAMPLING_RECORD_WORDS",
    "Attention",
    "BlockCopier",
    "BoundCache",
    "Rotation",
    "SamplingMemory",
    "Sequences",
    "add_rms_norm",
    "attend",
    "attends_in_place",
    "can_sample_rows",
    "check_device",
    "copy_blocks",
    "gated_linear",
    "gather_cache",
    "has_fast_linear",
    "linear",
    "load_chunk",
    "mix_rows",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "row_deviation",
    "sample_rows",
    "shared_prefixes",
    "store_chunk",
    "swap_blocks",
    "swap_blocks_layers",
    "write_and_attend",
]

reshape_and_cache = _operation(_rows.reshape_and_cache, ["cache"])
gather_cache = _operation(_rows.gather_cache, ["out"], make_out=_rows.make_out)
paged_attention = _operation(_attention.paged_attention, ["out"], make_out=_attention.make_out, run=_attention.fill)
swap_blocks = _operation(_copies.swap_blocks, ["dst"])
swap_blocks_layers = _operation(_copies.swap_blocks_layers, ["dsts"])
copy_blocks = _operation(_copies.copy_blocks, ["caches"])
store_chunk = _operation(_chunks.store_chunk, ["chunk"], eager_only=["num_threads"])
load_chunk = _operation(_chunks.load_chunk, ["caches"], eager_only=["num_threads"])
sample_rows = _operation(_sampling.sample_rows, ["out", "memory"], run=_sampling.sample_rows_in)


def _traced_attend(
    query: torch.Tensor,
    cache: BoundCache,
    sequences: Sequences,
    attention: Attention,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return paged_attention(
        query,
        cache,
        sequences.block_tables,
        sequences.seq_lens,
        attention=attention,
        query_lens=sequences.query_lens,
        out=out,
        max_query_len=sequences.max_query_len,
        max_seq_len=sequences.max_seq_len,
        shared=sequences.shared,
    )


def _traced_write_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: BoundCache,
    slot_mapping: torch.Tensor,
    sequences: Sequences,
    attention: Attention,
) -> torch.Tensor:
    reshape_and_cache(key[0].transpose(0, 1), value[0].transpose(0, 1), cache, slot_mapping)
    return attend(query[0].transpose(0, 1), cache, sequences, attention).unsqueeze(0)


attend = _or_traced(_attention.attend, _traced_attend)
write_and_attend = _or_traced(_layer.write_and_attend, _traced_write_and_attend)
