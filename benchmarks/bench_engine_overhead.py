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
import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvpage.benchmarks.cells import show_all
from kvpage.benchmarks.engine_stub import (
    NUM_ADMITTED,
    PARTS,
    PROMPT_LENS,
    Admission,
    Decoding,
    decode_prompts,
    make_model,
)
from kvpage.benchmarks.figure import Figure, in_turns, result
from kvpage.benchmarks.part_clock import Spent, mean_spent
from kvpage.benchmarks.peer_process import PeerProcess
from kvpage.benchmarks.pictures import stacked
from kvpage.benchmarks.script import Options, finish
from kvpage.serving import SamplingParams

SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED, "penalties": SAMPLED | PENALTIES}
NUM_WAITING, ADMITTED_VOCAB = 1000, 1024
TARGETS_US = {("greedy", 64): 200, ("greedy", 256): 500, ("sampled", 256): 700, ("admit", "array"): 30}
TARGETS_US[("admit", "list")] = TARGETS_US[("admit", "array")]
COLUMNS = "{step:<34}{kvpage us:>24}{kvpage wall us:>24}{argmax us:>24}{vllm us:>24}{of vllm:>24}{target us:>10}"
PART_COLUMNS = "{step:<34}" + "".join(f"{{{part}:>24.1f}}" for part in PARTS)
Calls = dict[str, Callable[[], Spent]]


class Row(NamedTuple):
    """One figure to be.

    what: the values by which it is found among the others.
    calls: of kvpage, its bound and its peer, by name; each returns its time.
    target_us: None for none. num_rounds: to measure.
    parts: returns the seconds of each part; None where there are none.
    """

    what: dict[str, Any]
    calls: Calls
    target_us: int | None
    num_rounds: int
    parts: Callable[[], dict[str, float]] | None = None


class VLLMScheduler:
    """vLLM's scheduler in a process of its own, asked for the same work. `start` gives one that ends with its block."""

    def __init__(self, peer: PeerProcess) -> None:
        self._peer = peer
        self.version: str = peer.hello["vllm"]

    @classmethod
    @contextlib.contextmanager
    def start(cls, python: Path) -> Iterator["VLLMScheduler"]:
        with tempfile.TemporaryDirectory() as folder:
            make_model(ADMITTED_VOCAB).config.save_pretrained(folder)
            with PeerProcess.start(python, "vllm_scheduler.py", [folder]) as peer:
                yield cls(peer)

    def decoding(self, num_seqs: int, num_waiting: int, num_steps: int) -> Callable[[], Spent]:
        """Return a call that gives the time of a step of so many sequences."""
        name, prompts = f"{num_seqs}, {num_waiting}", decode_prompts(num_seqs + num_waiting, ADMITTED_VOCAB)
        self._peer.ask(call="make", name=name, prompts=prompts, num_seqs=num_seqs)
        return lambda: Spent(**self._peer.ask(call="steps", name=name, number=num_steps))

    def admission(self, admission: Admission) -> Callable[[], Spent]:
        """Return a call that gives the time until a prompt is scheduled."""
        self._peer.ask(call="cache", name="admission", prompt=admission.prefix)

        def admit() -> Spent:
            answer = self._peer.ask(call="admit", name="admission", prompt=admission.prompt())
            assert answer.pop("num_cached") == len(admission.prefix), "vLLM finds the cached tokens"
            return Spent(**answer)

        return lambda: mean_spent([admit() for _ in range(NUM_ADMITTED)])


def decode_row(
    num_seqs: int, vocab: int, mode: str, num_waiting: int, options: argparse.Namespace, vllm: VLLMScheduler | None
) -> Row:
    is_large = vocab > min(options.vocabs)
    num_steps, num_rounds = options.steps, max(options.rounds // 4, 1) if is_large else options.rounds
    num_tokens = 2 * (num_rounds + 2) * num_steps + sum(PROMPT_LENS)  # the last: of others' prefills
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **MODES[mode])
    decoding = Decoding(vocab, num_seqs, num_waiting, params)
    calls: Calls = {
        "kvpage": functools.partial(decoding.spent, num_steps),
        "argmax": functools.partial(decoding.argmax, num_steps),
    }
    if vllm and mode == "greedy":
        calls["vllm"] = vllm.decoding(num_seqs, num_waiting, num_steps)
    what = {"operation": "decode", "seqs": num_seqs, "vocab": vocab, "mode": mode, "waiting": num_waiting}
    target = None if is_large or num_waiting else TARGETS_US.get((mode, num_seqs))
    return Row(what, calls, target, num_rounds, functools.partial(decoding.parts, num_steps))


