"""The native calls on tokens below kvpage.ops, with numbers that are wrong."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fuzz_caches import BLOCK_SIZE, HEAD_SIZE, NUM_BLOCKS, CacheWorld, lengths_of
from fuzz_case import Case
from fuzz_values import with_number

from kvpage import _C, KVScales
from kvpage.layout.kv_view import KVView
from kvpage.ops.args.tokens import TokenPart, native_blocks, native_part, native_tables, row_view


class NativeOpsWorld(CacheWorld):
    """kvpage._C's calls on tokens. Addresses and strides are the caller's word; what numbers can be checked, are."""

    covers = tuple(
        f"kvpage._C.{name}"
        for name in ["reshape_and_cache", "gather_cache", "store_chunk", "load_chunk", "paged_attention"]
    )

    def case(self, rng: random.Random) -> Case:
        return rng.choice((self.reshape, self.gather, self.chunk, self.attention))()

    def reshape(self) -> Case:
        num_tokens = self.rng.randrange(1, 7)
        key = self.tokens(num_tokens)
        value = self.tokens(num_tokens, None, key.dtype) if self.has_values else None
        slots = self.slots(num_tokens)
        if self.rng.random() < 0.4:
            slots = with_number(slots, self.rng)
        parts = parts_of(self.layout.views(self.caches[0]), (key, value), self.scales)
        args = [self._parts(parts), slots.data_ptr(), num_tokens, self.layout.num_kv_heads, NUM_BLOCKS, BLOCK_SIZE, 1]
        return self._case("reshape_and_cache", _C.reshape_and_cache, args, (2, 3, 4, 5, 6), key, value, slots)

    def gather(self) -> Case:
        lengths = lengths_of(self.rng)
        tables = self.tables(lengths)
        if self.rng.random() < 0.3 and len(lengths):
            tables = with_number(tables, self.rng)
        dtype, shape = self.row_dtype(), (sum(lengths), self.layout.num_kv_heads, HEAD_SIZE)
        key = self.place((2, *shape), dtype)
        out = key[0], key[1] if self.has_values else None
        native = native_tables(self.caches[0], tables, self.layout)
        row = self.layout.num_kv_heads * HEAD_SIZE * dtype.itemsize
        offsets = [sum(lengths[:i]) * row for i in range(len(lengths))]
        parts = self._parts(parts_of(self.layout.views(self.caches[0]), out, self.scales))
        args = [
            parts,
            self._numbers(native, (2, 3, 4, 5)),
            self._lengths([0] * len(lengths)),
            self._lengths(lengths),
            [offsets, offsets],
            self.layout.num_kv_heads,
            1,
        ]
        return self._case("gather_cache", _C.gather_cache, args, (5, 6), tables, out)

    def chunk(self) -> Case:
        num_tokens, start = self.rng.randrange(1, 9), self.rng.randrange(5)
        dtype = self.row_dtype()
        rows = self.place((num_tokens, self.layout.num_kv_heads, HEAD_SIZE), dtype)
        ids = torch.tensor(
            self.rng.sample(range(NUM_BLOCKS), -(-(num_tokens + start) // BLOCK_SIZE)), dtype=torch.int32
        )
        ids = with_number(ids, self.rng) if self.rng.random() < 0.3 else ids
        parts = self._parts(parts_of((self.layout.views(self.caches[0])[0], None), (rows, None), self.scales))
        name = self.rng.choice(("store_chunk", "load_chunk"))
        args = [parts, ids.data_ptr(), len(ids), NUM_BLOCKS, BLOCK_SIZE, start, num_tokens, self.layout.num_kv_heads, 1]
        return self._case(name, getattr(_C, name), args, (2, 3, 4, 5, 6, 7, 8), ids, rows)

    def attention(self) -> Case:
        lengths = [n for n in lengths_of(self.rng) if n]
        dtype = torch.float32
        query = torch.randn(len(lengths), self.layout.num_kv_heads, HEAD_SIZE, generator=self.torch_rng)
        out = self.place(tuple(query.shape), dtype)
        tables = self.tables(lengths)
        if self.rng.random() < 0.3 and len(lengths):
            tables = with_number(tables, self.rng)
        key, value = self.layout.views(self.caches[0])
        types = {torch.float32: (0, 0), torch.bfloat16: (1, 0), torch.float16: (2, 0)}
        codec = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}.get(self.layout.dtype, 0)
        cache_type = types.get(self.layout.dtype, (0, 0))[0]
        args = [
            row_view(query),
            row_view(out),
            native_blocks(key),
            native_blocks(key if value is None else value),
            self._numbers((0, cache_type, codec), (0, 2), small=True),
            (0, 0, 0, 0),
            self._numbers(native_tables(self.caches[0], tables, self.layout), (2, 3, 4, 5)),
            self._lengths(lengths),
            self._lengths([1] * len(lengths)),
            self._numbers((len(lengths), self.layout.num_kv_heads, 1, HEAD_SIZE, HEAD_SIZE), range(5)),
            1 << 40,
            0.5,
            0.0,
            0,
            1,
            self.rng.choice(("", *_C.attention_kernels(), "none")),
        ]
        return self._case("paged_attention", _C.paged_attention, args, (10, 11, 12, 14), query, out, tables)

    # --- what is wrong ---

    def _case(
        self, name: str, function: Callable[..., Any], args: list[Any], numbers: Sequence[int], *held: Any
    ) -> Case:
        """Sometimes one of the numbers is wrong, but never larger than memory is."""
        given = dict(enumerate(args))
        if self.rng.random() < 0.5:
            index = self.rng.choice(numbers)
            given[index] = self._lesser(given[index])
        if self.rng.random() < 0.05:
            given.pop(self.rng.choice(sorted(given)))

        def call(*values: Any) -> Any:
            assert held is not None
            return function(*values)

        named = {f"{index}": value for index, value in given.items()}
        return Case(f"_C.{name}", call, named, len(named), may_raise=(ValueError, TypeError), fixed=named)

    def _lesser(self, number: Any) -> Any:
        wrong: list[Any] = [0, -1, -2, -(2**31), -(2**63), 2**63, 2**64, None, "x", 0.5, [], True]
        if isinstance(number, float):
            wrong += [float("nan"), float("inf"), -1.0, 1e300]
        return self.rng.choice([*wrong, number // 2])

    def _numbers(self, numbers: Sequence[int], places: Sequence[int], small: bool = False) -> Any:
        if self.rng.random() < 0.8:
            return tuple(numbers)
        made = list(numbers)
        place = self.rng.choice(places)
        made[place] = self.rng.choice((-1, 3, 99, 2**31)) if small else self._lesser(made[place])
        return tuple(made) if self.rng.random() < 0.9 else tuple(made[:-1])

    def _lengths(self, lengths: list[int]) -> Any:
        if self.rng.random() < 0.8:
            return lengths
        wrong = (-1, 0, 10**6, 2**31, 2**62, 2**63 - 1, -(2**63), None, 2**64)
        return self.rng.choice(([*lengths, 1], lengths[:-1], [self.rng.choice(wrong) for _ in lengths], None, "x"))

    def _parts(self, parts: list[TokenPart]) -> Any:
        """Sizes of the row, kinds, the blocks, or how many there are."""
        if self.rng.random() < 0.75:
            return parts
        made = [list(part) for part in parts]
        place = self.rng.choice((0, 4, 5, 6))
        wrong = {0: (0, None, "x"), 6: (0, -1, -(2**63), -8)}.get(place, (0, -1, -(2**63), 99, 2**31))
        made[-1][place] = self.rng.choice(wrong)
        return self.rng.choice((made, made, made, [part[:-1] for part in parts], None, [parts]))


def parts_of(
    views: tuple[KVView, KVView | None],
    rows: tuple[torch.Tensor, torch.Tensor | None],
    scales: KVScales | None,
) -> list[TokenPart]:
    """Return native_part of K, and of V where there is one."""
    key_scale, value_scale = (None, None) if scales is None else (scales.key, scales.value)
    parts = [native_part(views[0], rows[0], key_scale)]
    if views[1] is not None and rows[1] is not None:
        parts.append(native_part(views[1], rows[1], value_scale))
    return parts
