"""kvpage.vllm_ops: vLLM's operations, over caches in an arena."""

import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz_case import Case
from fuzz_memory import Arena, ArenaWorld

from kvpage import vllm_ops

NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE = 5, 4, 2, 8


class VllmWorld(ArenaWorld):
    names = (
        "reshape_and_cache reshape_and_cache_flash concat_and_cache_mla gather_and_maybe_dequant_cache cp_gather_cache"
    )
    names += " convert_fp8 swap_blocks swap_blocks_batch copy_blocks copy_blocks_mla"
    covers = tuple(f"kvpage.vllm_ops.{name}" for name in names.split())

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
        self.scratch = self.arena.tensor((4096,), torch.uint8)
        self.scale = torch.tensor([0.5])

    def __enter__(self) -> "VllmWorld":
        vllm_ops.register_caches([self.key, self.value])
        return self

    def __exit__(self, *error: object) -> None:
        vllm_ops.unregister_caches([self.key, self.value])

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
        args = {
            "kv_c": self._rows(num_tokens, 8),
            "k_pe": self._rows(num_tokens, 4),
            "kv_cache": self.latents,
            "slot_mapping": self._slots(num_tokens),
            "kv_cache_dtype": self.kv_cache_dtype,
            "scale": self.scale,
        }
        return Case("vllm_ops.concat_and_cache_mla", vllm_ops.concat_and_cache_mla, args)

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
        expected = self.value.clone()
        expected[args["block_mapping"][:, 1]] = self.key[args["block_mapping"][:, 0]]

        def is_right() -> bool:  # by bytes: there may be NaNs
            return torch.equal(self.value.view(torch.uint8), expected.view(torch.uint8))

        return self._judged("swap_blocks", args, is_right)

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

    def _judged(self, name: str, args: dict[str, Any], is_right: Callable[[], bool]) -> Case:
        def judge(_: object) -> None:
            assert is_right()

        return Case(f"vllm_ops.{name}", getattr(vllm_ops, name), args, judge=judge)
