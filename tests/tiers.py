"""Tiers: which tests a plain `pytest` runs, and which wait for `slow` and `nightly` runs.

    seconds of each case, recorded ─► recorded_seconds.json ─┐
    BUDGET, or more by SHOWN ────────────────────────────────┼─► the cases that the budget pays: default; others: slow
    the seed of the day: an order of the cases ──────────────┘
    WHOLE: files and functions that are of one tier ──────────► slow, nightly

A function's cases share one budget of CPU seconds. A function whose cases cost more is sampled: every day draws other
cases. Where no case fits, the cheapest one runs, if it takes a second at most: so the tier loses dear functions alone.
A function that the record does not know is in the default tier. SHOWN gives more to the functions on which a
promise rests; tests/house/test_tiers.py holds that the default tier keeps them.
"""

import functools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("recorded_seconds.json")
TIERS = ("slow", "nightly")  # besides the default one
DEFAULT = "not slow and not nightly"  # as in pyproject.toml
SECONDS = "cpu_seconds"  # the property of a report
BUDGET = 0.3  # CPU seconds of one function in the default tier, measured with both processors busy
DEAR = 1.0  # CPU seconds of a case from which on it waits for the slow tier, unless its function's budget pays it
LISTED = 0.25  # the record names cases and functions from this many seconds on

# Files and functions whose tier no record decides.
WHOLE: dict[str, str] = {
    # Kernels compiled ahead of time, and their machine code. tests/compiled runs some that are compiled.
    "tests/kernels/test_attention_compile.py": "slow",
    "tests/kernels/test_attention_launch.py": "slow",
    "tests/kernels/test_blend_compile.py": "slow",
    "tests/kernels/test_interpreted.py::test_all_cases": "slow",
    "tests/kernels/test_layer_compile.py": "slow",
    "tests/kernels/test_sampling_compile.py": "slow",
    "tests/kernels/test_triton_compile.py": "slow",
    "tests/kernels/test_interpreted.py::test_families": "nightly",
    "tests/kernels/test_machine_code.py::test_a_tile_takes_what_the_table_says": "nightly",
    "tests/serving/loop/test_warmup.py::test_triton_compiles_nothing_after_warmup": "slow",
    # Other processes, each with a torch and a model of its own, and compilers of models: the dear part is no call.
    "tests/serving/loop/test_ranks.py": "slow",
    "tests/serving/loop/test_rank_faults.py": "slow",
    "tests/serving/loop/test_rank_groups.py": "slow",
    "tests/serving/model/test_compiled_model.py": "slow",
    "tests/serving/test_telemetry.py::test_a_missing_extra_is_named": "slow",
    # Types one by one, of which test_same_bits.py shows some.
    "tests/serving/model/test_same_bits_table.py::test_a_type": "slow",
    "tests/serving/test_same_bits_lives.py": "slow",
    # nvcc compiles a module for the fixtures.
    "tests/compiled/test_compiled_copies.py": "slow",
    "tests/ops/test_swap_calls.py": "slow",
    # The short forms of all batteries. test_daily.py has a part of them.
    "tests/reliability/test_batteries.py": "slow",
}

