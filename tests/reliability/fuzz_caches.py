"""Caches of two tiers in an arena, of which the calls on tensors are made."""

import random
from collections.abc import Callable, Sequence

import torch
from fuzz_case import Case
from fuzz_memory import Arena, ArenaWorld

from kvpage import CacheLayout, KVScales
from kvpage.layout.kv_scales import FP8_DTYPES
from kvpage.ops import reference
from kvpage.ops.args.tokens import row_dtypes

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE, NUM_LAYERS, HEAD_SIZE = 6, 4, 4, 2, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
LAYOUTS = (
    ("flash", "NHD"),
    ("flash", "HND"),
    ("flashinfer", "NHD"),
    ("flashinfer", "HND"),
    ("paged", "NHD"),
    ("mla", "NHD"),
)


class CacheWorld(ArenaWorld):
    """Caches of two tiers in an arena, filled. Cases take from it what they need."""

    covers: tuple[str, ...] = ()

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.arena = rng, Arena(1 << 17)
        self.torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))
        self.layout = random_layout(rng)
        self.caches = self._caches(NUM_BLOCKS)
        self.host_caches = self._caches(NUM_HOST_BLOCKS)
        self.has_values = self.layout.views(self.caches[0])[1] is not None
        self.scales = KVScales.of(0.5, [0.25] * self.layout.num_kv_heads) if self._takes_scales() else None
        self.scratch = self.arena.tensor((1 << 14,), torch.uint8)
        self._fill()

    def check(self) -> None:
        """Numbers that are none may have been written, and are written anew: a NaN has many forms."""
        super().check()
        if not all(bool(cache.float().isfinite().all()) for cache in (*self.caches, *self.host_caches)):
            self._fill()
        if self.layout.has_token_scales:
            self._fill()

    def case(self, rng: random.Random) -> Case:
        raise NotImplementedError

    # --- what calls are made of ---

    def tokens(self, num_tokens: int, size: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = (num_tokens, self.layout.num_kv_heads, size or self.layout.head_size)
        return torch.randn(shape, generator=self.torch_rng).to(dtype or self.row_dtype())

    def row_dtype(self) -> torch.dtype:
        return self.rng.choice(row_dtypes(self.layout))

    def place(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A destination in the arena."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.scratch[:num_bytes].view(dtype).view(shape)

    def slots(self, num_tokens: int) -> torch.Tensor:
        chosen = self.rng.sample(range(NUM_BLOCKS * BLOCK_SIZE), num_tokens)
        return torch.tensor([-1 if self.rng.random() < 0.1 else slot for slot in chosen], dtype=torch.int64)

    def tables(self, lengths: Sequence[int]) -> torch.Tensor:
        """Poisoned behind each sequence's last block."""
        width = max((-(-n // BLOCK_SIZE) for n in lengths), default=0) + 1
        tables = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
        for row, length in zip(tables, lengths, strict=True):
            needed = -(-length // BLOCK_SIZE)
            row[:needed] = torch.tensor([self.rng.randrange(NUM_BLOCKS) for _ in range(needed)], dtype=torch.int32)
        return tables

    def pairs(self, num_src: int, num_dst: int) -> torch.Tensor:
        count = self.rng.randrange(min(num_src, num_dst) + 1)
        src = [self.rng.randrange(num_src) for _ in range(count)]
        return torch.tensor([src, self.rng.sample(range(num_dst), count)], dtype=torch.int64).t().contiguous()

    def copies(self) -> torch.Tensor:
        """Pairs within one tier: no block is read by one and written by another."""
        ids = self.rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        count = self.rng.randrange(NUM_BLOCKS // 2 + 1)
        return torch.tensor([ids[:count], ids[count : 2 * count]], dtype=torch.int64).t().contiguous()

    def judged(self, case: Case, expected: Callable[[], object]) -> Case:
        """`expected` does with the reference what the call has done, from the same memory."""
        before = self.arena.snapshot()

        def judge(_: object) -> None:
            done = self.arena.snapshot()
            self.arena.restore(before)
            expected()
            assert self.arena.snapshot() == done, "the memory differs from what the reference makes of it"

        case.judge = judge
        return case

    # --- inside ---

    def _takes_scales(self) -> bool:
        return self.layout.dtype in FP8_DTYPES and self.rng.random() < 0.5

    def _caches(self, num_blocks: int) -> list[torch.Tensor]:
        """As CacheLayout.allocate has them, in the arena."""
        made = self.layout.allocate(num_blocks, NUM_LAYERS, torch.device("cpu"))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in made}
        places = {address: self.arena.tensor((size,), torch.uint8) for address, size in storages.items()}
        return [
            places[t.untyped_storage().data_ptr()].view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())
            for t in made
        ]

    def _fill(self) -> None:
        for caches, num_blocks in ((self.caches, NUM_BLOCKS), (self.host_caches, NUM_HOST_BLOCKS)):
            for cache in caches:
                slots = torch.arange(num_blocks * BLOCK_SIZE)
                key = self.tokens(len(slots))
                value = self.tokens(len(slots), None, key.dtype) if self.has_values else None
                reference.reshape_and_cache(key, value, cache, slots, self.layout, self.scales)


def random_layout(rng: random.Random) -> CacheLayout:
    backend, kv_layout = rng.choice(LAYOUTS)
    heads = 1 if backend == "mla" else 2
    layer_layout = rng.choice(("separate", "packed"))
    try:
        made = CacheLayout(BLOCK_SIZE, heads, HEAD_SIZE, rng.choice(DTYPES), backend, kv_layout, layer_layout)
        made.views(made.allocate(1, 1, torch.device("cpu"))[0])
        return made
    except ValueError:  # that dtype is not one of this backend
        return random_layout(rng)


def lengths_of(rng: random.Random) -> list[int]:
    return [rng.choice((0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 9)) for _ in range(rng.randrange(4))]
