"""How fast does Engine serve models with states, beside `model.generate`? And what does it gain by packing?

    forward           a bound: the model's own forward over as many tokens, in a rectangle: prompts of one length, then
                      a step for all of them at once. No padding, no choice of tokens, no cache to keep
    kvpage            Engine, all requests at once
    pieces            the same, but each call of a mixer computes one sequence; other layers compute all at once
    alone             the same, but each step computes one sequence
    generate          `model.generate`, one request after the other
    generate_padded   `model.generate` over one left-padded batch

First all answer greedily, and the answers must be right: each token of kvpage is that of `generate`, or lies within
rounding of the best logit of the model's own forward. Then so must those of the padded batch be, or the table says
"wrong". Then all take turns, beginning with the next one each time. Medians with their quartiles count.
"""

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers as tf

from kvpage.benchmarks.cells import Row
from kvpage.benchmarks.hf_ways import generation, padded
from kvpage.benchmarks.pictures import grouped
from kvpage.benchmarks.runs import SERVED
from kvpage.benchmarks.script import WITHOUT, finish, option, parse
from kvpage.benchmarks.serving_tokens import TokenJudge, contest, show_contest
from kvpage.benchmarks.serving_workloads import Prompts, Served, Tokens, Workload, engine_for, random_prompts
from kvpage.benchmarks.state_families import FAMILIES, VOCAB, Shape, make_family
from kvpage.serving import SamplingParams
from kvpage.serving.model.hf_cache.argument import CACHE_ARGUMENTS, checked_cache_argument
from kvpage.serving.model.states.row_cuts import Cut
from kvpage.serving.model.states.state_pass import StatePass

DEFAULT = [family for families in SERVED.values() for family in families]
BOUND = "forward"


Answer = Callable[[], Tokens]


def kvpage_answers(model: tf.PreTrainedModel, prompts: Prompts, max_tokens: int, num_at_once: int) -> Answer:
    """Return the answers of an engine that begins with an empty cache. num_at_once: requests in a step, at most."""
    engine = engine_for(model, (len(prompt) + max_tokens for prompt in prompts), max_num_seqs=num_at_once)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    def answer() -> Tokens:
        engine.reset_prefix_cache()
        return [output.token_ids for output in engine.generate(prompts, params)]

    return answer


def in_pieces(answer: Answer) -> Answer:
    """Return the same, but each call of a mixer computes one sequence."""

    def answer_by_pieces() -> Tokens:
        with mock.patch.object(StatePass, "_cut_row", _one_by_one(vars(StatePass)["_cut_row"])):
            return answer()

    return answer_by_pieces


def _one_by_one(cut_row: Callable[[StatePass, bool], Iterable[Any]]) -> Callable[[StatePass, bool], Iterator[Any]]:
    """Return the same cuts of a packed row, but the decodes, which are one, are cut into single ones."""

    def cut(states: StatePass, is_apart: bool) -> Iterator[Any]:
        for piece in cut_row(states, is_apart):
            if not piece.cut.is_batch:
                yield piece
                continue
            for row, slot in zip(_indices(piece.cut.rows), _indices(piece.slots), strict=True):
                alone = Cut(slice(row, row + 1), True)
                yield piece._replace(cut=alone, slots=slice(slot, slot + 1), snapshots=[])

    return cut


def _indices(rows: slice | torch.Tensor) -> Iterable[int]:
    found: Iterable[int] = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
    return found


def contenders(model: tf.PreTrainedModel, prompts: Prompts, max_tokens: int) -> dict[str, Callable[[], Answer]]:
    """Return what makes each contender, by name. alone: each step computes one sequence."""
    config, kvpage = generation(max_tokens), functools.partial(kvpage_answers, model, prompts, max_tokens)
    return {
        "kvpage": lambda: kvpage(len(prompts)),
        "pieces": lambda: in_pieces(kvpage(len(prompts))),
        "alone": lambda: kvpage(1),
        "generate": lambda: lambda: [padded(model, [prompt], config)[0] for prompt in prompts],
        "generate_padded": lambda: functools.partial(padded, model, prompts, config),
    }


def own_forward(model: Any, num: int, num_tokens: int, max_tokens: int) -> Callable[[], object]:
    """Return the model's forward over `num` prompts of so many tokens, and then over the next token of each."""
    rows = torch.randint(1, model.config.vocab_size, (num, num_tokens), generator=torch.Generator().manual_seed(0))
    next_tokens = rows[:, :1].contiguous()
    argument = checked_cache_argument(model, CACHE_ARGUMENTS)

    @torch.no_grad()
    def compute() -> object:
        given: dict[str, Any] = {argument: tf.DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
        for position in (0, *range(num_tokens, num_tokens + max_tokens - 1)):
            tokens = next_tokens if position else rows
            model(input_ids=tokens, **given)
        return None

    return compute


def make_prompts(num: int, num_tokens: int) -> Prompts:
    """Return prompts of half to one and a half times so many tokens, in a mixed order; the mean is that many."""
    lengths = np.linspace(0.5, 1.5, num) * num_tokens if num > 1 else np.array([num_tokens])
    mixed = np.random.default_rng(0).permutation(lengths)
    return random_prompts((max(int(length), 1) for length in mixed), VOCAB)


def measure(kind: str, options: argparse.Namespace) -> Row:
    model = make_family(kind, Shape(options.hidden, options.layers))
    prompts = make_prompts(options.requests, options.prompt_tokens)
    calls: dict[str, Callable[[], Any]] = {
        name: make() for name, make in contenders(model, prompts, options.tokens).items() if name not in options.without
    }
    answers = {name: Served([run()], 0.0) for name, run in calls.items()}
    calls[BOUND] = own_forward(model, len(prompts), sum(map(len, prompts)) // len(prompts), options.tokens)
    workload, num_tokens = Workload(kind, [prompts]), len(prompts) * options.tokens
    found = contest(TokenJudge(model), workload, answers, calls, num_tokens, options.rounds, rotates=True)
    num_parameters = sum(one.numel() for one in model.parameters())
    return {"family": kind, "states": FAMILIES[kind][0], "parameters": num_parameters, **found}


def main() -> None:
    options = parse(
        "hybrid_serving",
        __doc__,
        rounds=5,
        threads=torch.get_num_threads(),
        families=option(DEFAULT, choices=FAMILIES),
        hidden=512,
        layers=4,
        requests=option(8, "at once"),
        prompt_tokens=option(256, "the mean"),
        tokens=option(32, "of each answer"),
        without=WITHOUT,
    )
    tf.logging.set_verbosity_error()
    rows = []
    for kind in options.families:
        rows.append(measure(kind, options))
        print("\n{family}: {states}, {parameters:,} parameters".format(**rows[-1]))
        show_contest(rows[-1])
    series = {name: [row["tokens_per_s"][name] for row in rows] for name in rows[0]["tokens_per_s"]}
    finish(options, lambda path: grouped(path, options.families, series, "generated tokens/s"), families=rows)


if __name__ == "__main__":
    main()