# What the default tier must show, by functions with the CPU seconds that they may take.
SHOWN: dict[str, dict[str, float]] = {
    "every public name is called": {  # in "fuzzing of entry points" of test_work_of_the_day
        "tests/reliability/test_fuzz_targets.py::test_every_public_name_is_fuzzed_or_excused": 2,
        "tests/ops/test_torch_ops.py::test_registration": 4,
    },
    "bits do not depend on what else is computed": {
        "tests/serving/test_same_bits.py::test_a_life": 2,
        "tests/serving/test_same_bits.py::test_a_life_finds_a_row_that_depends_on_the_batch": 3,
        "tests/serving/test_same_bits.py::test_a_row_that_depends_on_the_batch_is_refused": 1,
    },
    "tokens are the model's own": {
        "tests/serving/model/test_families.py::test_a_type": 36,
        "tests/serving/model/test_latents.py::test_chunks_of_seven_then_wholly_cached": 4,
        "tests/serving/windows/test_engine_windows.py::test_requests_together_in_few_blocks": 4,
        "tests/serving/states/test_engine_families.py::test_prefixes_that_diverge_end_and_go_on": 8,
        "tests/serving/generate/test_kvpage_cache.py::test_first_call_then_shared_beginnings_then_the_whole_prompt": 4,
        "tests/serving/generate/test_kvpage_cache_generate.py::test_sampling_with_a_seed": 2,
        "tests/serving/generate/test_stateful_cache.py::test_first_call_then_whole_prompt_then_the_answer_goes_on": 6,
        "tests/serving/test_engine.py::test_seeds_give_the_same_tokens_alone_together_and_after_preemption": 2,
    },
    "trees, managers, stores and tiers are their oracles": {
        "tests/reliability/test_daily.py::test_work_of_the_day": 40,
        "tests/blocks/test_tree_life.py::test_random_lives": 4,
        "tests/blocks/test_block_manager.py::test_random_lives_read_what_they_wrote": 4,
        "tests/blocks/groups/test_group_life.py::test_all_groups_hold_the_exact_prefix": 4,
        "tests/store/test_store_life.py::test_random_lives": 4,
        "tests/store/tiers/test_memory_tier.py::test_random_life": 4,
        "tests/store/disk/test_disk.py::test_random_life_over_many_openings": 6,
    },
    "agents run on the server": {
        "tests/server/test_agents.py::test_an_agent_of_twelve_turns_with_streamed_calls": 2.5,
        "tests/server/test_tool_calls.py::test_a_call_is_parsed_whole_and_streamed": 2.5,
    },
    "a changed record is a miss": {
        "tests/store/bytes/test_byte_damage.py::test_any_changed_byte_in_memory_is_a_miss": 4,
        "tests/store/disk/test_disk.py::test_every_corrupted_byte_is_a_miss_or_exact": 8,
    },
    "a refused call changes nothing": {
        "tests/blocks/test_every_manager.py::test_bad_calls_raise_and_change_nothing": 2,
        "tests/blocks/test_block_manager_refusals.py::test_whatever_fails_leaves_no_pin": 2,
        "tests/ops/test_reshape.py::test_a_refused_reshape_writes_nothing": 2,
        "tests/store/tiers/test_memory_tier.py::test_a_refused_commit_publishes_nothing": 2,
    },
    "a client is served over HTTP": {
        "tests/server/test_clients.py::test_openai_chats_and_its_second_turn_is_cached": 4,
        "tests/server/test_clients.py::test_openai_streams_what_it_answers_whole": 4,
    },
    "functions fit on a screen, and calls pass through few": {
        "tests/house/test_sizes.py::test_functions_fit_on_a_screen": 4,
        "tests/house/test_walks.py::test_a_walk_is_short": 2,
    },
    "the import is light, and the pages' examples run": {
        "tests/house/test_import.py::test_needs_neither_triton_nor_transformers": 6,
        "tests/house/test_page_examples.py::test_examples_of_a_page_run": 12,
    },
    "each kernel is the reference, by the interpreter": {
        "tests/kernels/test_interpreted.py::test_each_kernel_is_the_reference": 30,
    },
    "each kind of kernel is the reference, as it is compiled": {
        "tests/compiled/test_compiled_attention.py::test_attention": 8,
        "tests/compiled/test_compiled_attention.py::test_keys_that_sequences_share": 5,
        "tests/compiled/test_compiled_blend.py::test_deviations": 4,
        "tests/compiled/test_compiled_blend.py::test_rows_are_mixed": 4,
        "tests/compiled/test_compiled_rows.py::test_chunks_are_stored_and_loaded": 6,
        "tests/compiled/test_compiled_rows.py::test_rows_are_cached_and_gathered": 4,
        "tests/compiled/test_compiled_sampling.py::test_tokens_are_those_of_the_cpu": 8,
    },
}


def function_of(case: str) -> str:
    """Return the function's name in the name of a case: `tests/a.py::test_b` of `tests/a.py::test_b[1-x]`."""
    return case.split("[", 1)[0]


def budget_of(function: str) -> float:
    """Return the CPU seconds that the default tier has for all cases of a function together."""
    return max((functions[function] for functions in SHOWN.values() if function in functions), default=BUDGET)


