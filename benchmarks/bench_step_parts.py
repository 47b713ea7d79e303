"""Where does the time of a step of the serving loop go, the model's arithmetic included?

Two kinds of step of a Llama of 8 layers of 512 (33 million parameters), or of 16 layers of 1,024:

    decode     32 sequences after a shared prefix of 1,024 tokens, a token each
    prefill    a prompt of 1,536 tokens

A clock around each part tells them apart; a part does not contain the parts inside it. Products are those of weights,
by torch or kvpage. The rest of the model is rotation, norms and activations without a part of their own, and the
Python of its modules. The bound is the products: `kvpage bench serving` says how fast they can be. Each decode step
attends over one token more than the last.

The first step of all must generate the token of the model's own forward. Medians of rounds, on the wall, with their
quartiles. The clocks themselves take less than a microsecond a part.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers as tf

import kvpage._C as _C
from kvpage.benchmarks.cells import Row, shown
from kvpage.benchmarks.engine_stub import random_prompt
from kvpage.benchmarks.figure import Figure, in_turns, result
from kvpage.benchmarks.part_clock import PartClock
from kvpage.benchmarks.pictures import stacked
from kvpage.benchmarks.script import finish, option, parse
from kvpage.benchmarks.serving_workloads import (
    BATCHED_TOKENS,
    BLOCK_SIZE,
    DTYPES,
    MODELS,
    VOCAB,
    engine_for,
    make_model,
)
from kvpage.serving import Engine, SamplingParams
from kvpage.serving.model.runner import ModelRunner

PARTS: dict[str, list[tuple[Any, str]]] = {
    "products": [(F, "linear"), (_C, "linear")],
    "attention": [(_C, "paged_attention")],
    "write K and V": [(_C, "reshape_and_cache")],
    "norms in C++": [(_C, "rms_norm")],
    "the rest of the model": [(ModelRunner, "forward")],
    "the engine": [(Engine, "step")],
}
NUM_SEQS, PREFIX_LEN, TAIL_LEN, PREFILL_LEN = 32, 1024, 32, 1536
Parts = dict[str, float]


class Steps:
    """An engine, and its steps of both kinds."""

    def __init__(self, model: tf.PreTrainedModel, num_decodes: int) -> None:
        lengths = [PREFILL_LEN, *[PREFIX_LEN + TAIL_LEN + num_decodes + BLOCK_SIZE] * NUM_SEQS]
        self._engine = engine_for(model, lengths, max_num_batched_tokens=BATCHED_TOKENS)
        self._params = SamplingParams(max_tokens=num_decodes + BLOCK_SIZE, ignore_eos=True)
        self._prompt = functools.partial(random_prompt, np.random.default_rng(0), model.config.vocab_size)
        self._check(model)

    def prefill(self) -> Parts:
        """Return the seconds of each part of a new prompt's step."""
        self._engine.add_request(self._prompt(PREFILL_LEN), replace(self._params, max_tokens=1))
        return self.step()

    def begin_decodes(self) -> None:
        """Compute the prompts of the sequences that the steps go on with."""
        prefix = self._prompt(PREFIX_LEN)
        for _ in range(NUM_SEQS):
            self._engine.add_request(prefix + self._prompt(TAIL_LEN), self._params)
        while len(self._engine.step()) < NUM_SEQS:
            pass

    def step(self) -> Parts:
        """Return the seconds of each part of a step."""
        with PartClock(PARTS) as clock:
            assert self._engine.step(), "tokens"
        return clock.seconds

    def _check(self, model: tf.PreTrainedModel) -> None:
        """AssertionError unless a prompt's first token is the model's."""
        prompt = self._prompt(TAIL_LEN)
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1].float()
        (output,) = self._engine.generate([prompt], replace(self._params, max_tokens=1))
        assert logits.max() - logits[output.token_ids[0]] < 0.2, "the likeliest token, or one as likely"


def measure(model: tf.PreTrainedModel, rounds: int) -> list[Row]:
    """Return the figures of both kinds of step."""
    steps = Steps(model, rounds + 1)
    turns = in_turns({"prefill": steps.prefill}, rounds, measure=result)
    steps.begin_decodes()
    turns |= in_turns({"decode": steps.step}, rounds, measure=result)
    return [figures(step, turns[step]) for step in ("decode", "prefill")]


def figures(step: str, rounds: list[Parts]) -> Row:
    parts = {part: Figure.of((spent[part] for spent in rounds), 1e6) for part in PARTS}
    return {"step": step, "us": Figure.of((sum(spent.values()) for spent in rounds), 1e6), "parts us": parts}


def shares_of(row: Row) -> dict[str, float]:
    """Return the percents of a step that its parts take."""
    return {part: 100 * us.median / row["us"].median for part, us in row["parts us"].items()}


def main() -> None:
    options = parse(
        "step_parts",
        __doc__,
        rounds=15,
        threads=torch.get_num_threads(),
        model=option("small", choices=MODELS),
        dtype=option("fp32", choices=DTYPES),
    )
    rows = measure(make_model(MODELS[options.model], DTYPES[options.dtype], VOCAB), options.rounds)
    for row in rows:
        print(f"\n{row['step']}: {row['us']:.0f} us")
        parts = [{"part": part, "us": row["parts us"][part], "%": share} for part, share in shares_of(row).items()]
        shown("  {part:<24} {us:>24.0f} {%:>5.1f}", parts)
    steps = {f"{row['step']}, {row['us'].median / 1000:.1f} ms": shares_of(row) for row in rows}
    finish(options, lambda path: stacked(path, steps, "% of a step"), rows=rows)


if __name__ == "__main__":
    main()