def admission_row(given: str, num_rounds: int, vllm: VLLMScheduler | None) -> Row:
    admission = Admission(ADMITTED_VOCAB)
    calls: Calls = {"kvpage": functools.partial(admission.spent, given == "array")}
    if vllm:
        calls["vllm"] = vllm.admission(admission)
    return Row({"operation": "admit", "given": given}, calls, TARGETS_US[("admit", given)], num_rounds)


def rows_of(options: argparse.Namespace, vllm: VLLMScheduler | None) -> Iterator[Row]:
    """Yield one row after the other, so that the memory of one is free before the next."""
    for vocab in options.vocabs:
        for mode in options.modes:
            for num_seqs in options.batches:
                is_peer_new = vocab == options.vocabs[0]
                yield decode_row(num_seqs, vocab, mode, 0, options, vllm if is_peer_new else None)
    yield decode_row(max(options.batches), options.vocabs[0], "greedy", NUM_WAITING, options, vllm)
    for given in ("array", "list"):
        yield admission_row(given, options.rounds, vllm)


def measure(row: Row) -> dict[str, Any]:
    """Return the figures of a row. All take turns; the first turn does not count."""
    calls: dict[str, Callable[[], Any]] = {**row.calls, **({"parts": row.parts} if row.parts else {})}
    spent = in_turns(calls, row.num_rounds, measure=result)
    return row.what | figures(spent, spent.pop("parts", [])) | {"target us": row.target_us}


def figures(spent: dict[str, list[Spent]], parts: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians: of the thread, of the wall, of parts; and vLLM's time over kvpage's, turn by turn."""
    found: dict[str, Any] = {}
    for name, taken in spent.items():
        found[f"{name} us"] = Figure.of((one.thread for one in taken), 1e6)
        found[f"{name} wall us"] = Figure.of((one.wall for one in taken), 1e6)
    if "vllm" in spent:
        pair = (spent["vllm"], spent["kvpage"])
        found["of vllm"] = Figure.ratio(*([one.thread for one in taken] for taken in pair))
    names = parts[0] if parts else ()
    found["parts us"] = {name: Figure.of((part[name] for part in parts), 1e6) for name in names}
    return found


def name_of(row: dict[str, Any]) -> str:
    if row["operation"] == "admit":
        return f"admit 8,192 tokens, {row['given']}"
    waiting = f", {row['waiting']:,} wait" if row["waiting"] else ""
    return f"{row['seqs']} x {row['mode']}, {row['vocab']:,}{waiting}"


def show(rows: list[dict[str, Any]]) -> None:
    print("us of a step (of a prompt): median (25th to 75th percentile), of the thread's own time")
    named = [{"step": name_of(row), **row} for row in rows]
    show_all(COLUMNS, named)
    print("\nparts, us on the wall")
    show_all(PART_COLUMNS, [row | row["parts us"] for row in named if row["parts us"]])


def parse() -> argparse.Namespace:
    parser = Options("engine_overhead", __doc__, rounds=15, threads=1)
    parser.add("--batches", [64, 256], help="sequences of a step")
    parser.add("--vocabs", [1024, 32000], help="a quarter of the rounds for larger ones than the first")
    parser.add("--modes", list(MODES), choices=MODES)
    parser.add("--steps", 16, help="in a row, that make one measurement; 16 tokens are a block")
    parser.add_vllm()
    return parser.parse()


def main() -> None:
    options = parse()
    with VLLMScheduler.start(options.vllm) if options.vllm else contextlib.nullcontext() as vllm:
        rows = [measure(row) for row in rows_of(options, vllm)]
    show(rows)
    steps = {
        name_of(row): {name: part.median for name, part in row["parts us"].items()} for row in rows if row["parts us"]
    }
    met = all(row["kvpage us"].median <= row["target us"] for row in rows if row["target us"])
    version = vllm.version if vllm else None
    draw = functools.partial(stacked, steps=steps, label="us of a step", xscale="symlog")
    finish(options, draw, vllm=version, rows=rows, targets_met=met)


if __name__ == "__main__":
    main()
