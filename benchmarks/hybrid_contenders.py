"""The contenders of bench_hybrid_serving: engines that pack more or less, and transformers' own ways."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers as tf

from kvpage.benchmarks.hf_ways import generation, padded
from kvpage.benchmarks.serving_workloads import Prompts, Tokens, engine_for
from kvpage.serving import SamplingParams
from kvpage.serving.model.hf_cache.argument import CACHE_ARGUMENTS, checked_cache_argument
from kvpage.serving.model.states.row_cuts import Cut
from kvpage.serving.model.states.state_pass import StatePass

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
