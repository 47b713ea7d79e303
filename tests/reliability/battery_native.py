"""The C++ core alone, without Python and CUDA: beside naive models under the sanitizers of addresses and of undefined
behaviour, from several threads under that of threads, and with each allocation failing in turn. All that computes and
copies runs under both, by several callers of the workers at once, and in children of a process that has some."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from battery import Advance, Battery, Figures
from native_build import build, build_numeric, missing

LIVES = [
    "allocations",
    "copy_life",
    "lives",
    "naive_slots",
    "naive_tree",
    "sequence_life",
    "slot_life",
    "slot_pool_life",
    "tree_life",
]
# Millions of small allocations: their call stacks cost more than all else.
OPTIONS = {
    "ASAN_OPTIONS": "malloc_context_size=1:quarantine_size_mb=1:thread_local_quarantine_size_kb=64:detect_leaks=1"
    ":max_malloc_fill_size=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
NUM_PROCESSES = 2


def run_core(seed: int, count: int, advance: Advance) -> Figures:
    return run_all(build("core", [*LIVES, "core"], "memory"), seed, count, advance)


def run_threads(seed: int, count: int, advance: Advance) -> Figures:
    program = build("threads", ["allocations", "threads"], "threads")
    figures = run(program, seed, count)
    advance(count)
    return figures


def run_memory(seed: int, count: int, advance: Advance) -> Figures:
    program = build("memory", [*LIVES, "failing_allocator", "memory"], "memory", ["-Wl,--wrap=realloc"])
    return run_all(program, seed, count, advance)


def run_numeric(seed: int, count: int, advance: Advance) -> Figures:
    """A third of the count each: under both sanitizers, and with forks; a child may not allocate under a sanitizer that
    has its own allocator, whose locks other threads held."""
    figures: Figures = {}
    for kind, how in (("memory", "stays"), ("threads", "stays"), ("behaviour", "forks")):
        program = build_numeric(f"numeric-{kind}", ["allocations", "numeric"], kind, ["-Wl,--wrap=madvise"])
        figures = run(program, seed, count // 3, how)
        advance(count // 3)
    return figures | {"operations": count}


def run_all(program: Path, seed: int, count: int, advance: Advance) -> Figures:
    """Shares of the count in processes of their own, each with its own seed. Their figures, added up."""
    shares = [count * (i + 1) // NUM_PROCESSES - count * i // NUM_PROCESSES for i in range(NUM_PROCESSES)]

    def one(i: int) -> Figures:
        figures = run(program, seed * NUM_PROCESSES + i, shares[i])
        advance(shares[i])
        return figures

    total: Figures = {}
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        for figures in pool.map(one, range(NUM_PROCESSES)):
            for name, value in figures.items():
                total[name] = total.get(name, 0) + value
    return total


def run(program: Path, seed: int, count: int, *how: str) -> Figures:
    """AssertionError with what a sanitizer, or the program itself, found."""
    done = subprocess.run(
        [program, str(seed), str(count), *how], capture_output=True, text=True, env=os.environ | OPTIONS
    )
    if done.returncode != 0 or done.stderr:
        raise AssertionError(f"{program.name} {seed} {count} ended with {done.returncode}:\n{done.stderr[:20_000]}")
    figures: Figures = json.loads(done.stdout)
    return figures


BATTERIES = [
    Battery("native core", "operations", 3_000_000, 500_000_000, run_core, missing()),
    Battery("native threads", "operations", 150_000, 50_000_000, run_threads, missing()),
    Battery("native numbers", "operations", 120, 60_000, run_numeric, missing()),
    Battery("native memory", "failed allocations", 2_000, 400_000, run_memory, missing()),
]
