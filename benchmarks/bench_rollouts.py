"""How fast are GRPO's rollouts by kvpage, beside TRL's plain generation?

A batch has some prompts, and a group of completions for each. TRL's plain generation is one `model.generate` over the
left-padded batch, in which each prompt is as often as its group is large. kvpage computes each prompt once: see
PolicyEngine. The cache is empty at the beginning of every batch, as after an update of the weights. Contenders:

    bound            arithmetic: the model's matrix products alone over the tokens that must be computed at least, by
                     the fastest products of this machine (serving_bound.py)
    kvpage           PolicyEngine.sample
    generate         the call of `model.generate` that GRPOTrainer makes
    generate_batch   transformers' continuous batching, which GRPOTrainer has as an option

First all complete greedily. The tokens must be those of kvpage, or lie within rounding of the best logit
(serving_tokens.py). Then all draw tokens, as GRPO does, and take turns. No completion ends early. Medians with their
quartiles count.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from kvpage.benchmarks.hf_ways import batched_tokens_of, generation, has_batches, padded
from kvpage.benchmarks.pictures import bars
from kvpage.benchmarks.script import WITHOUT, finish, option, parse
from kvpage.benchmarks.serving_bound import ProductsBound
from kvpage.benchmarks.serving_tokens import TokenJudge, contest, show_contest
from kvpage.benchmarks.serving_workloads import (
    MODELS,
    VOCAB,
    Prompts,
    Served,
    Tokens,
    Workload,
    batches_of,
    config_for,
    make_model,
)  # fmt: skip
from kvpage.integrations.trl import PolicyEngine
from kvpage.serving import SamplingParams

CHOICE_ROUNDS = 3
Contender = Callable[[bool], Tokens]
"""Completes all prompts, with drawn tokens (True) or the likeliest ones (False)."""


def make_prompts(num: int, group: int, num_tokens: int) -> Prompts:
    rows = torch.randint(1, VOCAB, (num, num_tokens), generator=torch.Generator().manual_seed(0)).tolist()
    return [row for row in rows for _ in range(group)]


def paged_contender(model: tf.PreTrainedModel, prompts: Prompts, max_tokens: int) -> Contender:
    lengths = (len(prompt) + max_tokens for prompt in prompts)
    policy = PolicyEngine(model, config_for(lengths, max_num_seqs=len(prompts)))

    def complete(draws: bool) -> Tokens:
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0 if draws else 0.0, top_k=0)
        return [sample.token_ids for sample in policy.sample(prompts, params)]

    return complete


def hf_answers(way: Callable[..., Tokens], model: Any, prompts: Prompts, max_tokens: int, draws: bool) -> Tokens:
    return way(model, prompts, generation(max_tokens, draws))


def measure(model: tf.PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    prompts = make_prompts(options.prompts, options.group, options.prompt_tokens)
    workload = Workload("rollouts", [prompts])
    runs = {"kvpage": paged_contender(model, prompts, options.tokens)}
    for name, way in {"generate": padded, **({"generate_batch": batched_tokens_of} if has_batches() else {})}.items():
        runs[name] = functools.partial(hf_answers, way, model, prompts, options.tokens)
    runs = {name: run for name, run in runs.items() if name not in options.without}
    answers = {name: Served([run(False)], 0.0) for name, run in runs.items()}
    bound = ProductsBound(model, batches_of(workload, options.tokens), CHOICE_ROUNDS)
    calls: dict[str, Callable[[], object]] = {"bound": bound.run}
    calls |= {name: functools.partial(run, True) for name, run in runs.items()}
    found = contest(TokenJudge(model), workload, answers, calls, len(prompts) * options.tokens, options.rounds)
    return found | {"products": bound.chosen}


def main() -> None:
    options = parse(
        "rollouts",
        __doc__,
        rounds=5,
        threads=torch.get_num_threads(),
        model=option("small", "33 million parameters, or 197 million", choices=MODELS),
        prompts=option(4, "distinct ones"),
        group=option(8, "completions of each prompt"),
        prompt_tokens=512,
        tokens=option(64, "of each completion"),
        without=WITHOUT,
    )
    tf.logging.set_verbosity_error()
    result = measure(make_model(MODELS[options.model], torch.float32, VOCAB), options)
    show_contest(result)
    finish(options, lambda path: bars(path, result["tokens_per_s"], "generated tokens/s"), **result)


if __name__ == "__main__":
    main()
