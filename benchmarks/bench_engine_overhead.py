"""How long does the engine itself take for a step, beside what the model computes?

The model is a stub: it returns logits that were made before. Inside the figures is all else that `Engine.step` does:
schedule, block ids, slots, tables, the arguments of the model, sampling, commits, outputs. Outside are the model's
modules, and all that a layer does (bench_layer_overhead). The logits are of 1,024 tokens, and again of 32,000, where
reading them is most of a step. The bound is one argmax over them, in the same run.

    decode      64 and 256 sequences, a token each: greedy; sampled (temperature 0.8, top-k 50, top-p 0.9); also with
                penalties
    waiting     the same while 1,000 requests wait
    admission   add_request and Scheduler.schedule of a prompt of 8,192 tokens, 6,144 of them cached

Prompts have different lengths, so that in each step a sixteenth of the sequences begins a new block. With --vllm PYTHON
the real scheduler and KV manager of vLLM take turns in a process of their own: `schedule` and `update_from_output`,
with an output that is made up outside of the time. Slots, tables, arguments and sampling are not in their figure.

Tokens are checked before anything is timed. Figures are medians of rounds; a round is a mean over some steps. Each is
given for the thread's own time, which other processes disturb less, and on the wall. Parts are measured in steps of
their own, by a clock around each; a part does not contain the parts inside it.
"""

import argparse
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from kvpage.benchmarks import engine_stub
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.engine_stub import NUM_ADMITTED, PARTS, PROMPT_LENS, Admission, Decoding
from kvpage.benchmarks.figure import Figure, in_turns, result
from kvpage.benchmarks.part_clock import Spent, mean_spent
from kvpage.benchmarks.peer_process import PeerProcess, vllm_peer
from kvpage.benchmarks.pictures import stacked
from kvpage.benchmarks.script import VLLM, finish, option, parse
from kvpage.serving import SamplingParams

SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED, "penalties": SAMPLED | PENALTIES}
NUM_WAITING, ADMITTED_VOCAB = 1000, 1024
TARGETS_US = {("greedy", 64): 200, ("greedy", 256): 500, ("sampled", 256): 700}
ADMISSION_TARGET_US = 30
COLUMNS = "{step:<34}{kvpage us:>24}{kvpage wall us:>24}{argmax us:>24}{vllm us:>24}{of vllm:>24}{target us:>10}"
PART_COLUMNS = "{step:<34}" + "".join(f"{{{part}:>24.1f}}" for part in PARTS)
Calls = dict[str, Callable[[], Any]]
"""kvpage, its bound and its peer, each of which gives its time; and the parts of a step."""


def vllm_decoding(peer: PeerProcess, num_seqs: int, num_waiting: int, num_steps: int) -> Callable[[], Spent]:
    """Return a call that gives the time of a step of so many sequences by vLLM's scheduler."""
    name, prompts = f"{num_seqs}, {num_waiting}", engine_stub.decode_prompts(num_seqs + num_waiting, ADMITTED_VOCAB)
    peer.ask(call="make", name=name, prompts=prompts, num_seqs=num_seqs)
    return lambda: Spent(**peer.ask(call="steps", name=name, number=num_steps))


def vllm_admission(peer: PeerProcess, admission: Admission) -> Callable[[], Spent]:
    """Return a call that gives the time until vLLM's scheduler has scheduled a prompt."""
    peer.ask(call="cache", name="admission", prompt=admission.prefix)

    def admit() -> Spent:
        answer = peer.ask(call="admit", name="admission", prompt=admission.prompt())
        assert answer.pop("num_cached") == len(admission.prefix), "vLLM finds the cached tokens"
        return Spent(**answer)

    return lambda: mean_spent([admit() for _ in range(NUM_ADMITTED)])


