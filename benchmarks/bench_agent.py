"""An agent on kvpage's server and on vLLM's: five tools, two subagents that branch; computed tokens and times by turn.

OpenAI's client runs one script on each server that is started, over the same random weights. The main conversation has
--turns turns. After a quarter of them it delegates: two subagents branch off it, and take turns. All servers take
turns, too, in another order each round. A round before the first does not count. Each round has other words.

The bound are the tokens of a prompt that stand in no earlier prompt with its answer. Of the first prompt they are
fewer than its tokens: the tools come first, and an earlier round has had them.

Answers are forced: the form of each leaves one text alone, which calls a tool. An answer that is another one, or a
prompt in which two servers count different numbers of tokens, ends the benchmark. So does a computed number below the
bound. Times are seen by the client: a first text is the first piece of content or of a call.
"""

import functools
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from kvpage.benchmarks.agent_bound import AgentBound
from kvpage.benchmarks.agent_model import save_agent_model
from kvpage.benchmarks.agent_run import TurnCost, WrongTurn, check_same, run_agent
from kvpage.benchmarks.agent_script import AgentScript, Turn
from kvpage.benchmarks.bench_serve import progress
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure
from kvpage.benchmarks.pictures import drawn
from kvpage.benchmarks.script import VLLM, finish, option, parse
from kvpage.benchmarks.serve_process import free_port, running, vllm_server
from kvpage.benchmarks.serving_workloads import MODELS, Shape

SHAPES = {**MODELS, "tiny": Shape(2, 128, 256, 4, 2)}  # heads of 32, the least that vLLM knows
MODEL_NAME = "model"
NUM_SEQS = 8
MEMORY = "2GiB"  # of K and V, as peer_process.py gives vLLM
TABLE = (
    "{server:<8} {turns:>6} {prompt:>9} {computed:>9} {needed:>9} {first_ms:>20.1f} {last_ms:>20.1f} {seconds:>18.1f}"
)


def script_of(options: Namespace, seed: int) -> list[Turn]:
    """Return the turns of a round."""
    made = AgentScript(options.turns, options.sub_turns, options.system_words, options.result_words, seed)
    return list(made.turns())


def start(options: Namespace, folder: str, max_model_len: int, stack: ExitStack) -> dict[str, str]:
    """Start the servers, until the stack ends; return their URLs."""
    port = free_port()
    arguments = [
        "-m", "kvpage", "serve", folder, "--port", str(port), "--served-model-name", MODEL_NAME,
        "--kv-cache-memory", MEMORY, "--max-model-len", str(max_model_len), "--max-num-seqs", str(NUM_SEQS),
    ]  # fmt: skip
    environment = {**os.environ, "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": str(options.threads)}
    urls = {"kvpage": stack.enter_context(running([sys.executable, *arguments], environment, port))}
    if options.vllm:
        added = "--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-auto-tool-choice"
        parser = "--tool-call-parser", "hermes"
        server = vllm_server(options, folder, NUM_SEQS, max_model_len, [*added, *parser])
        urls["vllm"] = stack.enter_context(server)
    return urls


def measure(
    options: Namespace, urls: Mapping[str, str], bound: AgentBound
) -> tuple[dict[str, list[list[TurnCost]]], list[int]]:
    """Return the costs by server, of each round that counts, and the bound of each turn of the last round.

    WrongTurn as of run_agent.
    """
    costs: dict[str, list[list[TurnCost]]] = {name: [] for name in urls}
    scripts, names = [script_of(options, options.seed + number) for number in range(options.rounds + 1)], list(urls)
    with progress(sum(map(len, scripts)) * len(urls)) as note:
        for number, turns in enumerate(scripts):
            Random(number).shuffle(names)
            of_round = {name: run_agent(urls[name], MODEL_NAME, turns, note) for name in names}
            check_same(of_round)
            needed = [bound.needed(turn) for turn in turns]
            for name in names if number else ():
                check_bound(name, of_round[name], needed)
                costs[name].append(of_round[name])
    return costs, needed


def check_bound(name: str, costs: Sequence[TurnCost], needed: Sequence[int]) -> None:
    """Raise WrongTurn where a server says that it has computed less than must be."""
    for cost, least in zip(costs, needed, strict=True):
        if cost.num_computed < least:
            turn = cost.turn
            raise WrongTurn(
                f"{name}: turn {turn.number} of {turn.conversation} must compute {least} tokens at least, "
                f"got {cost.num_computed}"
            )


