"""mini-sglang's managers over kvpage's prefix cache, beside its own radix cache, on a CPU.

    python examples/mini_sglang.py FOLDER      FOLDER holds the package `minisgl`, such as `python` of a clone

No file of mini-sglang changes. `register` gives its registry of prefix caches one more, by the name `kvpage`. Then its
own managers of slots, rows, prompts and decodes serve the same prompts over both caches. The prompts begin alike, come
in portions, and need more slots together than there are.

A number in place of K and V stands for all tokens up to its own. Each slot that a prompt finds must have its number.
Whoever takes a slot writes over it. So one that was freed early, twice, or under wrong tokens shows.

Rows of requests under way are counted where they have others' numbers. mini-sglang frees slots of tokens that another
request has cached first, and leaves them in the row: a step that follows reads what is written there next.

mini-sglang computes on GPUs. So only its modules for scheduling are imported: packages that import CUDA are left empty.
Its comparison of tokens and its writes of page tables, which need CUDA, have a line each here. So has pinned memory.
"""

import argparse
import importlib
import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from kvpage.integrations.mini_sglang import register

NUM_SLOTS, NUM_ROWS, ROW_TOKENS, NUM_PROMPTS, MOST_AT_ONCE = 640, 6, 256, 300, 96
PAGE_SIZES = (1, 16)
PARTS = {
    "core": ("Context", "SamplingParams"),
    "kvcache": ("SUPPORTED_CACHE_MANAGER", "BaseCacheHandle", "BasePrefixCache"),
    "scheduler.cache": ("CacheManager", "_write_page_table"),
    "scheduler.table": ("TableManager",),
    "scheduler.decode": ("DecodeManager",),
    "scheduler.prefill": ("PrefillManager", "ChunkedReq"),
}
"""What is taken from which module of mini-sglang."""


def main(folder: str) -> None:
    """Serve the prompts over each cache, for each page size."""
    root = Path(folder)
    parts = load(root / "python" if (root / "python" / "minisgl").is_dir() else root)  # its repository, or a package
    register(num_pages=NUM_SLOTS)
    for page_size in PAGE_SIZES:
        for kind in ("radix", "kvpage"):
            life = Life(parts, kind, page_size)
            life.run()
            print(f"{kind}, pages of {page_size}: {life.num_found} of {life.num_asked} prompt tokens found")
            print(f"    {life.num_stale} of {life.num_later} later steps had slots of another request in their rows")


