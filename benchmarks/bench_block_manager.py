"""How long does a block manager take for a decode step of 256 sequences, and to admit a prompt that is cached in part?

- step by rows: `rows.append`, `rows.inputs` (slots, tables, lengths) and `rows.commit` of one token each. In a step a
  sixteenth of the sequences fills a block. Bound: one numpy copy of the arrays that the step returns.
- step by names: `append`, `slot_mappings`, `block_tables` of all, then `commit` of each.
- allocate: a prompt of 8,192 tokens, of which 6,144 are cached; given as an int32 array, and as a Python list. The
  prompt is in the processor's cache, as one that was just made. Bounds: memcmp of the cached tokens; for the list
  numpy's own conversion to int32, which memcmp follows.
- allocate of groups: the same prompt as an array, where full layers have a window's group beside them, states, or both.
  Bounds: full layers alone; for both, what the window and the states add to these, each alone.

All are measured in the same run and take turns. Figures are medians of rounds, with quartiles, of the thread's own
time. Slots and tables are compared with those made of `block_ids` before anything is timed.
Targets: 0.3 us a sequence by rows; 4 us for an array, 10 us for a list.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvpage import BlockManager, States, Window
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result, thread_seconds
from kvpage.benchmarks.memcmp import memcmp_seconds
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import finish, parse

B = 16
PROMPT_TOKENS, CACHED_TOKENS = 8192, 6144
FEWEST_TOKENS, NUM_STEPS = 512, 16  # of a sequence at first; of a measurement: each sequence fills a block once
NUM_PROMPTS = 16  # allocated in one measurement
WINDOW, STATES = "allocate, window", "allocate, states"
BOTH, SUM = "allocate, both", "window's and states' shares"
COLUMNS = "{what:<16} {each:<18} {us:>24.3f} {target us:>9} {bound us:>24.3f} {bound}"


class Steps:
    """Sequences of 512 to 1,535 tokens, the same in two managers: one is called by rows, the other by names."""

    def __init__(self, num_seqs: int, num_rounds: int) -> None:
        most = 2 * FEWEST_TOKENS + num_seqs + (num_rounds + 4) * NUM_STEPS
        self.seq_ids = list(range(num_seqs))
        self.by_rows, self.by_names = (BlockManager(num_seqs * (most // B + 1), B) for _ in range(2))
        self.lengths = [FEWEST_TOKENS + 67 * i % (2 * FEWEST_TOKENS) for i in self.seq_ids]
        for manager in (self.by_rows, self.by_names):
            for seq_id, length in enumerate(self.lengths):
                prompt = np.arange(length, dtype=np.int32) + 100_000 * seq_id
                manager.allocate(seq_id, prompt)
                manager.commit(seq_id, prompt)
        self.rows = self.by_rows.rows.of(self.seq_ids)
        self.tokens = np.arange(num_seqs, dtype=np.int32)
        self.each_token = np.split(self.tokens, num_seqs)
        self.step_by_rows()
        self.step_by_names()
        self.verify()
        self.made = [np.array(array) for array in self.by_rows.rows.inputs(self.rows)]

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
        *by_rows, lengths = self.by_rows.rows.inputs(self.rows)
        starts = [length - 1 for length in self.lengths]
        named_slots = self.by_names.slot_mappings(self.seq_ids, starts, self.lengths)
        assert lengths.tolist() == self.lengths
        by_names = named_slots, self.by_names.block_tables(self.seq_ids)
        for manager, inputs in ((self.by_rows, by_rows), (self.by_names, by_names)):
            manager.check()
            for seq_id, length, slot, row in zip(self.seq_ids, self.lengths, *inputs, strict=True):
                ids = manager.block_ids(seq_id)
                assert slot == int(ids[(length - 1) // B]) * B + (length - 1) % B
                assert row[: len(ids)].tolist() == ids.tolist() and not row[len(ids) :].any()


class Admissions:
    """A prompt that is cached in part, allocated under some names and, outside of the time, released.

    groups: beside full layers.
    """

    def __init__(self, *groups: Window | States) -> None:
        self.manager = BlockManager((NUM_PROMPTS + 2) * PROMPT_TOKENS // B, B, groups=groups)
        self.prefix = np.arange(CACHED_TOKENS, dtype=np.int32)
        self.manager.allocate("first", self.prefix)
        self.manager.windows.open(["first"], [CACHED_TOKENS])
        self.manager.commit("first", self.prefix)
        self.manager.keep_end("first")  # the state, if there is a group of states
        self.manager.release("first")
        self.prompt = np.append(self.prefix, -self.prefix[: PROMPT_TOKENS - CACHED_TOKENS] - 1)
        self.tokens = self.prompt.tolist()
        for prompt in (self.prompt, self.tokens):
            allocation = self.manager.allocate("check", prompt)
            assert (allocation.num_cached_tokens, len(allocation.block_ids)) == (CACHED_TOKENS, PROMPT_TOKENS // B)
            self.manager.release("check")

    def allocate(self, prompt: Any) -> float:
        """Return the seconds of one call."""
        allocate = self.manager.allocate
        begin = time.thread_time()
        for seq_id in range(NUM_PROMPTS):
            allocate(seq_id, prompt)
        spent = time.thread_time() - begin
        for seq_id in range(NUM_PROMPTS):
            self.manager.release(seq_id)
        return spent / NUM_PROMPTS

    def calls(self) -> dict[str, Callable[[], float]]:
        """Return what takes turns: the calls, and their bounds. Each gives its seconds."""
        copy = self.prefix.copy()
        return {
            "allocate, array": functools.partial(self.allocate, self.prompt),
            "allocate, list": functools.partial(self.allocate, self.tokens),
            "memcmp": lambda: memcmp_seconds(self.prefix, copy, lambda call: [thread_seconds(call, NUM_PROMPTS)])[0],
            "numpy's conversion": lambda: thread_seconds(lambda: np.array(self.tokens, np.int32), NUM_PROMPTS),
        }


def groups_of() -> dict[str, Admissions]:
    """Return managers of groups. All have room for each prompt."""
    window, states = Window(1024, (NUM_PROMPTS + 2) * PROMPT_TOKENS // B), States(4 * NUM_PROMPTS)
    return {WINDOW: Admissions(window), STATES: Admissions(states), BOTH: Admissions(window, states)}


def measure(num_seqs: int, rounds: int) -> Iterator[Row]:
    steps, admissions = Steps(num_seqs, rounds), Admissions()
    groups = groups_of()
    calls = {"step by rows": steps.step_by_rows, "step by names": steps.step_by_names, "numpy copy": steps.copy}
    times = in_turns(calls, rounds, NUM_STEPS, thread_seconds)
    us = {name: Figure.of(spent, 1e6 / num_seqs) for name, spent in times.items()}
    each = {name: functools.partial(cases.allocate, cases.prompt) for name, cases in groups.items()}
    times = in_turns(admissions.calls() | each, rounds, measure=result)
    full, window, states = (np.array(times[name]) for name in ("allocate, array", WINDOW, STATES))
    us |= {name: Figure.of(spent, 1e6) for name, spent in times.items()}
    us[SUM] = Figure.of((window + states - full).tolist(), 1e6)
    steps.verify()
    for cases in (admissions, *groups.values()):
        cases.manager.check()
    for name, bound, target in (
        ("step by rows", "numpy copy", 0.3),
        ("step by names", "numpy copy", None),
        ("allocate, array", "memcmp", 4.0),
        ("allocate, list", "numpy's conversion", 10.0),
        (WINDOW, "allocate, array", None),
        (STATES, "allocate, array", None),
        (BOTH, SUM, None),
    ):
        unit = f"a sequence of {num_seqs}" if name in calls else "a prompt"
        row = {"what": name, "each": unit, "us": us[name], "bound": bound, "bound us": us[bound]}
        yield row | {"target us": target}


def main() -> None:
    options = parse("block_manager", __doc__, rounds=21, seqs=256)
    rows = shown(COLUMNS, measure(options.seqs, options.rounds))
    met = all(row["us"].median <= row["target us"] for row in rows if row["target us"])
    names = [f"{row['what']}, {row['each']}" for row in rows]
    series = {"kvpage": [row["us"] for row in rows], "bound": [row["bound us"] for row in rows]}
    finish(options, lambda path: grouped(path, names, series, "us", xscale="log"), rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
