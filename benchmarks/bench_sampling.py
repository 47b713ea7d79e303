"""Measure the choice of one token for each row of logits on a CPU, with the rules of each row.

"sample" is what the serving loop calls, with one request a row. "rows" is the native call alone, for a loop that keeps
its records. Beside them, in the same run: torch's way, which other devices take; vLLM's sampler, in a process of its
own (--vllm PYTHON, an interpreter that has vLLM); and the bound: all logits read once, by numpy's maximum
on one thread, divided by the threads.

Logits are normal, which is the hardest for top_p: many tokens are about as likely. Each token must be torch's, or else
the exact reference's: torch sums up floats, which round.

    python benchmarks/bench_sampling.py [--threads 2] [--vllm VENV/bin/python] [--plot sampling.png]
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpage.benchmarks.arguments import positive
from kvpage.benchmarks.figure import Figure, dumps, in_turns, own_seconds, seconds
from kvpage.benchmarks.peer_process import PeerProcess
from kvpage.ops import reference
from kvpage.serving import SamplingParams
from kvpage.serving.loop.request import Request
from kvpage.serving.sampling.device_rows import DeviceRows
from kvpage.serving.sampling.native_rows import GREEDY, ROW, sample_rows
from kvpage.serving.sampling.sampler import Sampler, sample, sample_by_torch

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
}
NUM_PROMPT_TOKENS, NUM_GENERATED = 512, 64
Clock = Callable[[], float]


def make_requests(num_rows: int, vocab_size: int, rules: dict[str, Any]) -> list[Request]:
    rng = np.random.default_rng(0)
    requests = []
    for seed in range(num_rows):
        params = SamplingParams(max_tokens=NUM_GENERATED + 1, seed=seed, **rules)
        prompt = rng.integers(0, vocab_size, NUM_PROMPT_TOKENS).astype(np.int32)
        request = Request(str(seed), prompt, params, 0)
        request.tokens[NUM_PROMPT_TOKENS:] = rng.integers(0, vocab_size, NUM_GENERATED + 1)
        request.num_tokens += NUM_GENERATED
        requests.append(request)
    return requests


def native_call(logits: torch.Tensor, requests: list[Request]) -> Callable[[], object]:
    """Return the call of a loop that keeps records, rules and tokens from step to step."""
    sampled = [request.sampled_row for request in requests]
    rows = np.frombuffer(bytearray(b"".join(GREEDY if row is None else row.packed for row in sampled)), ROW)
    rows["seed"], rows["position"] = [request.seed for request in requests], NUM_GENERATED
    rules = [None if row is None else row.token_rules for row in sampled]
    if not any(rules):
        return lambda: sample_rows(logits, rows)
    tokens = [request.tokens for request in requests]
    return lambda: sample_rows(logits, rows, rules, tokens)


def verify(logits: torch.Tensor, requests: list[Request]) -> None:
    """The token of each row is torch's, or the exact reference's where torch's sums of floats have rounded."""
    pairs = zip(sample(logits, requests), sample_by_torch(logits, requests), strict=True)
    chosen = {row: token for row, (token, by_torch) in enumerate(pairs) if token != by_torch or row == 0}
    some = [requests[row] for row in chosen]
    assert exact_tokens(logits[list(chosen)], some) == list(chosen.values())


def exact_tokens(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    """Return the reference's token of each row."""
    rows = DeviceRows(requests, Sampler(requests).records, logits.shape[1], logits.device)
    positions = [request.num_generated for request in requests]
    rows.hold(positions)
    return reference.sample_rows(logits, rows.records, torch.tensor(positions)).tolist()


def measure(
    num_rows: int, vocab_size: int, rules: dict[str, Any], rounds: int, peer: PeerProcess | None
) -> dict[str, Figure]:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    requests = make_requests(num_rows, vocab_size, rules)
    verify(logits, requests)
    by_rows, asked = native_call(logits, requests), {"num_rows": num_rows, "vocab_size": vocab_size, "rules": rules}
    number = max(1, 2**18 // logits.numel())
    clocks: dict[str, Clock] = {
        "bound": lambda: seconds(logits.numpy().max, number) / torch.get_num_threads(),
        "rows": lambda: seconds(by_rows, number),
        "sample": lambda: seconds(lambda: sample(logits, requests), number),
        "torch": lambda: seconds(lambda: sample_by_torch(logits, requests)),
    }
    if peer is not None:
        clocks["vllm"] = lambda: peer.ask(**asked, prompt=NUM_PROMPT_TOKENS)["seconds"]
    return {name: Figure.of(each, 1e3) for name, each in in_turns(clocks, rounds, measure=own_seconds).items()}


def cases() -> dict[str, dict[str, Any]]:
    """Return the rules without penalties, then all of them with penalties."""
    return RULES | {f"{name}, penalties": rules | PENALTIES for name, rules in RULES.items()}


@contextmanager
def vllm_peer(python: Path | None, num_threads: int) -> Iterator[PeerProcess | None]:
    if python is None:
        yield None
        return
    with PeerProcess.start(python, "vllm_sampler.py", [str(num_threads)]) as peer:
        yield peer


def report(row: dict[str, Any], names: list[str]) -> None:
    cells = "".join(f"{format(row[name], '.3f'):>26}" for name in names)
    print(f"{row['num_rows']:>5}{row['vocab_size']:>8}  {row['rules']:<24}{cells}", flush=True)


def plot(rows: list[dict[str, Any]], names: list[str], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    most = max(row["num_rows"] for row in rows)
    shown = [row for row in rows if row["num_rows"] == most]
    for name in names:
        style = "--" if name == "bound" else "-"
        axes.plot([row[name].median for row in shown], style, marker="o", label=name)
    axes.set_xticks(
        range(len(shown)), [f"{row['vocab_size']}\n{row['rules']}" for row in shown], fontsize=5, rotation=90
    )
    axes.set(yscale="log", ylabel="ms", title=f"One token for each of {most} rows")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 64, 256])
    parser.add_argument("--vocabs", type=positive, nargs="+", default=[1024, 32_000, 151_936])
    parser.add_argument("--rules", nargs="+", choices=list(cases()), default=list(cases()))
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--plot", metavar="PATH")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = ["bound", "rows", "sample", "torch", *(["vllm"] if args.vllm else [])]
    print(f"milliseconds for one token a row, {args.threads} threads\n")
    print(f"{'rows':>5}{'vocab':>8}  {'rules':<24}" + "".join(f"{name:>26}" for name in names))
    rows: list[dict[str, Any]] = []
    with vllm_peer(args.vllm, args.threads) as peer:
        for vocab_size in args.vocabs:
            for num_rows in args.rows:
                for rules in args.rules:
                    found = measure(num_rows, vocab_size, cases()[rules], args.rounds, peer)
                    rows.append({"num_rows": num_rows, "vocab_size": vocab_size, "rules": rules, **found})
                    report(rows[-1], names)
    if args.plot:
        plot(rows, names, args.plot)
    version = {} if peer is None else peer.hello
    print(dumps({"benchmark": "sampling", "unit": "ms", "threads": args.threads, **version, "rows": rows}))


if __name__ == "__main__":
    main()