def rows_of(costs: Mapping[str, Sequence[Sequence[TurnCost]]], needed: Sequence[int]) -> list[Row]:
    """Return a row for each turn on each server: tokens of the last round, times of all rounds in milliseconds."""
    rows = []
    for name, rounds in costs.items():
        for index, each in enumerate(zip(*rounds, strict=True)):
            last = each[-1]
            row: Row = {"server": name, "request": index + 1, "conversation": last.turn.conversation}
            row |= {"turn": last.turn.number, "prompt": last.num_prompt, "computed": last.num_computed}
            row |= {"needed": needed[index], "first_ms": Figure.of((cost.first for cost in each), 1e3)}
            rows.append({**row, "total_ms": Figure.of((cost.total for cost in each), 1e3)})
    return rows


def sums_of(costs: Mapping[str, Sequence[Sequence[TurnCost]]], needed: Sequence[int]) -> list[Row]:
    """Return a row for each server: sums of the last round; times of the first text, over all turns and rounds."""
    rows = []
    for name, rounds in costs.items():
        late = [cost.first for each in rounds for cost in each[-len(each) // 4 :]]
        rows.append({
            "server": name,
            "turns": len(rounds[-1]),
            "prompt": sum(cost.num_prompt for cost in rounds[-1]),
            "computed": sum(cost.num_computed for cost in rounds[-1]),
            "needed": sum(needed),
            "first_ms": Figure.of((cost.first for each in rounds for cost in each), 1e3),
            "last_ms": Figure.of(late, 1e3),
            "seconds": Figure.of(sum(cost.total for cost in each) for each in rounds),
        })  # fmt: skip
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the computed tokens and the time to the first text of each turn, by server."""
    names = list(dict.fromkeys(row["server"] for row in rows))
    with drawn(path, 2, 1, size=(9, 6.5), sharex=True) as (tokens, times):
        for name in names:
            of_server = [row for row in rows if row["server"] == name]
            numbers = [row["request"] for row in of_server]
            tokens.plot(numbers, [row["computed"] for row in of_server], "o-", markersize=3, label=name)
            firsts = [row["first_ms"] for row in of_server]
            times.plot(numbers, [first.median for first in firsts], "o-", markersize=3, label=name)
            times.fill_between(numbers, [first.low for first in firsts], [first.high for first in firsts], alpha=0.2)
        tokens.plot(numbers, [row["needed"] for row in of_server], "k--", linewidth=0.8, label="bound")
        branches = [row["request"] for row in of_server if row["conversation"] != "main"]
        for axes, label in ((tokens, "prompt tokens computed"), (times, "time to first text, ms")):
            if branches:
                axes.axvspan(branches[0] - 0.5, branches[-1] + 0.5, color="gray", alpha=0.15, label="subagents")
            axes.set(ylabel=label, yscale="log")
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        times.set_xlabel("request of the agent")


def options_of(about: str | None, arguments: Sequence[str] | None = None) -> Namespace:
    """Return the options of a command line; sys.argv's without `arguments`."""
    return parse(
        "agent",
        about,
        arguments,
        lambda options: "--turns must be at least 4" if options.turns < 4 else None,
        vllm=VLLM,
        model=option("small", choices=tuple(SHAPES)),
        dtype=option("fp32", choices=("fp32", "bf16")),
        threads=option(2, "of each server"),
        turns=option(40, "of the main conversation"),
        sub_turns=option(5, "of each subagent"),
        system_words=option(200, "of the system prompt"),
        result_words=option(30, "of a tool's result"),
        rounds=option(3, "that count"),
        seed=option(1, "of the words"),
    )


def run(options: Namespace) -> tuple[list[Row], list[Row]]:
    """Return the rows of all turns, and the sums of each server."""
    from transformers import AutoTokenizer

    turns = script_of(options, options.seed)
    characters = max(sum(len(str(message)) for message in turn.messages) for turn in turns)
    max_model_len = characters + 8192  # a token has a byte at least; tools and marks come beside
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        save_agent_model(Path(folder), SHAPES[options.model], options.dtype, max_model_len)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        urls = start(options, folder, max_model_len, stack)
        costs, needed = measure(options, urls, AgentBound(tokenizer))
    return rows_of(costs, needed), sums_of(costs, needed)


def main() -> None:
    options = options_of(__doc__)
    try:
        rows, sums = run(options)
    except (OSError, WrongTurn, RuntimeError, TimeoutError) as error:
        raise SystemExit(f"kvpage bench agent: {error}") from error
    shown(TABLE, sums)
    finish(options, functools.partial(plot, rows), sums=sums, rows=rows)


if __name__ == "__main__":
    main()
