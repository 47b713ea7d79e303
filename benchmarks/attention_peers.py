"""The peers of bench_paged_attention: libraries that are installed, over the same sequences in blocks of their own.

    flashinfer, flash_attn, flash_attn_3, flash_mla    by kvpage's own rules and calls, planned before
    vllm                                               the paged attention of vLLM's wheel
    cudnn                                              torch's SDPA by cuDNN, over K and V that lie contiguous

Each is compared with the reference before it is timed. One that is not installed, or does not take the case, is left
out; one that fails says why.
"""

import functools
from collections.abc import Callable, Collection, Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvpage import ops
from kvpage.benchmarks.paged_case import Case
from kvpage.layout.attention import Attention
from kvpage.ops.args.sequences import Sequences
from kvpage.ops.cuda.libraries.choice import LIBRARY_ERRORS, candidates
from kvpage.ops.cuda.libraries.rules import RULES, LibraryRules

Call = Callable[[], torch.Tensor]
SETTLED_BYTES = 1 << 28
TARGETS = {"decode, bf16": 0.85, "decode, fp8": 0.7, "decode, few heads of latents": 0.5, "decode, latents": 0.7}
FEW_HEADS = 16


def peers_of(case: Case, without: Collection[str] = ()) -> Iterator[tuple[str, Call]]:
    """Yield the name and the call of each peer that takes the case, checked. One is dropped before the next is made;
    those of `without` are not even made, as some compile for long.
    """
    makers: list[tuple[str, Callable[[], Call | None]]] = [
        (rules.name, functools.partial(library_call, case, rules)) for rules in RULES
    ]
    makers += [("vllm", functools.partial(vllm_call, case)), ("cudnn", functools.partial(cudnn_call, case))]
    for name, make in makers:
        if name in without:
            continue
        try:
            call = make()
        except LIBRARY_ERRORS as error:
            print(f"{name} is left out: {error}")
            continue
        if call is not None:
            yield name, call


def library_call(case: Case, rules: LibraryRules) -> Call | None:
    """Return the library's call in blocks that it takes, or None where it is not installed or takes none."""
    multiple = rules.block_multiple
    size = case.layout.block_size if case.layout.block_size % multiple == 0 else multiple
    own = case if size == case.layout.block_size else case.in_blocks_of(min(size, rules.most_block))
    try:
        library = candidates(rules.name, own.layout, own.cache.device)[0]
    except ValueError:
        return None
    if library.rules is not rules:
        return None
    bound, num_seqs = ops.BoundCache(own.cache, own.layout), own.num_seqs
    bound.use_library(library())
    sequences = Sequences(bound, len(own.query), own.tables, [own.length] * num_seqs, [own.num_queries] * num_seqs)
    options = Attention(scale=own.query.shape[2] ** -0.5, value_size=own.model.value_size)
    assert bound.library is not None
    attend = bound.library.attend

    def call() -> torch.Tensor:
        found = attend(own.query, bound, sequences, options)
        if found is None:
            raise RuntimeError("it computes other steps only")
        return found

    own.check(call())
    return call


def vllm_call(case: Case) -> Call | None:
    """Return vLLM's own paged attention, or None where it is not installed or the case is not of its kind."""
    if case.layout.dtype != torch.bfloat16 or case.layout.backend != "flash":
        return None
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    device, num_seqs = case.cache.device, case.num_seqs
    bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * case.num_queries
    lengths = torch.full((num_seqs,), case.length, dtype=torch.int32, device=device)
    key, value = case.cache[0], case.cache[1]

    def call() -> torch.Tensor:
        found: torch.Tensor = flash_attn_varlen_func(
            case.query, key, value, max_seqlen_q=case.num_queries, cu_seqlens_q=bounds, max_seqlen_k=case.length,
            seqused_k=lengths, softmax_scale=case.query.shape[2] ** -0.5, causal=True, block_table=case.tables,
        )  # fmt: skip
        return found

    case.check(call())
    return call


def cudnn_call(case: Case) -> Call | None:
    """Return cuDNN's attention over K and V gathered before, or None where the case is not of its kind."""
    if case.layout.dtype != torch.bfloat16 or case.layout.backend != "flash" or case.cache.device.type != "cuda":
        return None
    shape = case.num_seqs, case.length, case.layout.num_kv_heads, case.layout.head_size
    key, value = (part[case.tables.long()].reshape(shape).transpose(1, 2).contiguous() for part in case.cache)
    query = case.query.view(case.num_seqs, case.num_queries, *case.query.shape[1:]).transpose(1, 2)

    def call() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            found = F.scaled_dot_product_attention(query, key, value, is_causal=case.num_queries > 1, enable_gqa=True)
        return found.transpose(1, 2)

    case.check(call().reshape(case.query.shape))
    return call


def target_of(case: Case, num_bytes: int) -> float | None:
    """Return the part of the bound that decoding should reach on an H200; None for others and for few bytes."""
    if case.num_queries > 1 or num_bytes < SETTLED_BYTES or case.layout.dtype == torch.int8:
        return None
    if case.layout.backend == "mla":
        return TARGETS["decode, few heads of latents" if case.model.num_heads <= FEW_HEADS else "decode, latents"]
    return TARGETS["decode, bf16" if case.layout.dtype.itemsize == 2 else "decode, fp8"]
