"""The operations on tensors: kvpage.ops and torch.ops.kvpage.

A valid call's every byte, and those of what it must not touch, are compared with kvpage.ops.reference.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz_caches import BLOCK_SIZE, HEAD_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_LAYERS, CacheWorld, lengths_of
from fuzz_case import Case, World
from support.torch_calls import LAYOUTS, calls
from torch.utils._pytree import tree_leaves

from kvpage import ops
from kvpage.ops import reference


class OpsWorld(CacheWorld):
    """kvpage.ops."""

    names = "reshape_and_cache gather_cache paged_attention store_chunk load_chunk"
    names += " swap_blocks swap_blocks_layers copy_blocks shared_prefixes"
    covers = tuple(f"kvpage.ops.{name}" for name in names.split())

    def case(self, rng: random.Random) -> Case:
        make = rng.choice(
            (
                *(self.reshape, self.gather, self.attention, self.shared, self.store, self.load),
                *(self.swap, self.swap_layers, self.copy),
            )
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

    def shared(self) -> Case:
        """A plan names sequences of the tables, and fewer keys than each of them has."""
        lengths = [self.rng.randrange(1, 12) for _ in range(self.rng.randrange(5))]
        tables = self.tables(lengths)
        args = {"block_tables": tables, "seq_lens": lengths, "block_size": BLOCK_SIZE, "least_saved": 1}

        def judge(plan: torch.Tensor | None) -> None:
            assert plan is None or plan.shape == (9, len(lengths))

        return Case("ops.shared_prefixes", ops.shared_prefixes, args, judge=judge)

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


class TorchOpsWorld(World):
    """The operators of torch: what does not fit the schema, it refuses itself, with its own errors.

    That is torch's RuntimeError, so those are allowed where the schema, and not the operation, says no.
    """

    names = tuple(name for name in OpsWorld.names.split() if name != "shared_prefixes")  # a plan is no operator
    covers = tuple(f"torch.ops.kvpage.{name}" for name in names)

    def __init__(self, rng: random.Random) -> None:
        self.calls = calls(rng.choice(LAYOUTS))

    def snapshot(self) -> object:
        tensors = [value for value in tree_leaves(self.calls) if isinstance(value, torch.Tensor)]
        return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]

    def case(self, rng: random.Random) -> Case:
        name = rng.choice(self.names)
        operation = getattr(torch.ops.kvpage, name)
        arguments = [argument.name for argument in operation.default._schema.arguments]
        args = dict(zip(arguments, self.calls[name], strict=False))
        return Case(f"torch.ops.kvpage.{name}", _with_schema(operation), args)


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
