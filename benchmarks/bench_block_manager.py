"""How long does a block manager take for a decode step of 256 sequences, and to admit a prompt that is cached in part?

- step by rows: `rows.append`, `rows.inputs` (slots, tables, lengths) and `rows.commit` of one token each. In a step a
  sixteenth of the sequences fills a block. Bound: one numpy copy of the arrays that the step returns.
- step by names: `append`, `slot_mappings`, `block_tables` of all, then `commit` of each.
- allocate: a prompt of 8,192 tokens, of which 6,144 are cached; given as an int32 array, and as a Python list. The
  prompt is in the processor's cache, as one that was just made. Bounds: memcmp of the cached tokens; for the list
  numpy's own conversion to int32, which memcmp follows.

All are measured in the same run and take turns. Figures are medians of rounds, with quartiles, of the thread's own
time. Slots and tables are compared with those made of `block_ids` before anything is timed.
Targets: 0.3 us a sequence by rows; 4 us for an array, 10 us for a list.
"""

import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvpage import BlockManager
from kvpage.benchmarks.cells import show_all
from kvpage.benchmarks.figure import Figure, in_turns, own_seconds, thread_seconds
from kvpage.benchmarks.pictures import add_bars, drawn
from kvpage.benchmarks.script import Options, finish

B = 16
PROMPT_TOKENS, CACHED_TOKENS = 8192, 6144
FEWEST_TOKENS, NUM_STEPS = 512, 16  # of a sequence at first; of a measurement: each sequence fills a block once
NUM_PROMPTS = 16  # allocated in one measurement

