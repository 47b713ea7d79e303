"""BlockCopier, kvpage's and the native one below it.

A valid call's every byte, and those of what it must not touch, are compared with kvpage.ops.reference.
"""

import random
from typing import Any

import torch
from fuzz_caches import NUM_BLOCKS, NUM_HOST_BLOCKS, CacheWorld
from fuzz_case import Case
from fuzz_values import with_number
from support.insides import native_of

from kvpage import _C
from kvpage.ops import reference
from kvpage.ops.copies import BlockCopier


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
        self.native: _C.BlockCopier = native_of(self.copier)

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