def decode_row(
    vocab: int, mode: str, num_seqs: int, num_waiting: int, options: argparse.Namespace, peer: PeerProcess | None
) -> Row:
    """peer: asked for greedy steps of the first vocabulary."""
    is_large, num_steps = vocab > min(options.vocabs), options.steps
    num_rounds = max(options.rounds // 4, 1) if is_large else options.rounds
    num_tokens = 2 * (num_rounds + 2) * num_steps + sum(PROMPT_LENS)  # the last: of others' prefills
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **MODES[mode])
    decoding = Decoding(vocab, num_seqs, num_waiting, params)
    calls: Calls = {
        name: functools.partial(call, num_steps)
        for name, call in (("kvpage", decoding.spent), ("argmax", decoding.argmax), ("parts", decoding.parts))
    }
    if peer and mode == "greedy" and vocab == options.vocabs[0]:
        calls["vllm"] = vllm_decoding(peer, num_seqs, num_waiting, num_steps)
    what = {"operation": "decode", "seqs": num_seqs, "vocab": vocab, "mode": mode, "waiting": num_waiting}
    target = None if is_large or num_waiting else TARGETS_US.get((mode, num_seqs))
    return {**what, **figures(calls, num_rounds), "target us": target}


def admission_row(given: str, num_rounds: int, peer: PeerProcess | None) -> Row:
    admission = Admission(ADMITTED_VOCAB)
    calls: Calls = {"kvpage": functools.partial(admission.spent, given == "array")}
    if peer:
        calls["vllm"] = vllm_admission(peer, admission)
    return {"operation": "admit", "given": given, **figures(calls, num_rounds), "target us": ADMISSION_TARGET_US}


def each_row(options: argparse.Namespace, peer: PeerProcess | None) -> Iterator[Row]:
    """Yield one row after the other, so that the memory of one is free before the next."""
    for case in itertools.product(options.vocabs, options.modes, options.batches):
        yield decode_row(*case, 0, options, peer)
    yield decode_row(options.vocabs[0], "greedy", max(options.batches), NUM_WAITING, options, peer)
    for given in ("array", "list"):
        yield admission_row(given, options.rounds, peer)


def figures(calls: Calls, num_rounds: int) -> Row:
    """Return the medians: of the thread, of the wall, of parts; and vLLM's time over kvpage's, turn by turn.

    All take turns; the first turn does not count.
    """
    turns = in_turns(calls, num_rounds, measure=result)
    parts, row = turns.pop("parts", []), Row()
    for name, times in turns.items():
        row[f"{name} us"] = Figure.of((spent.thread for spent in times), 1e6)
        row[f"{name} wall us"] = Figure.of((spent.wall for spent in times), 1e6)
    if "vllm" in turns:
        row["of vllm"] = Figure.ratio(*([spent.thread for spent in turns[name]] for name in ("vllm", "kvpage")))
    names = parts[0] if parts else ()
    row["parts us"] = {name: Figure.of((part[name] for part in parts), 1e6) for name in names}
    return row


def name_of(row: Row) -> str:
    if row["operation"] == "admit":
        return f"admit 8,192 tokens, {row['given']}"
    waiting = f", {row['waiting']:,} wait" if row["waiting"] else ""
    return f"{row['seqs']} x {row['mode']}, {row['vocab']:,}{waiting}"


def main() -> None:
    options = parse(
        "engine_overhead",
        __doc__,
        rounds=15,
        threads=1,
        batches=option([64, 256], "sequences of a step"),
        vocabs=option([1024, 32000], "a quarter of the rounds for larger ones than the first"),
        modes=option(list(MODES), choices=MODES),
        steps=option(16, "in a row, that make one measurement; 16 tokens are a block"),
        vllm=VLLM,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine_stub.make_model(ADMITTED_VOCAB).config.save_pretrained(folder)
        with vllm_peer(options.vllm, "scheduler", options.threads, folder) as peer:
            rows = list(each_row(options, peer))
            version = peer.hello["vllm"] if peer else None
    print("us of a step (of a prompt): median (25th to 75th percentile), of the thread's own time")
    shown(COLUMNS, ({"step": name_of(row), **row} for row in rows))
    print("\nparts, us on the wall")
    with_parts = {name_of(row): row["parts us"] for row in rows if row["parts us"]}
    shown(PART_COLUMNS, ({"step": name, **parts} for name, parts in with_parts.items()))
    met = all(row["kvpage us"].median <= row["target us"] for row in rows if row["target us"])
    steps = {name: {part: us.median for part, us in parts.items()} for name, parts in with_parts.items()}
    draw = functools.partial(stacked, steps=steps, label="us of a step", xscale="symlog")
    finish(options, draw, vllm=version, rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
