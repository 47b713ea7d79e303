"""Count the prompt tokens that the prefix cache of a hybrid model finds, and measure what an allocation costs.

Prompts go through BlockManager one after the other, without a model. Found are the tokens before the exact position at
which a request begins. All traces are made from a seed.

- aligned: 64 prompts of 2,200 tokens. Each begins with one of 12 system prompts of 1,600 tokens, which end 16 tokens
  after a border of the block grid of 528 tokens.
- shifted: the same 64 prompts, each shifted by 100 tokens against that grid. System prompts of 1,500 tokens end within
  a block. States at borders, as vLLM keeps them by default, give 0 hits of 64.
- short: 96 prompts with one of 12 system prompts, each shorter than a block of 2,096 tokens.
- chats: 240 turns of 12 chats at a time; each turn goes on from the answer before it.
- agents: 240 calls of 6 agents at a time behind 3,000 tokens of tools; each step is tried twice.

Beside them, on the same trace: an oracle that keeps the state of every token (the ideal), and states at block borders
only. `ends`, as vLLM does by default: at the last border, and where a portion of 2,048 tokens at most ends. `all`: at
each border. Both evict what was used least recently.

Two budgets: ample, and a tenth of the checkpoints that the ample one has kept. Its bound is one that no policy exceeds,
even if it knows the future (kvpage.benchmarks.hybrid_bounds). `marked`: the prompts' authors mark the ends of system
prompts. Otherwise a shared prefix is noticed by the second prompt that has it, and found from the third on: the first
prompt goes through its end without a reason to keep the state there, and a state cannot go back.

Targets: the ideal with an ample budget and marks; with a tenth of it, 0.9 of the bound, for each of three seeds.
Without marks, the bound is at most what the ample budget finds.
"""

import functools
import time
from collections.abc import Sequence

import numpy as np

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result
from kvpage.benchmarks.hybrid_bounds import Offers, bound, offers_of
from kvpage.benchmarks.hybrid_runs import run_borders, run_manager
from kvpage.benchmarks.hybrid_traces import TRACES, Request
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import finish, option, parse
from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.manager import BlockManager

BORDERS = {"aligned": 528, "shifted": 528, "short": 2096, "chats": 528, "agents": 528}
NUM_SEEDS = 3
TENTH = 10
ROUNDS = 100
PARTS = ("ample", "tenth", "bound", "of_bound", "borders_all_ample", "borders_all_tenth", "borders_ends_ample")
COLUMNS = "{trace:>8} {marks:>6} {slots:>6} {requests:>9} {hits:>5} {borders_hits:>13}" + "".join(
    f" {{{name}:>18.3f}}" for name in PARTS
)


def row_of(name: str, requests: list[Request], offers: Offers, is_marked: bool) -> Row:
    """Return what is found of one trace, in parts of the ideal."""
    ample = run_manager(requests, None, is_marked)
    num_slots = max(1, -(-ample.num_kept // TENTH))
    tight = run_manager(requests, num_slots, is_marked)
    most = min(bound(offers, num_slots), offers.most if is_marked else ample.num_found)
    assert ample.num_found <= offers.most and tight.num_found <= most, "a bound is exceeded"
    borders = {
        f"borders_{'ends' if ends else 'all'}_{which}": run_borders(requests, slots, BORDERS[name], ends).num_found
        for ends in (True, False)
        for which, slots in (("ample", None), ("tenth", num_slots))
    }
    found = {"ample": ample.num_found, "tenth": tight.num_found, "bound": most, **borders}
    parts = {key: value / offers.most for key, value in found.items()}
    hits = {"hits": ample.num_hits, "borders_hits": run_borders(requests, None, BORDERS[name], True).num_hits}
    counts = {"requests": len(requests), "slots": num_slots, "ideal_tokens": offers.most, **hits}
    return {"trace": name, "marked": is_marked, **counts, "of_bound": tight.num_found / most, **parts}


def rows_of(seed: int) -> list[Row]:
    rows = []
    for name, make in TRACES.items():
        requests = make(np.random.default_rng(seed))
        offers = offers_of(requests)
        rows += [row_of(name, requests, offers, is_marked) for is_marked in (True, False)]
    return rows


def allocation_us() -> dict[str, Figure]:
    """Microseconds of allocate and release of a prompt of 8,192 tokens that is cached, in turns."""
    tokens = np.random.default_rng(0).integers(0, 128_000, 8192).astype(np.int32)
    plain = BlockManager(2048, 16)
    hybrid = BlockManager(2048, 16, groups=[States(256, checkpoint_every=64)])
    assert hybrid.states is not None
    for manager in (plain, hybrid):
        manager.allocate(0, tokens)
        if manager is hybrid:
            hybrid.states.reserve(0, 0, len(tokens))
        manager.commit(0, tokens)
        manager.keep(0)
        manager.release(0)

    def allocate(manager: BlockManager) -> float:
        """Return the seconds of a call, and make its moves afterwards."""
        before = time.perf_counter()
        num_cached = manager.allocate(1, tokens).num_cached_tokens
        manager.release(1)
        taken = time.perf_counter() - before
        assert num_cached == len(tokens) - 1
        manager.do_moves(lambda move: None)
        if manager.states is not None:
            manager.states.do_moves(lambda move: None)
        return taken

    managers = {"BlockManager": plain, "HybridManager": hybrid}  # the names of the recorded rows
    calls = {name: functools.partial(allocate, manager) for name, manager in managers.items()}
    times = in_turns(calls, ROUNDS, measure=result, warmups=0)
    return {name: Figure.of(taken, 1e6) for name, taken in times.items()}


def draw(rows: Sequence[Row], path: str) -> None:
    marked = [row for row in rows if row["marked"]]
    names = {
        "ample budget": "ample",
        "a tenth of it": "tenth",
        "its bound": "bound",
        "all borders, a tenth": "borders_all_tenth",
        "vLLM's borders, a tenth": "borders_ends_tenth",
    }
    series = {words: [row[name] for row in marked] for words, name in names.items()}
    grouped(path, [row["trace"] for row in marked], series, "tokens found, of the ideal")


def main() -> None:
    options = parse("hybrid_prefix", __doc__, seed=option(0, f"the first of {NUM_SEEDS}", type=int))
    seeds = [rows_of(seed) for seed in range(options.seed, options.seed + NUM_SEEDS)]
    rows = [{**row, "of_bound": min(one[i]["of_bound"] for one in seeds)} for i, row in enumerate(seeds[0])]
    costs = allocation_us()
    print(f"tokens found, of the ideal (seed {options.seed}); of bound: the least of {NUM_SEEDS} seeds")
    shown(COLUMNS, (row | {"marks": "yes" if row["marked"] else "no"} for row in rows))
    print("hits: requests that find any token, by kvpage and by the states at the borders where portions end")
    for name, figure in costs.items():
        print(f"{name}: allocate and release 8,192 cached tokens: {figure:.1f} us")
    ideal = all(row["ample"] == 1 for one in seeds for row in one if row["marked"])
    met = ideal and all(row["of_bound"] >= 0.9 for row in rows)
    finish(options, functools.partial(draw, rows), rows=rows, allocation_us=costs, targets_met=met)


if __name__ == "__main__":
    main()
