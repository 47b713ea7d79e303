"""The operations on tensors: kvpage.ops, torch.ops.kvpage and the native calls below them.

A valid call's every byte, and those of what it must not touch, are compared with kvpage.ops.reference.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fuzz_case import Case
from fuzz_memory import Arena, ArenaWorld
from fuzz_values import with_number

from kvpage import _C, CacheLayout, KVScales, ops
from kvpage.layout.kv_scales import FP8_DTYPES
from kvpage.ops import reference
from kvpage.ops.args.tokens import native_blocks, native_parts, native_tables, row_dtypes, row_view
from kvpage.ops.copies import BlockCopier

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


class OpsWorld(CacheWorld):
    """kvpage.ops."""

    names = "reshape_and_cache gather_cache paged_attention store_chunk load_chunk"
    names += " swap_blocks swap_blocks_layers copy_blocks"
    covers = tuple(f"kvpage.ops.{name}" for name in names.split())

    def case(self, rng: random.Random) -> Case:
        make = rng.choice(
            (self.reshape, self.gather, self.attention, self.store, self.load, self.swap, self.swap_layers, self.copy)
        )
        return make()

    def reshape(self) -> Case:
        num_tokens = self.rng.randrange(7)
        key = self.tokens(num_tokens, self.rng.choice((None, 1, 5)))
        value = self.tokens(num_tokens, None, key.dtype) if self.has_values else None
        args = {
            "key": key,
            "value": value,
            "cache": self.caches[0],
            "slot_mapping": self.slots(num_tokens),
            "layout": self.layout,
            "scales": self.scales,
        }
        case = Case("ops.reshape_and_cache", ops.reshape_and_cache, args, self.rng.choice((0, 6)))
        return self.judged(case, lambda: reference.reshape_and_cache(**args))

    def gather(self) -> Case:
        lengths = lengths_of(self.rng)
        starts = [self.rng.randrange(BLOCK_SIZE) for _ in lengths]
        tables = self.tables([start + n for start, n in zip(starts, lengths, strict=True)])
        shape, dtype = (sum(lengths), self.layout.num_kv_heads, HEAD_SIZE), self.row_dtype()
        key = self.place((2, *shape), dtype)
        out = (key[0], key[1] if self.has_values else None)
        args = {
            "cache": self.caches[0],
            "block_tables": tables,
            "seq_lens": self.rng.choice((lengths, torch.tensor(lengths, dtype=torch.int64))),
            "layout": self.layout,
            "seq_starts": starts,
            "out": out,
            "scales": self.scales,
            "dtype": None,
        }
        numbers = torch.tensor(lengths, dtype=torch.int64), torch.tensor(starts, dtype=torch.int64)

        def expected() -> None:
            reference.gather_into(self.caches[0], tables, *numbers, out, self.layout, self.scales)

        return self.judged(Case("ops.gather_cache", ops.gather_cache, args), expected)

    def attention(self) -> Case:
        lengths = [n for n in lengths_of(self.rng) if n]
        queries = [self.rng.randint(1, n) for n in lengths]
        dtype = self.layout.dtype if not self.layout.is_quantized else torch.float32
        heads, num_tokens = self.layout.num_kv_heads * self.rng.choice((1, 2)), sum(queries)
        query = torch.randn(num_tokens, heads, HEAD_SIZE, generator=self.torch_rng).to(dtype)
        args: dict[str, Any] = {
            "query": query,
            "cache": self.caches[0],
            "block_tables": self.tables(lengths),
            "seq_lens": lengths,
            "layout": self.layout,
            "scale": self.rng.choice((None, 0.5)),
            "query_lens": queries,
            "sliding_window": self.rng.choice((None, 3)),
            "softcap": self.rng.choice((None, 5.0)),
            "sinks": self.rng.choice((None, torch.zeros(heads))),
            "value_size": self.rng.choice((None, HEAD_SIZE)),
            "out": self.place((num_tokens, heads, HEAD_SIZE), dtype),
            "scales": self.scales,
            "max_query_len": None,
            "max_seq_len": None,
        }

        def judge(out: torch.Tensor) -> None:
            given = {name: value for name, value in args.items() if name not in ("out", "max_query_len", "max_seq_len")}
            given |= {name: torch.tensor(args[name], dtype=torch.int64) for name in ("seq_lens", "query_lens")}
            given["value_size"] = HEAD_SIZE
            expected = reference.paged_attention(**given)
            assert torch.allclose(out.float(), expected.float(), atol=3e-2, rtol=3e-2)

        return Case("ops.paged_attention", ops.paged_attention, args, judge=judge)

    def _chunk(self, num_tokens: int, in_arena: bool) -> tuple[torch.Tensor, str, torch.Tensor]:
        """A chunk, its format, and it by token."""
        parts, heads, size = 1 + self.has_values, self.layout.num_kv_heads, HEAD_SIZE
        fmt, dtype = self.rng.choice(("vllm", "huggingface")), self.row_dtype()
        shape = (NUM_LAYERS, parts, *((num_tokens, heads) if fmt == "vllm" else (heads, num_tokens)), size)
        chunk = self.place(shape, dtype) if in_arena else torch.randn(shape, generator=self.torch_rng).to(dtype)
        return chunk, fmt, chunk if fmt == "vllm" else chunk.transpose(2, 3)

    def _chunk_args(self, in_arena: bool) -> tuple[dict[str, Any], tuple[Any, ...]]:
        num_tokens, start = self.rng.randrange(9), self.rng.randrange(5)
        chunk, fmt, rows = self._chunk(num_tokens, in_arena)
        ids = torch.tensor(
            self.rng.sample(range(NUM_BLOCKS), -(-(num_tokens + start) // BLOCK_SIZE)), dtype=torch.int32
        )
        scales = None if self.scales is None else [self.scales] * NUM_LAYERS
        args = {
            "caches": self.caches,
            "block_ids": ids,
            "chunk": chunk,
            "layout": self.layout,
            "start": start,
            "fmt": fmt,
            "scales": scales,
            "num_threads": self.rng.choice((None, 1, 2)),
        }
        return args, (self.caches, ids, start, rows, self.layout, scales)

    def store(self) -> Case:
        args, plain = self._chunk_args(True)
        return self.judged(Case("ops.store_chunk", ops.store_chunk, args), lambda: reference.store_chunk(*plain))

    def load(self) -> Case:
        args, plain = self._chunk_args(False)
        return self.judged(Case("ops.load_chunk", ops.load_chunk, args), lambda: reference.load_chunk(*plain))

    def swap(self) -> Case:
        src, dst = self.caches[0], self.host_caches[0]
        args = {"src": src, "dst": dst, "block_mapping": self.pairs(NUM_BLOCKS, NUM_HOST_BLOCKS), "layout": self.layout}
        return self.judged(Case("ops.swap_blocks", ops.swap_blocks, args), lambda: reference.swap_blocks(**args))

    def swap_layers(self) -> Case:
        pairs = self.pairs(NUM_BLOCKS, NUM_HOST_BLOCKS)
        args = {"srcs": self.caches, "dsts": self.host_caches, "block_mapping": pairs, "layout": self.layout}

        def expected() -> None:
            for src, dst in zip(self.caches, self.host_caches, strict=True):
                reference.swap_blocks(src, dst, pairs, self.layout)

        return self.judged(Case("ops.swap_blocks_layers", ops.swap_blocks_layers, args), expected)

    def copy(self) -> Case:
        args = {"caches": self.caches, "block_mapping": self.copies(), "layout": self.layout}
        return self.judged(Case("ops.copy_blocks", ops.copy_blocks, args), lambda: reference.copy_blocks(**args))


class TorchOpsWorld(OpsWorld):
    """The same calls through torch's dispatcher: what does not fit the schema, it refuses itself, with its own errors.

    That is torch's RuntimeError, so those are allowed where the schema, and not the operation, says no.
    """

    covers = tuple(f"torch.ops.kvpage.{name}" for name in OpsWorld.names.split())

    def case(self, rng: random.Random) -> Case:
        case = super().case(rng)
        name, args = case.name.removeprefix("ops."), dict(case.args)
        args["layout"] = self.layout.spec
        layered = name in ("store_chunk", "load_chunk")
        for unknown in ("num_threads", "dtype", "value_size"):
            args.pop(unknown, None)
        if "scales" in args:
            given = args.pop("scales")
            for part in ("key", "value") if given is not None else ():
                scales = [getattr(each, part) for each in given] if layered else getattr(given, part)
                args[f"{part}_scales" if layered else f"{part}_scale"] = scales
        if "out" in args and name == "gather_cache":
            args["key"], args["value"] = args.pop("out")
        for lengths in ("seq_lens", "seq_starts", "query_lens"):
            if args.get(lengths) is not None:
                args[lengths] = torch.as_tensor(args[lengths], dtype=torch.int64)
        operation = getattr(torch.ops.kvpage, name)
        if name == "paged_attention":
            case.judge = None
        return Case(f"torch.ops.kvpage.{name}", _with_schema(operation), args, judge=case.judge)


def _with_schema(operation: Any) -> Callable[..., object]:
    """A RuntimeError of torch's own argument parser becomes the TypeError that it is."""

    def call(*args: Any, **kwargs: Any) -> object:
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:
            if error.__traceback__ is not None and _is_torchs_own(error):
                raise TypeError(str(error)) from error
            raise

    return call