libc = ctypes.CDLL(None)
libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Steps:
    """Sequences of 512 to 1,535 tokens, the same in two managers: one is called by rows, the other by names."""

    def __init__(self, num_seqs: int, num_rounds: int) -> None:
        most = 2 * FEWEST_TOKENS + num_seqs + (num_rounds + 4) * NUM_STEPS
        self.seq_ids = list(range(num_seqs))
        self.by_rows, self.by_names = (BlockManager(num_seqs * (most // B + 1), B) for _ in range(2))
        self.lengths = [FEWEST_TOKENS + 67 * i % (2 * FEWEST_TOKENS) for i in self.seq_ids]
        for manager in (self.by_rows, self.by_names):
            for seq_id, length in enumerate(self.lengths):
                manager.allocate(seq_id, self.prompt(seq_id, length))
                manager.commit(seq_id, self.prompt(seq_id, length))
        self.rows = self.by_rows.rows.of(self.seq_ids)
        self.tokens = np.arange(num_seqs, dtype=np.int32)
        self.each_token = np.split(self.tokens, num_seqs)
        self.step_by_rows()
        self.step_by_names()
        self.verify()
        self.made = [np.array(array) for array in self.by_rows.rows.inputs(self.rows)]

    @staticmethod
    def prompt(seq_id: int, length: int) -> np.ndarray:
        return np.arange(length, dtype=np.int32) + 100_000 * seq_id

    def step_by_rows(self) -> None:
        rows = self.by_rows.rows
        rows.append(self.rows)
        rows.inputs(self.rows)
        rows.commit(self.rows, self.tokens)

    def step_by_names(self) -> None:
        manager, ends = self.by_names, [length + 1 for length in self.lengths]
        manager.append(self.seq_ids)
        manager.slot_mappings(self.seq_ids, self.lengths, ends)
        manager.block_tables(self.seq_ids)
        for seq_id, token in zip(self.seq_ids, self.each_token, strict=True):
            manager.commit(seq_id, token)
        self.lengths = ends

    def copy(self) -> None:
        for array in self.made:
            np.copyto(np.empty_like(array), array)

    def verify(self) -> None:
        """Compare both managers' arguments with those made of each sequence's ids."""
        slots, tables, lengths = self.by_rows.rows.inputs(self.rows)
        assert lengths.tolist() == self.lengths
        assert slots.tolist() == self.last_slots(self.by_rows)
        starts = [length - 1 for length in self.lengths]
        assert self.by_names.slot_mappings(self.seq_ids, starts, self.lengths).tolist() == self.last_slots(
            self.by_names
        )
        for manager, found in ((self.by_rows, tables), (self.by_names, self.by_names.block_tables(self.seq_ids))):
            for seq_id, row in zip(self.seq_ids, found, strict=True):
                ids = manager.block_ids(seq_id)
                assert row[: len(ids)].tolist() == ids.tolist() and not row[len(ids) :].any()

    def last_slots(self, manager: BlockManager) -> list[int]:
        last = [length - 1 for length in self.lengths]
        return [int(manager.block_ids(i)[at // B]) * B + at % B for i, at in zip(self.seq_ids, last, strict=True)]


class Admissions:
    """A prompt that is cached in part, allocated under some names and, outside of the time, released."""

    def __init__(self) -> None:
        self.manager = BlockManager((NUM_PROMPTS + 2) * PROMPT_TOKENS // B, B)
        prefix = np.arange(CACHED_TOKENS, dtype=np.int32)
        self.manager.allocate("first", prefix)
        self.manager.commit("first", prefix)
        self.manager.release("first")
        self.prompt = np.append(prefix, -prefix[: PROMPT_TOKENS - CACHED_TOKENS] - 1)
        self.tokens, self.copy = self.prompt.tolist(), prefix.copy()
        for given in (self.prompt, self.tokens):
            found = self.manager.allocate("one", given)
            assert (found.num_cached_tokens, len(found.block_ids)) == (CACHED_TOKENS, PROMPT_TOKENS // B)
            self.manager.release("one")

    def allocate(self, given: Any) -> float:
        """Return the seconds of one call."""
        allocate = self.manager.allocate
        begin = time.thread_time()
        for seq_id in range(NUM_PROMPTS):
            allocate(seq_id, given)
        spent = time.thread_time() - begin
        for seq_id in range(NUM_PROMPTS):
            self.manager.release(seq_id)
        return spent / NUM_PROMPTS

    def compare(self) -> float:
        """Return the seconds of memcmp, without those of calling it."""
        a, b, size, call = self.prompt.ctypes.data, self.copy.ctypes.data, self.copy.nbytes, libc.memcmp
        assert call(a, b, size) == 0
        empty = thread_seconds(lambda: call(a, b, 0), NUM_PROMPTS)
        return thread_seconds(lambda: call(a, b, size), NUM_PROMPTS) - empty

    def convert(self) -> float:
        return thread_seconds(lambda: np.array(self.tokens, np.int32), NUM_PROMPTS)


def measure_steps(num_seqs: int, rounds: int) -> list[dict[str, Any]]:
    steps = Steps(num_seqs, rounds)
    calls = {"rows": steps.step_by_rows, "names": steps.step_by_names, "copy": steps.copy}
    taken = in_turns(calls, rounds, NUM_STEPS, thread_seconds)
    steps.verify()
    for manager in (steps.by_rows, steps.by_names):
        manager.check()
    scale = 1e6 / num_seqs
    bound = Figure.of(taken["copy"], scale)
    return [
        row(f"step by {name}", f"a sequence of {num_seqs}", Figure.of(taken[name], scale), "numpy copy", bound, target)
        for name, target in (("rows", 0.3), ("names", None))
    ]


def measure_admissions(rounds: int) -> list[dict[str, Any]]:
    admissions = Admissions()
    calls: dict[str, Callable[[], float]] = {
        "array": functools.partial(admissions.allocate, admissions.prompt),
        "list": functools.partial(admissions.allocate, admissions.tokens),
        "memcmp": admissions.compare,
        "numpy's conversion": admissions.convert,
    }
    taken = in_turns(calls, rounds, measure=own_seconds)
    admissions.manager.check()
    us = {name: Figure.of(each, 1e6) for name, each in taken.items()}
    bounds = {"array": "memcmp", "list": "numpy's conversion"}
    return [
        row(f"allocate, {given}", "a prompt", us[given], bound, us[bound], target)
        for (given, bound), target in zip(bounds.items(), (4.0, 10.0), strict=True)
    ]


def row(what: str, each: str, us: Figure, bound: str, bound_us: Figure, target: float | None) -> dict[str, Any]:
    return {"what": what, "each": each, "us": us, "bound": bound, "bound us": bound_us, "target us": target}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    names = {f"{one['what']}, {one['each']}": one for one in rows}
    with drawn(path, size=(7, 3)) as axes:
        add_bars(axes, {name: one["us"] for name, one in names.items()}, "us", xscale="log")
        axes.plot([one["bound us"].median for one in rows], list(names), "k|", markersize=14, label="bound")
        axes.legend()


def main() -> None:
    parser = Options("block_manager", __doc__, rounds=21)
    parser.add("--seqs", 256)
    options = parser.parse()
    rows = [*measure_steps(options.seqs, options.rounds), *measure_admissions(options.rounds)]
    show_all("{what:<16} {each:<18} {us:>24.3f} {target us:>9} {bound us:>24.3f} {bound}", rows)
    met = all(one["us"].median <= one["target us"] for one in rows if one["target us"])
    finish(options, functools.partial(plot, rows), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
