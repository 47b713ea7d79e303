"""mini-sglang's cache manager over kvpage's prefix cache, beside its own radix cache, on a CPU.

    python examples/mini_sglang.py FOLDER      FOLDER holds the package `minisgl`, such as `python` of a clone

No file of mini-sglang changes. `register` gives its registry of prefix caches one more, by the name `kvpage`. Then its
own CacheManager lives the same random life over both caches: it matches, locks, allocates, caches and frees slots for
prompts that begin alike, in portions, with fewer slots than they need together.

A number in place of K and V stands for all tokens up to its own. Each slot that a prompt finds must have its number.
Whoever takes a slot writes over it. So one that was freed early, twice, or under wrong tokens shows.

mini-sglang computes on GPUs. So only its modules for slots are imported: packages that import CUDA are left empty, and
its comparison of tokens and its writes of page tables, which need CUDA, have a line each here.
"""

import argparse
import importlib
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from kvpage.integrations.mini_sglang import register

NUM_SLOTS, NUM_ROWS, ROW_TOKENS, NUM_PROMPTS = 640, 6, 256, 300
PAGE_SIZES = (1, 16)


def main(folder: str) -> None:
    """Live once over each cache, for each page size."""
    parts = load(Path(folder))
    register(num_pages=NUM_SLOTS)
    for page_size in PAGE_SIZES:
        for kind in ("radix", "kvpage"):
            life = Life(parts, kind, page_size)
            life.run()
            print(f"{kind}, pages of {page_size}: {life.num_found} of {life.num_asked} prompt tokens found")


def load(folder: Path) -> SimpleNamespace:
    """Import mini-sglang's modules for slots. Raises FileNotFoundError if the folder has no package `minisgl`."""
    if not (folder / "minisgl" / "kvcache").is_dir():
        raise FileNotFoundError(f"folder must hold the package minisgl, got {folder}")
    for name in ("minisgl", "minisgl.scheduler", "minisgl.utils", "minisgl.kernel"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
    for name in ("misc", "registry"):
        vars(sys.modules["minisgl.utils"]).update(vars(importlib.import_module(f"minisgl.utils.{name}")))
    vars(sys.modules["minisgl.kernel"])["fast_compare_key"] = num_alike
    slots = importlib.import_module("minisgl.scheduler.cache")
    vars(slots)["_write_page_table"] = write_rows
    return SimpleNamespace(core=importlib.import_module("minisgl.core"), CacheManager=slots.CacheManager)


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
    """Requests over a CacheManager of mini-sglang, one step of one of them at a time."""

    def __init__(self, parts: SimpleNamespace, kind: str, page_size: int) -> None:
        self.core, self.rng = parts.core, random.Random(page_size)
        vars(self.core)["_GLOBAL_CTX"] = self.core.Context(page_size)
        self.table = torch.zeros(NUM_ROWS, ROW_TOKENS, dtype=torch.int32)
        self.manager = parts.CacheManager(NUM_SLOTS // page_size, page_size, self.table, kind)
        self.memory = torch.zeros(NUM_SLOTS, dtype=torch.int64)
        self.rows, self.running = list(range(NUM_ROWS)), []
        self.texts = [self.some_tokens(100) for _ in range(8)]
        self.num_found = self.num_asked = 0

    def run(self) -> None:
        """Serve all prompts. Raises AssertionError where a slot has not what it is said to have."""
        waiting = [self.prompt() for _ in range(NUM_PROMPTS)]
        while waiting or self.running:
            if waiting and self.rows and self.rng.random() < 0.3 and self.admit(waiting[-1]):
                waiting.pop()
            elif self.running:
                self.step(self.rng.choice(self.running))
            if not self.running:
                self.manager.check_integrity()
        assert self.manager.available_size == NUM_SLOTS, "slots were lost"

    def some_tokens(self, most: int) -> torch.Tensor:
        return torch.tensor([self.rng.randrange(50) for _ in range(self.rng.randrange(1, most))], dtype=torch.int32)

    def prompt(self) -> torch.Tensor:
        return torch.cat([self.rng.choice(self.texts), self.some_tokens(40)])

    def admit(self, tokens: torch.Tensor) -> bool:
        """Begin a request, as mini-sglang's prefill does. Returns whether there is room for it."""
        handle = self.manager.match_req(SimpleNamespace(input_ids=tokens, input_len=len(tokens))).cuda_handle
        num_new = self.rng.randrange(1, 20)
        self.manager.lock(handle)
        if sum(self.to_come(one) for one in self.running) + len(tokens) + num_new + 32 > self.manager.available_size:
            self.manager.unlock(handle)
            return False
        row, slots = self.rows.pop(), handle.get_matched_indices()
        self.table[row, : handle.cached_len] = slots
        assert self.memory[slots.long()].tolist() == numbers_of(tokens[: handle.cached_len]), "wrong K and V"
        req = self.core.Req(tokens, row, handle.cached_len, num_new, row, SimpleNamespace(), handle)
        self.running.append(req)
        self.num_found, self.num_asked = self.num_found + handle.cached_len, self.num_asked + len(tokens)
        return True

    def to_come(self, req: Any) -> int:
        """How many tokens the request may still take, in whole pages."""
        return req.max_device_len - req.cached_len + 32

    def step(self, req: Any) -> None:
        """Compute the request's tokens that have no K and V: of the prompt first, then one a step."""
        is_prompt = req.extend_len > 1
        self.manager.allocate_paged([req])
        slots = self.table[req.table_idx, req.cached_len : req.device_len].long()
        self.memory[slots] = torch.tensor(numbers_of(req.input_ids)[req.cached_len :])
        req.complete_one()
        req.append_host(torch.tensor([self.rng.randrange(50)], dtype=torch.int32))
        if not req.can_decode:
            self.running.remove(req)
            self.rows.append(req.table_idx)
            self.manager.cache_req(req, finished=True)
        elif is_prompt:
            self.manager.cache_req(req, finished=False)


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