def whole_tier(function: str) -> str | None:
    """Return the tier that WHOLE names for a function or its file."""
    return WHOLE.get(function) or WHOLE.get(function.split("::", 1)[0])


@dataclass(slots=True)
class Record:
    """CPU seconds of calls. cases: of the dear cases, by name. functions: of all cases together, by function."""

    cases: dict[str, float] = field(default_factory=dict)
    functions: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = RECORD) -> "Record":
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path = RECORD) -> None:
        columns = {"cases": self.cases, "functions": self.functions}
        listed = {name: {key: round(seconds, 2) for key, seconds in sorted(column.items()) if seconds >= LISTED}
                  for name, column in columns.items()}  # fmt: skip
        path.write_text(json.dumps(listed, indent=0) + "\n")

    def add(self, measured: dict[str, float]) -> None:
        """Take the seconds of a run for those of its functions. A function that did not run keeps its seconds."""
        functions = {function_of(case) for case in measured}
        self.cases = {case: s for case, s in self.cases.items() if function_of(case) not in functions} | measured
        totals = dict.fromkeys(functions, 0.0)
        for case, seconds in measured.items():
            totals[function_of(case)] += seconds
        self.functions |= totals

    def seconds_of(self, function: str, cases: Iterable[str]) -> dict[str, float]:
        """Return the seconds of each case. Cases that have no record of their own share the rest of the function's."""
        known = {case: self.cases.get(case) for case in cases}
        rest = self.functions.get(function, 0.0) - sum(seconds or 0.0 for seconds in known.values())
        share = max(rest, 0.0) / max(1, sum(seconds is None for seconds in known.values()))
        return {case: share if seconds is None else seconds for case, seconds in known.items()}

    def default_cases(self, function: str, cases: Iterable[str], seed: int) -> set[str]:
        """Return the cases of a function that the default tier runs on the day of `seed`."""
        seconds = self.seconds_of(function, cases)
        left, chosen = budget_of(function), set()
        for case in shuffled(function, seconds, seed):
            if seconds[case] <= left:
                left -= seconds[case]
                chosen.add(case)
        return chosen or {case for case in sorted(seconds, key=seconds.__getitem__)[:1] if seconds[case] < DEAR}


def by_function(cases: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for case in cases:
        groups.setdefault(function_of(case), []).append(case)
    return groups


def shuffled(function: str, cases: Iterable[str], seed: int) -> list[str]:
    """Return the cases of a function in the order of the day: the same, whichever order they came in."""
    order = sorted(cases)
    random.Random(f"{seed} {function}").shuffle(order)
    return order


def draw(cases: Iterable[str], num_each: int, seed: int) -> set[str]:
    """Return at most `num_each` cases of each function."""
    groups = by_function(cases).items()
    return {case for function, group in groups for case in shuffled(function, group, seed)[:num_each]}


def tiers_of(cases: Iterable[str], record: Record, seed: int) -> dict[str, str]:
    """Return the tier of each case that is not in the default one: `slow` or `nightly`. `cases`: of whole functions."""
    tiers = {}
    for function, group in by_function(cases).items():
        whole = whole_tier(function)
        default = set() if whole else record.default_cases(function, group, seed)
        tiers |= {case: whole or "slow" for case in group if case not in default}
    return tiers


def expression_for(arguments: Iterable[str], is_recording: bool) -> str:
    """Return the expression for `-m` where the command line has none. What is named runs, and so does what is recorded.

    `pytest FILE` runs the slow tests of the file, `pytest FILE::TEST` any test.
    """
    names = list(arguments)
    if all("::" in name for name in names):
        return ""
    is_of_files = all("::" in name or name.endswith(".py") for name in names)
    return "not nightly" if is_of_files or is_recording else DEFAULT


class Recording:
    """A plugin that writes the seconds of a run's tests to the record."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.seconds[report.nodeid] = float(dict(report.user_properties)[SECONDS])

    def pytest_sessionfinish(self) -> None:
        record = Record.read()
        record.add(self.seconds)
        record.write()


def may_end(case: str, seconds: float) -> bool:
    """Whether a test may be begun with so many seconds left: a slow machine takes thrice those of the record."""
    return 3 * recorded().cases.get(case, 1.0) <= seconds


@functools.cache
def recorded() -> Record:
    return Record.read()
