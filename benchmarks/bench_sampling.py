"""Measure the choice of one token for each row of logits on a CPU, with the rules of each row.

"sample" is what the serving loop calls, with one request a row. "rows" is the native call alone, for a loop that keeps
its records. Beside them, in the same run: torch's way, which other devices take; vLLM's sampler, in a process of its
own (--vllm PYTHON, an interpreter that has vLLM); and the bound: all logits read once, by numpy's maximum
on one thread, divided by the threads.

Logits are normal, which is the hardest for top_p: many tokens are about as likely. Each token must be torch's, or else
the exact reference's: torch sums up floats, which round.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.figure import Figure, in_turns, result, seconds
from kvpage.benchmarks.peer_process import PeerProcess, vllm_peer
from kvpage.benchmarks.pictures import curves
from kvpage.benchmarks.script import VLLM, finish, option, parse
from kvpage.layout.sampling_record import ROW_RULES
from kvpage.ops import reference
from kvpage.serving import SamplingParams
from kvpage.serving.loop.request import Request
from kvpage.serving.sampling.device_rows import DeviceRows
from kvpage.serving.sampling.native_rows import GREEDY, sample_rows
from kvpage.serving.sampling.sampler import Sampler, sample, sample_by_torch

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
}
RULES |= {f"{name}, penalties": rules | PENALTIES for name, rules in RULES.items()}
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
    rows = np.frombuffer(bytearray(b"".join(GREEDY if row is None else row.packed for row in sampled)), ROW_RULES)
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
    logits, requests = logits[list(chosen)], [requests[row] for row in chosen]
    rows = DeviceRows(requests, Sampler(requests).records, logits.shape[1], logits.device)
    positions = [request.num_generated for request in requests]
    rows.hold(positions)
    exact = reference.sample_rows(logits, rows.records, torch.tensor(positions)).tolist()
    assert exact == list(chosen.values())


def measure(vocab_size: int, num_rows: int, name: str, rounds: int, peer: PeerProcess | None) -> Row:
    rules = RULES[name]
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
    figures = {key: Figure.of(each, 1e3) for key, each in in_turns(clocks, rounds, measure=result).items()}
    return {"num_rows": num_rows, "vocab_size": vocab_size, "rules": name, **figures}


def main() -> None:
    options = parse(
        "sampling",
        __doc__,
        rounds=9,
        threads=2,
        rows=[1, 64, 256],
        vocabs=[1024, 32_000, 151_936],
        rules=option(list(RULES), choices=list(RULES)),
        vllm=VLLM,
    )
    names = ["bound", "rows", "sample", "torch", *(["vllm"] if options.vllm else [])]
    print(f"milliseconds for one token a row, {options.threads} threads\n")
    columns = "{num_rows:>8} {vocab_size:>10} {rules:<24}" + "".join(f"{{{name}:>26.3f}}" for name in names)
    chosen = itertools.product(options.vocabs, options.rows, options.rules)
    with vllm_peer(options.vllm, "sampler", options.threads) as peer:
        rows = shown(columns, (measure(*case, options.rounds, peer) for case in chosen))
        version = {} if peer is None else peer.hello
    most = max(options.rows)
    large = [{**row, "case": f"{row['vocab_size']}, {row['rules']}"} for row in rows if row["num_rows"] == most]
    labels = {"yscale": "log", "ylabel": "ms", "title": f"One token for each of {most} rows", "xticks": []}
    finish(options, lambda path: curves(path, large, "case", names, **labels), unit="ms", **version, rows=rows)


if __name__ == "__main__":
    main()
