"""Count the prompt tokens that the prefix cache of a hybrid model finds, and measure what an allocation costs.

Prompts go through BlockManager one after the other, without a model. Found are the tokens before the exact position at
which a request begins. All traces are made from a seed.

- aligned: 64 prompts of 2,200 tokens. Each begins with one of 12 system prompts of 1,600 tokens, which end 16 tokens
  after a border of the block grid of 528 tokens.
- shifted: the same 64 prompts, each shifted by 100 tokens against that grid. System prompts of 1,500 tokens end within
  a block.
- short: 96 prompts with one of 12 system prompts, each shorter than a block of 2,096 tokens.
- chats: 240 turns of 12 chats at a time; each turn goes on from the answer before it.
- agents: 240 calls of 6 agents at a time behind 3,000 tokens of tools; each step is tried twice.

Beside them, on the same trace: an oracle that keeps the state of every token (the ideal); states at all block borders,
of which those that were used least recently are evicted; and vLLM's own scheduler and KV manager, without a model, with
memory for all states that it keeps (--vllm). It gets the better of its two hashes: of a block, and of 16 tokens.

Two budgets: ample, and a tenth of the checkpoints that an ample one keeps for reasons of its own, without regular ones.
Its bound is one that no policy exceeds, even if it knows the future (kvpage.benchmarks.hybrid_bounds). `marked`: the
prompts' authors mark the ends of system prompts. Otherwise the second prompt that shares one finds its last regular
checkpoint, every 512 tokens as by default, and shows the place where they part; the third one finds all of it.

Targets: with marks the ideal, and with a tenth of the budget 0.9 of the bound, for each of three seeds; without marks
no fewer tokens than vLLM. Without marks, the bound is at most what the ample budget finds.
"""

import functools
import tempfile
import time
from collections.abc import Sequence

import numpy as np
from transformers import LlamaConfig

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result
from kvpage.benchmarks.hybrid_bounds import Offers, bound, offers_of
from kvpage.benchmarks.hybrid_runs import Run, run_borders, run_manager, run_vllm
from kvpage.benchmarks.hybrid_traces import TRACES, VOCAB, Request
from kvpage.benchmarks.peer_process import PeerProcess, vllm_peer
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.script import VLLM, finish, option, parse
from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.manager import BlockManager

BORDERS = {"aligned": 528, "shifted": 528, "short": 2096, "chats": 528, "agents": 528}
NUM_SEEDS = 3
TENTH = 10
ROUNDS = 100
PARTS = ("ample", "tenth", "bound", "of_bound", "borders_all_ample", "borders_all_tenth", "vllm")
COLUMNS = "{trace:>8} {marks:>6} {slots:>6} {requests:>9} {hits:>5} {vllm_hits:>9}" + "".join(
    f" {{{name}:>18.3f}}" for name in PARTS
)


def row_of(name: str, requests: list[Request], offers: Offers, is_marked: bool, vllm: Run | None) -> Row:
    """Return the tokens found of one trace, in parts of the ideal."""
    ample = run_manager(requests, None, is_marked)
    num_slots = max(1, -(-run_manager(requests, None, is_marked, every=None).num_kept // TENTH))
    tight = run_manager(requests, num_slots, is_marked)
    most = min(bound(offers, num_slots), offers.most if is_marked else ample.num_found)
    assert ample.num_found <= offers.most and tight.num_found <= most, "a bound is exceeded"
    borders = [run_borders(requests, slots, BORDERS[name]).num_found for slots in (None, num_slots)]
    found = {"ample": ample.num_found, "tenth": tight.num_found, "bound": most}
    found |= {"borders_all_ample": borders[0], "borders_all_tenth": borders[1]}
    parts = {key: value / offers.most for key, value in found.items()}
    others: Row = {"vllm": None, "vllm_hits": None}
    if vllm is not None:
        others = {"vllm": vllm.num_found / offers.most, "vllm_hits": vllm.num_hits}
    counts = {"requests": len(requests), "slots": num_slots, "ideal_tokens": offers.most, "hits": ample.num_hits}
    return {"trace": name, "marked": is_marked, **counts, "of_bound": tight.num_found / most, **parts, **others}


def rows_of(seed: int, peer: PeerProcess | None) -> list[Row]:
    """peer: vLLM; None for none."""
    rows = []
    for name, make in TRACES.items():
        requests = make(np.random.default_rng(seed))
        offers = offers_of(requests)
        vllm = None if peer is None else run_vllm(peer, requests, BORDERS[name])
        rows += [row_of(name, requests, offers, is_marked, vllm) for is_marked in (True, False)]
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
        "vLLM, ample": "vllm",
    }
    series = {words: [row[name] or 0 for row in marked] for words, name in names.items()}
    grouped(path, [row["trace"] for row in marked], series, "tokens found, of the ideal")


def make_config(folder: str) -> None:
    """Write what vLLM's scheduler asks of a model."""
    LlamaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, architectures=["LlamaForCausalLM"],
                num_attention_heads=4, max_position_embeddings=65536).save_pretrained(folder)  # fmt: skip


def main() -> None:
    options = parse("hybrid_prefix", __doc__, seed=option(0, f"the first of {NUM_SEEDS}", type=int), vllm=VLLM)
    with tempfile.TemporaryDirectory() as folder:
        make_config(folder)
        with vllm_peer(options.vllm, "states", 1, folder) as peer:
            seeds = [rows_of(seed, peer) for seed in range(options.seed, options.seed + NUM_SEEDS)]
            version = peer.hello["vllm"] if peer else None
    rows = [{**row, "of_bound": min(each[i]["of_bound"] for each in seeds)} for i, row in enumerate(seeds[0])]
    costs = allocation_us()
    print(f"tokens found, of the ideal (seed {options.seed}); of bound: the least of {NUM_SEEDS} seeds")
    shown(COLUMNS, (row | {"marks": "yes" if row["marked"] else "no"} for row in rows))
    print("hits: requests that find any token, by kvpage and by vLLM")
    for name, figure in costs.items():
        print(f"{name}: allocate and release 8,192 cached tokens: {figure:.1f} us")
    all_rows = [row for each in seeds for row in each]
    ideal = all(row["ample"] == 1 for row in all_rows if row["marked"])
    no_worse = all(row["ample"] >= (row["vllm"] or 0) for row in all_rows)
    met = ideal and no_worse and all(row["of_bound"] >= 0.9 for row in rows if row["marked"])
    finish(options, functools.partial(draw, rows), vllm=version, rows=rows, allocation_us=costs, targets_met=met)


if __name__ == "__main__":
    main()
