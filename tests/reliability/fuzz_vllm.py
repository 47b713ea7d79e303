"""kvpage.integrations.vllm_ops: vLLM's operations, over caches in an arena."""

import random

import torch
from fuzz_case import Case
from fuzz_memory import Arena, ArenaWorld

from kvpage.integrations import vllm_ops

NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE = 5, 4, 2, 8


class VllmWorld(ArenaWorld):
    names = (
        "reshape_and_cache reshape_and_cache_flash concat_and_cache_mla gather_and_maybe_dequant_cache cp_gather_cache"
    )
    names += " convert_fp8 swap_blocks swap_blocks_batch copy_blocks copy_blocks_mla concat_and_cache_mla_grouped"
    names += " concat_and_cache_mla_rope_fused concat_mla_q cp_gather_and_upconvert_fp8_kv_cache"
    names += " indexer_k_quant_and_cache cp_gather_indexer_k_quant_cache"
    covers = tuple(f"kvpage.integrations.vllm_ops.{name}" for name in names.split())

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.arena = rng, Arena()
        self.torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))
        self.kv_cache_dtype = rng.choice(("auto", "auto", "fp8", "fp8_e5m2"))
        self.dtype = torch.float32 if self.kv_cache_dtype == "auto" else torch.uint8
        self.key = self._cache((NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE))
        self.value = self._cache((NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE))
        x = 16 // self.dtype.itemsize
        self.packed_key = self._cache((NUM_BLOCKS, HEADS, SIZE // x or 1, BLOCK_SIZE, min(x, SIZE)))
        self.packed_value = self._cache((NUM_BLOCKS, HEADS, SIZE, BLOCK_SIZE))
        self.latents = self._cache((NUM_BLOCKS, BLOCK_SIZE, 12))
        self.entries = self.arena.tensor((NUM_BLOCKS, BLOCK_SIZE, 656), torch.uint8)
        self.index_keys = self.arena.tensor((NUM_BLOCKS, BLOCK_SIZE, 20), torch.uint8)
        self.scratch = self.arena.tensor((4096,), torch.uint8)
        self.scale = torch.tensor([0.5])

    def __enter__(self) -> "VllmWorld":
        vllm_ops.register_caches([self.key, self.value, self.latents])
        return self

    def __exit__(self, *error: object) -> None:
        vllm_ops.unregister_caches([self.key, self.value, self.latents])

    def case(self, rng: random.Random) -> Case:
        return getattr(self, f"_{rng.choice(self.names.split())}")()

    def _cache(self, shape: tuple[int, ...]) -> torch.Tensor:
        rows = torch.randn(shape, generator=self.torch_rng)
        return self.arena.copy(rows if self.dtype == torch.float32 else rows.to(torch.float8_e5m2).view(torch.uint8))

    def _rows(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.torch_rng)

    def _slots(self, num_tokens: int) -> torch.Tensor:
        return torch.tensor(self.rng.sample(range(NUM_BLOCKS * BLOCK_SIZE), num_tokens), dtype=torch.int64)

    def _write(self, name: str, key: torch.Tensor, value: torch.Tensor) -> Case:
        num_tokens = self.rng.randrange(6)
        args = {
            "key": self._rows(num_tokens, HEADS, SIZE),
            "value": self._rows(num_tokens, HEADS, SIZE),
            "key_cache": key,
            "value_cache": value,
            "slot_mapping": self._slots(num_tokens),
            "kv_cache_dtype": self.kv_cache_dtype,
            "k_scale": self.scale,
            "v_scale": self.scale,
        }
        return Case(f"vllm_ops.{name}", getattr(vllm_ops, name), args)

    def _reshape_and_cache(self) -> Case:
        return self._write("reshape_and_cache", self.packed_key, self.packed_value)

    def _reshape_and_cache_flash(self) -> Case:
        return self._write("reshape_and_cache_flash", self.key, self.value)

    def _concat_and_cache_mla(self) -> Case:
        num_tokens = self.rng.randrange(6)
        if self.rng.random() < 0.3:
            return self._ds_mla(num_tokens)
        args = {
            "kv_c": self._rows(num_tokens, 8),
            "k_pe": self._rows(num_tokens, 4),
            "kv_cache": self.latents,
            "slot_mapping": self._slots(num_tokens),
            "kv_cache_dtype": self.kv_cache_dtype,
            "scale": self.scale,
        }
        return Case("vllm_ops.concat_and_cache_mla", vllm_ops.concat_and_cache_mla, args)

    def _ds_mla(self, num_tokens: int) -> Case:
        args = {
            "kv_c": self._rows(num_tokens, 512).bfloat16(),
            "k_pe": self._rows(num_tokens, self.rng.choice((0, 64))).bfloat16(),
            "kv_cache": self.entries,
            "slot_mapping": self._slots(num_tokens),
            "kv_cache_dtype": "fp8_ds_mla",
            "scale": self.scale,
            "skip_scale": self.rng.random() < 0.5,
        }
        return Case("vllm_ops.concat_and_cache_mla", vllm_ops.concat_and_cache_mla, args)

    def _concat_and_cache_mla_grouped(self) -> Case:
        num_tokens = self.rng.randrange(6)
        args = {
            "kv_c": self._rows(1, num_tokens, 8),
            "k_pe": self._rows(1, num_tokens, 4),
            "kv_cache_ptrs": torch.tensor([self.latents.data_ptr()]),
            "slot_mapping": self._slots(num_tokens)[None],
            "block_size": BLOCK_SIZE,
            "block_stride": self.latents.stride(0),
            "entry_stride": self.latents.stride(1),
            "kv_scales": None if self.kv_cache_dtype == "auto" else self.scale,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        return Case("vllm_ops.concat_and_cache_mla_grouped", vllm_ops.concat_and_cache_mla_grouped, args)

    def _concat_and_cache_mla_rope_fused(self) -> Case:
        num_tokens = self.rng.randrange(6)
        args = {
            "positions": torch.tensor([self.rng.randrange(9) for _ in range(num_tokens)], dtype=torch.int64),
            "q_pe": self.scratch[: num_tokens * 48].view(torch.float32).view(-1, 3, 4),
            "k_pe": self.scratch[512 : 512 + num_tokens * 16].view(torch.float32).view(-1, 4),
            "kv_c": self._rows(num_tokens, 8),
            "cos_sin_cache": self._rows(9, 4),
            "is_neox": self.rng.random() < 0.5,
            "slot_mapping": self._slots(num_tokens),
            "kv_cache": self.latents,
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_cache_scale": self.scale,
        }
        return Case("vllm_ops.concat_and_cache_mla_rope_fused", vllm_ops.concat_and_cache_mla_rope_fused, args)

    def _concat_mla_q(self) -> Case:
        num_tokens = self.rng.randrange(4)
        args = {
            "ql_nope": self._rows(num_tokens, 2, 8),
            "q_pe": self._rows(num_tokens, 2, 4),
            "q_out": self.scratch[: num_tokens * 96].view(torch.float32).view(-1, 2, 12),
        }
        return Case("vllm_ops.concat_mla_q", vllm_ops.concat_mla_q, args)

    def _cp_gather_and_upconvert_fp8_kv_cache(self) -> Case:
        num_rows, (_, tables, _) = self.rng.randrange(4), self._lengths()
        num_places = NUM_BLOCKS * BLOCK_SIZE
        args = {
            "src_cache": self.entries,
            "dst": self.scratch[: num_rows * 1152].view(torch.bfloat16).view(-1, 576),
            "block_table": tables,
            "workspace_starts": torch.tensor(
                sorted(self.rng.randrange(num_rows + 1) for _ in tables), dtype=torch.int32
            ),
            "batch_size": len(tables),
            "seq_starts": self.rng.choice((None, torch.zeros(len(tables), dtype=torch.int32))),
        }
        if self.rng.random() < 0.5:
            args["host_cache"] = torch.zeros(3, 656, dtype=torch.uint8)
            args["host_row_ids"] = torch.randint(0, 3, (num_places,), dtype=torch.int32, generator=self.torch_rng)
            args["device_row_ids"] = torch.randint(
                -1, num_places, (num_places,), dtype=torch.int32, generator=self.torch_rng
            )
        name = "cp_gather_and_upconvert_fp8_kv_cache"
        return Case(f"vllm_ops.{name}", getattr(vllm_ops, name), args)

    def _indexer_k_quant_and_cache(self) -> Case:
        num_tokens = self.rng.randrange(6)
        args = {
            "k": self._rows(num_tokens, 16),
            "kv_cache": self.index_keys,
            "slot_mapping": self._slots(num_tokens),
            "quant_block_size": 16,
            "kv_cache_dtype": self.rng.choice(("auto", "ue8m0")),
        }
        return Case("vllm_ops.indexer_k_quant_and_cache", vllm_ops.indexer_k_quant_and_cache, args)

    def _cp_gather_indexer_k_quant_cache(self) -> Case:
        lengths, tables, starts = self._lengths()
        num_rows = sum(lengths) + self.rng.randrange(2)
        args = {
            "kv_cache": self.index_keys,
            "dst_k": self.scratch[: num_rows * 16].view(-1, 16),
            "dst_scale": self.scratch[1024 : 1024 + num_rows * 4].view(-1, 4),
            "block_table": tables,
            "cu_seq_lens": starts,
        }
        return Case("vllm_ops.cp_gather_indexer_k_quant_cache", vllm_ops.cp_gather_indexer_k_quant_cache, args)

    def _lengths(self) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Lengths, tables, and where each sequence's tokens begin."""
        lengths = [self.rng.randrange(9) for _ in range(self.rng.randrange(1, 4))]
        tables = torch.tensor([[self.rng.randrange(NUM_BLOCKS) for _ in range(3)] for _ in lengths], dtype=torch.int32)
        starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
        return lengths, tables, starts

    def _gather_and_maybe_dequant_cache(self) -> Case:
        lengths, tables, starts = self._lengths()
        owners = [seq for seq, length in enumerate(lengths) for _ in range(length)]
        args = {
            "src_cache": self.latents,
            "dst": self.scratch[: sum(lengths) * 48].view(torch.float32).view(-1, 12),
            "block_table": tables,
            "cu_seq_lens": starts,
            "token_to_seq": torch.tensor(owners, dtype=torch.int32),
            "num_tokens": sum(lengths),
            "kv_cache_dtype": self.kv_cache_dtype,
            "scale": self.scale,
            "seq_starts": self.rng.choice((None, torch.zeros(len(lengths), dtype=torch.int32))),
        }
        return Case("vllm_ops.gather_and_maybe_dequant_cache", vllm_ops.gather_and_maybe_dequant_cache, args)

    def _cp_gather_cache(self) -> Case:
        lengths, tables, starts = self._lengths()
        rows = self.scratch[: sum(lengths) * 12 * self.dtype.itemsize].view(self.dtype).view(-1, 12)
        args = {
            "src_cache": self.latents,
            "dst": rows,
            "block_table": tables,
            "cu_seq_lens": starts,
            "batch_size": len(lengths),
            "seq_starts": None,
        }
        return Case("vllm_ops.cp_gather_cache", vllm_ops.cp_gather_cache, args)

    def _convert_fp8(self) -> Case:
        args = {"output": self.scratch[:24].view(4, 6), "input": self._rows(4, 6), "scale": 0.5, "kv_dtype": "fp8"}
        return Case("vllm_ops.convert_fp8", vllm_ops.convert_fp8, args)

    def _pairs(self) -> torch.Tensor:
        ids = self.rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        return torch.tensor([ids[:2], ids[2:4]], dtype=torch.int64).t().contiguous()

    def _swap_blocks(self) -> Case:
        block_bytes = self.key[0].numel() * self.key.element_size()
        args = {"src": self.key, "dst": self.value, "block_size_in_bytes": block_bytes, "block_mapping": self._pairs()}
        return Case("vllm_ops.swap_blocks", vllm_ops.swap_blocks, args)

    def _swap_blocks_batch(self) -> Case:
        item = self.key[0].numel() * self.key.element_size()
        pairs = self._pairs()
        args = {
            "src_ptrs": self.key.data_ptr() + pairs[:, 0] * item,
            "dst_ptrs": self.value.data_ptr() + pairs[:, 1] * item,
            "sizes": torch.full((len(pairs),), item),
            "is_src_access_order_any": False,
        }
        return Case("vllm_ops.swap_blocks_batch", vllm_ops.swap_blocks_batch, args)

    def _copy_blocks(self) -> Case:
        args = {"key_caches": [self.key], "value_caches": [self.value], "block_mapping": self._pairs()}
        return Case("vllm_ops.copy_blocks", vllm_ops.copy_blocks, args)

    def _copy_blocks_mla(self) -> Case:
        args = {"kv_caches": [self.latents], "block_mapping": self._pairs()}
        return Case("vllm_ops.copy_blocks_mla", vllm_ops.copy_blocks_mla, args)