def _is_torchs_own(error: RuntimeError) -> bool:
    """Raised in the dispatcher: no frame of kvpage is on the way."""
    frame, files = error.__traceback__, []
    while frame is not None:
        files.append(frame.tb_frame.f_code.co_filename)
        frame = frame.tb_next
    return not any("/kvpage/" in file for file in files)


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
        parts = native_parts(self.layout.views(self.caches[0]), (key, value), self.scales)
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
        parts = self._parts(native_parts(self.layout.views(self.caches[0]), out, self.scales))
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
        parts = self._parts(native_parts((self.layout.views(self.caches[0])[0], None), (rows, None), self.scales))
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

    def _parts(self, parts: list[tuple[int, ...]]) -> Any:
        """Sizes (of the run, the element, the row), kinds, or how many there are."""
        if self.rng.random() < 0.75:
            return parts
        made = [list(part) for part in parts]
        place = self.rng.choice((5, 6, 14, 15, 16))
        made[-1][place] = self.rng.choice((0, -1, -(2**63), 99, 2**31) if place in (14, 15) else (0, -1, -(2**63), -8))
        return self.rng.choice((made, made, made, [part[:-1] for part in parts], None, [parts]))


class CopierWorld(CacheWorld):
    """BlockCopier, kvpage's and the native one below it."""

    covers = (
        "kvpage._C.BlockCopier",
        "kvpage.ops.BlockCopier",
        "kvpage._C._copy_kernel_on_host",
        "kvpage._C.choose_executor",
        "kvpage._C._split_for_launches",
    )

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.copier = BlockCopier(self.caches, self.host_caches, self.layout)
        self.native: _C.BlockCopier = self.copier._native

    def case(self, rng: random.Random) -> Case:
        return rng.choice(
            (self.make, self.make_native, self.run, self.run_native, self.plan, self.choose, self.split)
        )()

    def make(self) -> Case:
        args = {
            "srcs": self.caches,
            "dsts": self.host_caches,
            "layout": self.layout,
            "kernel_max_bytes": 0,
            "max_groups": 4,
        }
        return Case("BlockCopier", BlockCopier, args)

    def make_native(self) -> Case:
        def layers(caches: list[torch.Tensor]) -> list[Any]:
            return [(cache.data_ptr(), [s * cache.element_size() for s in cache.stride()]) for cache in caches]

        args = {
            "sizes": list(self.layout.shape(1)),
            "block_dim": self.layout.block_dim,
            "element_bytes": self.layout.dtype.itemsize,
            "srcs": layers(self.caches),
            "dsts": layers(self.host_caches),
            "num_src_blocks": NUM_BLOCKS,
            "num_dst_blocks": NUM_HOST_BLOCKS,
            "src_device": -1,
            "dst_device": -1,
            "pinned": False,
            "kernel_max_bytes": 0,
            "max_groups": 1,
        }
        # What the sizes say of memory is the caller's word; a plan for all of it is as large as they say.
        return Case("_C.BlockCopier", _C.BlockCopier, args, fixed=("sizes",))  # it reads and writes nothing yet

    def run(self) -> Case:
        pairs = self.pairs(NUM_BLOCKS, NUM_HOST_BLOCKS)
        name = self.rng.choice(("run", "check", "executor"))
        case = Case(f"BlockCopier.{name}", getattr(self.copier, name), {"block_mapping": pairs})

        def expected() -> None:
            for src, dst in zip(self.caches, self.host_caches, strict=True):
                reference.swap_blocks(src, dst, pairs, self.layout)

        return self.judged(case, expected if name == "run" else lambda: None)

    def run_native(self) -> Case:
        pairs = self.pairs(NUM_BLOCKS, NUM_HOST_BLOCKS)
        pairs = with_number(pairs, self.rng) if self.rng.random() < 0.5 and len(pairs) else pairs
        args = {"pairs": pairs.data_ptr(), "num_pairs": len(pairs), "stream": 0, "max_threads": 1}
        name = self.rng.choice(("run", "check", "executor"))
        if name != "run":
            args = {"pairs": args["pairs"], "num_pairs": args["num_pairs"]}
        if self.rng.random() < 0.3:
            wrong = self.rng.choice(("num_pairs", *(("max_threads",) if name == "run" else ())))
            args[wrong] = self.rng.choice((-1, -(2**63), 2**63, 2**64, None, "x", 0.5, 0))

        def call(**given: Any) -> Any:
            assert pairs is not None
            return getattr(self.native, name)(**given)

        return Case(f"_C.BlockCopier.{name}", call, args, may_raise=(ValueError, TypeError), fixed=args)

    def plan(self) -> Case:
        pairs = self.pairs(NUM_BLOCKS, NUM_HOST_BLOCKS)
        wrong = (0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63), None, "x", 16, 4)
        if self.rng.random() < 0.5:
            function: Any = self.native.extents
            args = {"begin": 0, "end": self.rng.choice(wrong)} | (
                {"begin": self.rng.choice(wrong)} if self.rng.random() < 0.5 else {}
            )
        else:
            function = lambda **given: _C._copy_kernel_on_host(self.native, **given)  # noqa: E731
            args = {
                name: self.rng.choice(wrong) for name in self.rng.sample(("vector_bytes", "max_threads", "capacity"), 1)
            }

        def call(**given: Any) -> Any:
            return function(pairs=pairs.data_ptr(), num_pairs=len(pairs), **given)

        return Case("_C.BlockCopier plan", call, args, may_raise=(ValueError, TypeError), fixed=args)

    def choose(self) -> Case:
        args = {
            "src_device": -1,
            "dst_device": 0,
            "pinned": True,
            "extent_bytes": 100,
            "num_extents": 3,
            "kernel_max_bytes": 4096,
        }
        return Case("_C.choose_executor", _C.choose_executor, args)

    def split(self) -> Case:
        args = {"num_fragments": self.rng.randrange(9), "num_pairs": self.rng.randrange(9), "capacity": 200}
        return Case("_C._split_for_launches", _C._split_for_launches, args, fixed=("num_fragments", "num_pairs"))
