"""Modules in place of flashinfer, flash_attn, flash_attn_interface and flash_mla, which compute on the CPU.

They have the keywords of FlashInfer 0.2.14 to 0.7.2, flash_attn 2.8, flash_attn_3 3.0 and FlashMLA 1.0, and refuse what
these refuse or would read wrongly: shapes, dtypes, strides, index tensors, and runs before a plan. `calls` counts.
"""

import collections
import importlib.machinery
import sys
import types

import torch

INT32 = torch.int32
HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
RANK, LATENT = 512, 576


def need(holds, what):
    if not holds:
        raise RuntimeError(what)


def attended(query, key, value, scale, causal=True, window=(-1, -1), softcap=0.0):
    """One sequence in fp32: query [n, heads, size], key and value [keys, kv heads, size]; the last query sees all."""
    group = query.shape[1] // key.shape[1]
    key, value = (rows.float().repeat_interleave(group, 1) for rows in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(len(key)) - torch.arange(len(key) - len(query), len(key))[:, None]
    unseen = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
    if window[0] >= 0:
        unseen |= ahead < -window[0]
    if window[1] >= 0:
        unseen |= ahead > window[1]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(2), value)


def gathered(pages, ids, length):
    """[length, heads, size] of pages [blocks, tokens, heads, size]."""
    rows = pages[ids.long()].float().flatten(0, 1)
    need(length <= len(rows), "a sequence is longer than its blocks")
    return rows[:length]