def load(folder: Path) -> SimpleNamespace:
    """Import mini-sglang's modules for scheduling.

    Raises:
        FileNotFoundError: the folder has no package `minisgl`, or the package has not one of the files.
        ImportError: a file lacks a name that is taken from it.
    """
    check_files(folder)
    for name in ("minisgl", "minisgl.scheduler", "minisgl.utils", "minisgl.kernel"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
    for name in ("misc", "registry"):
        vars(sys.modules["minisgl.utils"]).update(vars(importlib.import_module(f"minisgl.utils.{name}")))
    vars(sys.modules["minisgl.utils"])["init_logger"] = logging.getLogger
    vars(sys.modules["minisgl.kernel"])["fast_compare_key"] = num_alike
    parts = SimpleNamespace()
    for name, taken in PARTS.items():
        module = importlib.import_module(f"minisgl.{name}")
        for one in taken:
            if one not in vars(module):
                raise ImportError(f"{module.__file__} must have {one}, got a version of mini-sglang without it")
        vars(parts).update({one: vars(module)[one] for one in taken})
    parts.core = sys.modules["minisgl.core"]
    vars(sys.modules["minisgl.scheduler.cache"])["_write_page_table"] = write_rows
    return parts


def check_files(folder: Path) -> None:
    """Raise FileNotFoundError for the first file that is not there."""
    for name in ("utils.misc", "utils.registry", *PARTS):
        path = folder / "minisgl" / name.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__init__.py").is_file():
            raise FileNotFoundError(f"folder must hold the package minisgl, got {folder} without {path}.py")


class HostTensor(torch.Tensor):
    """A tensor in host memory that is not pinned when it is asked to be."""

    def pin_memory(self, *arguments: object) -> torch.Tensor:
        """Return the tensor itself."""
        return self


def num_alike(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return with how many equal tokens both begin."""
    num = min(len(one), len(other))
    return int((one[:num] == other[:num]).long().cumprod(0).sum())


def write_rows(table: torch.Tensor, slots: torch.Tensor, rows: list[tuple[int, int, int]], page_size: int) -> None:
    """Put new slots into the table. rows: (row, first page, page after the last) of each request."""
    for row, first, end in rows:
        table[row, first * page_size : end * page_size] = slots[: (end - first) * page_size]
        slots = slots[(end - first) * page_size :]


class Life:
    """Prompts through the managers of mini-sglang, as its scheduler calls them, with a batch a step."""

    def __init__(self, parts: SimpleNamespace, kind: str, page_size: int) -> None:
        self.parts, self.rng = parts, random.Random(page_size)
        vars(parts.core)["_GLOBAL_CTX"] = parts.Context(page_size)
        self.table = torch.zeros(NUM_ROWS, ROW_TOKENS, dtype=torch.int32)
        self.slots = parts.CacheManager(NUM_SLOTS // page_size, page_size, self.table, kind)
        self.rows = parts.TableManager(NUM_ROWS, self.table)
        self.decodes = parts.DecodeManager(page_size)
        self.prompts = parts.PrefillManager(self.slots, self.rows, self.decodes)
        self.memory = torch.zeros(NUM_SLOTS, dtype=torch.int64)
        self.texts = [self.some_tokens(100) for _ in range(8)]
        self.begun: set[int] = set()
        self.num_found = self.num_asked = self.num_stale = self.num_later = 0

    def run(self) -> None:
        """Serve all prompts. Raises AssertionError where a slot has not what it is said to have."""
        waiting = [self.message(uid) for uid in range(NUM_PROMPTS)]
        arrivals = random.Random(0)
        while waiting or self.prompts.runnable or self.decodes.runnable:
            if waiting and arrivals.random() < 0.3:
                self.prompts.add_one_req(waiting.pop())
            batch = self.prompts.schedule_next_batch(MOST_AT_ONCE) or self.decodes.schedule_next_batch()
            if batch is not None:
                self.compute(batch.reqs)
                self.end_step(batch)
            else:
                self.slots.check_integrity()
                assert waiting or not self.prompts.runnable, "a prompt waits, and nothing runs"
        assert self.slots.available_size == NUM_SLOTS, "slots were lost"
        assert len(self.begun) == NUM_PROMPTS, "prompts were lost"

    def some_tokens(self, most: int) -> torch.Tensor:
        return torch.tensor([self.rng.randrange(50) for _ in range(self.rng.randrange(1, most))], dtype=torch.int32)

    def message(self, uid: int) -> SimpleNamespace:
        """Return a prompt as a user sends it: one of the texts, and some tokens of its own."""
        tokens = torch.cat([self.rng.choice(self.texts), self.some_tokens(40)])
        self.num_asked += len(tokens)
        params = self.parts.SamplingParams(max_tokens=self.rng.randrange(1, 20), ignore_eos=True)
        return SimpleNamespace(uid=uid, input_ids=tokens.as_subclass(HostTensor), sampling_params=params)

    def compute(self, reqs: Sequence[Any]) -> None:
        """Check what new requests have found, and write the numbers of all tokens that are to be computed."""
        self.slots.allocate_paged(reqs)
        for req in reqs:
            numbers = torch.tensor(numbers_of(req.input_ids))
            row = self.table[req.table_idx].long()
            right = self.memory[row[: req.cached_len]].equal(numbers[: req.cached_len])
            if req.uid in self.begun:
                self.num_later, self.num_stale = self.num_later + 1, self.num_stale + (not right)
            else:
                assert right, "wrong K and V"
                self.begun.add(req.uid)
                self.num_found += req.cached_len
            self.memory[row[req.cached_len : req.device_len]] = numbers[req.cached_len :]
            req.complete_one()

    def end_step(self, batch: Any) -> None:
        """Give each request its next token, the cache what was computed, and the rows of ended ones back."""
        self.decodes.filter_reqs(batch.reqs)
        with self.slots.lazy_free_region():
            for req in batch.reqs:
                if isinstance(req, self.parts.ChunkedReq):
                    continue  # the rest of its prompt comes in another batch
                req.append_host(torch.tensor([numbers_of(req.input_ids)[-1] % 50], dtype=torch.int32))
                ended = not req.can_decode
                if ended:
                    self.rows.free(req.table_idx)
                if ended or batch.is_prefill:
                    self.slots.cache_req(req, finished=ended)


def numbers_of(tokens: torch.Tensor) -> list[int]:
    """Return a number for each token, which stands for it and all before it."""
    numbers, so_far = [], 1
    for token in tokens.tolist():
        so_far = hash((so_far, token))
        numbers.append(so_far)
    return numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="holds the package minisgl")
    main(parser.parse_args().folder)
