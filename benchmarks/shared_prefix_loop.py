"""Tokens per second of an engine whose sequences share a prefix, beside as many that share nothing.

    samples    one prompt, continued as often as there are sequences
    beams      one prompt, and a search with as many beams
    chats      a system prompt, and another question after it for each sequence
    apart      prompts as long as those, which begin differently
    bound      prompts without the shared tokens: none of these is read

Steps are timed in which all sequences decode. Of beams it is a whole search of a cached prompt, a token at a time.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace

import transformers as tf

from kvpage.benchmarks.cells import Row
from kvpage.benchmarks.figure import Figure, in_turns, result, seconds
from kvpage.benchmarks.serving_workloads import (
    BATCHED_TOKENS,
    DTYPES,
    MODELS,
    VOCAB,
    Prompts,
    engine_for,
    make_model,
    random_prompts,
)  # fmt: skip
from kvpage.serving import BeamSearchParams, SamplingParams

BEAM_TOKENS = 4
WORKLOADS = ("samples", "beams", "chats", "apart", "bound")


def prompts_of(workload: str, num_seqs: int, shared: int, own: int) -> Prompts:
    """Return the prompts of a workload."""
    if workload in ("apart", "bound"):
        return random_prompts([own + (shared if workload == "apart" else 0)] * num_seqs, VOCAB)
    (prefix,) = random_prompts([shared], VOCAB)
    ends = random_prompts([own] * (num_seqs if workload == "chats" else 1), VOCAB, seed=1)
    return [prefix + end for end in ends]


def decoding(
    model: tf.PreTrainedModel, workload: str, options: argparse.Namespace, num_steps: int
) -> Callable[[], float]:
    """Return a call that gives the seconds of a step in which all sequences of a workload decode, for so many calls."""
    num_seqs, shared, own = max(options.seqs), max(options.shared), max(options.own)
    lead = -(-num_seqs * (shared + own) // BATCHED_TOKENS) + 4  # steps until the last prompt has its first token
    lengths = [shared + own + lead + num_steps] * 2 * num_seqs
    engine = engine_for(model, lengths, max_num_seqs=num_seqs)
    prompts = prompts_of(workload, num_seqs, shared, own)
    if workload == "beams":
        params = BeamSearchParams(num_beams=num_seqs, max_tokens=BEAM_TOKENS, ignore_eos=True)
        return lambda: seconds(lambda: engine.beam_search(prompts, params)) / BEAM_TOKENS
    sampled = SamplingParams(max_tokens=lead + num_steps, temperature=1.0, top_k=0, seed=0, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(prompt, replace(sampled, n=num_seqs if workload == "samples" else 1))
    for _ in range(lead):
        engine.step()
    return lambda: seconds(engine.step)


def loop_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each dtype and workload. seqs, shared, own: the largest of the options."""
    num_seqs, num_steps = max(options.seqs), options.rounds + 2
    for dtype in options.dtypes:
        sizes = {"max_position_embeddings": max(options.shared) + max(options.own) + 4096}
        model = make_model(MODELS["small"], DTYPES[dtype], VOCAB, **sizes)
        calls = {workload: decoding(model, workload, options, num_steps) for workload in WORKLOADS}
        taken = in_turns(calls, options.rounds, measure=result)
        for workload, steps in taken.items():
            yield {
                **{"loop": workload, "dtype": dtype, "ms": Figure.of(steps, 1e3)},
                "tokens/s": Figure.of([num_seqs / step for step in steps]),
                "times": Figure.ratio(taken["apart"], steps),
            }