def check_index(name, tensor, shape):
    need(torch.is_tensor(tensor) and tensor.dtype == INT32, f"{name} must be int32")
    need(tuple(tensor.shape) == shape, f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    need(tensor.is_contiguous(), f"{name} must be contiguous")


class Fakes:
    """The modules, and the calls of their functions: calls["flashinfer.decode.plan"] and the like."""

    def __init__(self):
        self.calls = collections.Counter()
        self.modules = {
            "flashinfer": self._flashinfer(),
            "flash_attn": self._module(
                "flash_attn", flash_attn_with_kvcache=self.with_kvcache_2, flash_attn_varlen_func=self.varlen_2
            ),
            "flash_attn_interface": self._module("flash_attn_interface", flash_attn_with_kvcache=self.with_kvcache_3),
            "flash_mla": self._module(
                "flash_mla", get_mla_metadata=self.mla_metadata, flash_mla_with_kvcache=self.mla_with_kvcache
            ),
        }

    def install(self, monkeypatch, *names):
        for name in names or self.modules:
            monkeypatch.setitem(sys.modules, name, self.modules[name])

    def _module(self, name, **members):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, origin="a fake")
        for key, value in members.items():
            setattr(module, key, value)
        return module

    def _flashinfer(self):
        fakes = self

        class Decode(_Decode):
            calls = fakes.calls

        class Prefill(_Prefill):
            calls = fakes.calls

        class Latents(_Latents):
            calls = fakes.calls

        return self._module(
            "flashinfer",
            BatchDecodeWithPagedKVCacheWrapper=Decode,
            BatchPrefillWithPagedKVCacheWrapper=Prefill,
            mla=types.SimpleNamespace(BatchMLAPagedAttentionWrapper=Latents),
        )

    def with_kvcache_2(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        self.calls["flash_attn.with_kvcache"] += 1
        need(q.dim() == 4, "q must be [batch, tokens, heads, size]")
        _check_flash(q, k_cache, v_cache, block_table, len(q), 256)
        check_index("cache_seqlens", cache_seqlens, (len(q),))
        rows = [
            _of_flash(query, k_cache, v_cache, table, length, softmax_scale, causal, window_size, softcap)
            for query, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True)
        ]
        return torch.stack(rows)

    def varlen_2(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        self.calls["flash_attn.varlen"] += 1
        num_seqs = len(block_table)
        _check_flash(q, k, v, block_table, num_seqs, 256)
        for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_index(name, bounds, (num_seqs + 1,))
        counts, lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        need(cu_seqlens_q[-1] == len(q) and max(counts) <= max_seqlen_q, "queries beyond max_seqlen_q")
        need(max(lengths) <= max_seqlen_k, "keys beyond max_seqlen_k")
        return torch.cat([
            _of_flash(query, k, v, table, length, softmax_scale, causal, window_size, softcap)
            for query, table, length in zip(torch.split(q, counts), block_table, lengths, strict=True)
        ])  # fmt: skip

    def with_kvcache_3(
        self, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        self.calls["flash_attn_3.with_kvcache"] += 1
        num_seqs = len(page_table)
        _check_flash(q, k_cache, v_cache, page_table, num_seqs, 1)
        check_index("cache_seqlens", cache_seqlens, (num_seqs,))
        check_index("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
        counts = cu_seqlens_q.diff().tolist()
        need(cu_seqlens_q[-1] == len(q) and max(counts) <= max_seqlen_q, "queries beyond max_seqlen_q")
        return torch.cat([
            _of_flash(query, k_cache, v_cache, table, length, softmax_scale, causal, window_size, softcap)
            for query, table, length in zip(torch.split(q, counts), page_table, cache_seqlens.tolist(), strict=True)
        ])  # fmt: skip

    def mla_metadata(self, cache_seqlens, num_heads_per_head_k, num_heads_k):
        self.calls["flash_mla.plan"] += 1
        check_index("cache_seqlens", cache_seqlens, (len(cache_seqlens),))
        need(num_heads_k == 1, "num_heads_k must be 1")
        return {"lengths": cache_seqlens.tolist(), "heads": num_heads_per_head_k}, None

    def mla_with_kvcache(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None,
    ):  # fmt: skip
        self.calls["flash_mla.run"] += 1
        batch, one, heads, size = q.shape
        need(one == 1 and size == LATENT and head_dim_v == RANK and q.dtype in HALVES, "q must be [batch, 1, h, 576]")
        need(k_cache.shape[1:] == (64, 1, LATENT) and k_cache.dtype == q.dtype, "blocks must have 64 latents")
        need(q.is_contiguous() and k_cache.stride(3) == 1, "rows must be contiguous")
        check_index("block_table", block_table, (batch, block_table.shape[1]))
        check_index("cache_seqlens", cache_seqlens, (batch,))
        need(tile_scheduler_metadata == {"lengths": cache_seqlens.tolist(), "heads": heads}, "a plan of other lengths")
        rows = []
        for query, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True):
            latents = gathered(k_cache, table[: -(-length // 64)], length)
            rows.append(attended(query, latents, latents[..., :RANK], softmax_scale, causal))
        return torch.stack(rows).to(q.dtype), None


def _check_flash(q, key, value, table, num_seqs, multiple):
    need(q.dtype in HALVES and key.dtype == value.dtype == q.dtype, "fp16 or bf16, all the same")
    need(key.dim() == 4 and key.shape == value.shape, "pages must be [blocks, tokens, heads, size]")
    need(key.shape[1] % multiple == 0, f"page_block_size must be divisible by {multiple}")
    need(key.shape[3] == q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "the head size does not fit")
    need(all(one.stride(-1) == 1 for one in (q, key, value)), "the last dimension must be contiguous")
    need(table.dtype == INT32 and table.stride(1) == 1 and len(table) == num_seqs, "block_table must be int32")


def _of_flash(query, key, value, table, length, scale, causal, window, softcap):
    need(isinstance(window, tuple) and len(window) == 2 and isinstance(softcap, float), "window_size, softcap")
    ids = table[: -(-length // key.shape[1])]
    rows = gathered(key, ids, length), gathered(value, ids, length)
    return attended(query, *rows, scale, causal, window, softcap).to(query.dtype)


class _Heads:
    """The state that both of FlashInfer's wrappers of heads share."""

    def _keep_pages(self, indptr, indices, last_page_len, page_size):
        num_seqs = len(last_page_len)
        check_index("indptr", indptr, (num_seqs + 1,))
        check_index("last_page_len", last_page_len, (num_seqs,))
        check_index("indices", indices, (int(indptr[-1]),))
        need(
            bool(((last_page_len >= 1) & (last_page_len <= page_size)).all()), "last_page_len must be in [1, page_size]"
        )
        self.page_size = page_size
        if self.fixed is None:
            self.pages = indptr.clone(), indices.clone(), last_page_len.clone()
            return
        need(num_seqs == len(self.fixed[2]), "The batch size should be fixed in cudagraph mode")
        need(len(indices) <= len(self.fixed[1]), "The size of indices should be at most the allocated buffer's")
        for buffer, values in zip(self.fixed, (indptr, indices, last_page_len), strict=True):
            buffer[: len(values)].copy_(values)
        self.pages = self.fixed

    def _keep(self, sizes, options, q_data_type, kv_data_type):
        need(sizes[2] in (64, 128, 256), "Unsupported head_dim")
        need(q_data_type in HALVES and kv_data_type in (q_data_type, *FP8), "dtypes")
        self.sizes, self.options, self.dtypes = sizes, options, (q_data_type, kv_data_type)

    def _run(self, q, cache, counts, k_scale, v_scale, out):
        need(isinstance(cache, tuple) and len(cache) == 2, "paged_kv_cache must be a tuple of K and V")
        key, value = cache if self.layout == "NHD" else (one.transpose(1, 2) for one in cache)
        heads, kv_heads, size = self.sizes
        need(key.shape == value.shape and key.stride() == value.stride(), "K and V must have the same strides")
        need(key.shape[1:] == (self.page_size, kv_heads, size) and key.stride(3) == 1, "pages of another shape")
        inner = (key.stride(1), key.stride(2)) if self.layout == "NHD" else (key.stride(2), key.stride(1))
        need(inner[0] >= inner[1], f"memory is not {self.layout}")
        need(q.shape == (sum(counts), heads, size) and q.stride(2) == 1, f"q of another shape: {tuple(q.shape)}")
        need((q.dtype, key.dtype) == self.dtypes, "dtypes of the plan must be those of the run")
        indptr, indices, last = (one.tolist() for one in self.pages)
        scale, window, softcap = self.options
        rows = []
        for seq, query in enumerate(torch.split(q, counts)):
            ids = torch.tensor(indices[indptr[seq] : indptr[seq + 1]])
            length = (len(ids) - 1) * self.page_size + last[seq]
            both = gathered(key, ids, length), gathered(value, ids, length)
            rows.append(attended(query, *both, scale * (k_scale or 1.0), True, (window, -1), softcap or 0.0))
        result = (torch.cat(rows) * (v_scale or 1.0)).to(q.dtype)
        if out is None:
            return result
        need(out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous(), "out of another form")
        return out.copy_(result)


class _Decode(_Heads):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ):  # fmt: skip
        need(float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer[0], "a workspace of zeros")
        self.layout, self.use_tensor_cores, self.sizes = kv_layout, use_tensor_cores, None
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        need(not use_cuda_graph or all(map(torch.is_tensor, buffers)), "buffers should be tensors in cudagraph mode")
        self.fixed = buffers if use_cuda_graph else None

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None,
        seq_lens=None,
    ):  # fmt: skip
        self.calls["flashinfer.decode.plan"] += 1
        need(self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "Unsupported group_size")
        self._keep_pages(indptr, indices, last_page_len, page_size)
        self._keep((num_qo_heads, num_kv_heads, head_dim), (sm_scale, window_left, logits_soft_cap), q_data_type,
                   kv_data_type)  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None,
    ):  # fmt: skip
        self.calls["flashinfer.decode.run"] += 1
        need(self.sizes is not None and not args, "run before plan")
        return self._run(q, paged_kv_cache, [1] * len(self.pages[2]), k_scale, v_scale, out)


class _Prefill(_Heads):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None,
    ):  # fmt: skip
        need(not use_cuda_graph, "not used")
        self.layout, self.fixed, self.sizes = kv_layout, None, None

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, non_blocking=True,
    ):  # fmt: skip
        self.calls["flashinfer.prefill.plan"] += 1
        need(causal, "kvpage's attention is causal")
        self._keep_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        check_index("qo_indptr", qo_indptr, tuple(paged_kv_indptr.shape))
        self.counts = qo_indptr.diff().tolist()
        self._keep((num_qo_heads, num_kv_heads, head_dim_qk), (sm_scale, window_left, logits_soft_cap), q_data_type,
                   kv_data_type)  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None,
    ):  # fmt: skip
        self.calls["flashinfer.prefill.run"] += 1
        need(self.sizes is not None and not args, "run before plan")
        return self._run(q, paged_kv_cache, self.counts, k_scale, v_scale, out)


class _Latents:
    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
        kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        buffers = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        need(not use_cuda_graph or all(map(torch.is_tensor, buffers)), "buffers should be tensors in cudagraph mode")
        self.fixed, self.pages = buffers if use_cuda_graph else None, None

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        self.calls["flashinfer.mla.plan"] += 1
        num_seqs = len(kv_len_arr)
        given = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        for tensor, length in zip(given, (num_seqs + 1, num_seqs + 1, int(kv_indptr[-1]), num_seqs), strict=True):
            check_index("an index tensor", tensor, (length,))
        need((head_dim_ckv, head_dim_kpe, causal) == (RANK, LATENT - RANK, True), "sizes of latents")
        need(q_data_type in HALVES and kv_data_type == q_data_type, "dtypes")
        if self.fixed is None:
            self.pages = tuple(tensor.clone() for tensor in given)
        else:
            for buffer, values in zip(self.fixed, given, strict=True):
                buffer[: len(values)].copy_(values)
            self.pages = self.fixed
        self.heads, self.page_size, self.scale, self.dtype = num_heads, page_size, sm_scale, q_data_type

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
        kv_len=None, page_table=None,
    ):  # fmt: skip
        self.calls["flashinfer.mla.run"] += 1
        need(self.pages is not None, "run before plan")
        need(q_nope.shape[1:] == (self.heads, RANK) and q_pe.shape[1:] == (self.heads, LATENT - RANK), "queries")
        need(ckv_cache.shape[1:] == (self.page_size, RANK), "latents of another shape")
        need(kpe_cache.shape[1:] == (self.page_size, LATENT - RANK), "rotary parts of another shape")
        need(q_nope.dtype == q_pe.dtype == ckv_cache.dtype == kpe_cache.dtype == self.dtype, "dtypes")
        queries, indptr, indices, lengths = (one.tolist() for one in self.pages)
        both, latents = torch.cat([q_nope, q_pe], 2), torch.cat([ckv_cache, kpe_cache], 2).unsqueeze(2)
        rows = []
        for seq, length in enumerate(lengths):
            keys = gathered(latents, torch.tensor(indices[indptr[seq] : indptr[seq + 1]]), length)
            query = both[queries[seq] : queries[seq + 1]]
            rows.append(attended(query, keys, keys[..., :RANK], self.scale))
        result = torch.cat(rows).to(self.dtype)
        return result if out is None else out.copy_(result)
