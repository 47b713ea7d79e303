"""Answers beside each other, and beside a forward in fp32: are they tokens that the model would say?

Greedy answers part where two tokens' logits are equal up to rounding, which depends on the batch of a token. So a token
counts as right if its logit, in a forward of the request alone in fp32, lies within rounding of the largest.
"""

import copy
from typing import NamedTuple

import torch
import transformers as tf

from kvpage.benchmarks.serving_workloads import Served, Workload

FP32_ROUNDING = 1e-4
"""Of logits around 4, which a batch moves by 1e-5."""
NUM_TRIED = 128  # tokens of a forward that shows how a narrower type rounds


class Compared(NamedTuple):
    """One contender's answers beside kvpage's.

    num_parted: requests in which both part at a tie; a conversation is compared until it parts.
    max_gap: the largest distance of a token where they part from the best logit.
    """

    num_parted: int
    max_gap: float


class TokenJudge:
    """The model in fp32, which says how far a token is from the best.

    max_rounding: as far as rounding moves a logit: in a narrower type, of torch's own forward of some tokens.
    """

    def __init__(self, model: tf.PreTrainedModel) -> None:
        if model.dtype == torch.float32:
            self._model, self.max_rounding = model, FP32_ROUNDING
        else:
            self._model = copy.deepcopy(model).float()
            self.max_rounding = self._rounding_of(model)

    @torch.no_grad()
    def _rounding_of(self, model: tf.PreTrainedModel) -> float:
        tokens = torch.randint(model.config.vocab_size, (1, NUM_TRIED), generator=torch.Generator().manual_seed(0))
        tokens = tokens.to(model.device)
        return float((model(tokens).logits.float() - self._model(tokens).logits).abs().max())

    @torch.no_grad()
    def gap(self, tokens: list[int], token: int) -> float:
        """Return the best logit after `tokens` minus that of `token`."""
        logits = self._model(torch.tensor([tokens], device=self._model.device), logits_to_keep=1).logits[0, -1]
        return float(logits.max() - logits[token])


def compare_answers(judge: TokenJudge, workload: Workload, found: dict[str, Served]) -> dict[str, Compared]:
    """Compare all contenders' answers with kvpage's.

    Returns:
        each contender's; kvpage's own has the largest gap of its tokens at which others part from it.

    Raises:
        SystemExit: a token of kvpage is further from the best logit than rounding explains.
    """
    compared, our_gap = {}, 0.0
    for name, served in found.items():
        their_gap, num_parted = 0.0, 0
        for prompt, theirs, ours in parted_tokens(workload, served, found["kvpage"]):
            num_parted += 1
            their_gap = max(their_gap, judge.gap(prompt, theirs))
            our_gap = max(our_gap, judge.gap(prompt, ours))
        compared[name] = Compared(num_parted, their_gap)
    if our_gap > judge.max_rounding:
        raise SystemExit(
            f"a token of kvpage is {our_gap:.1e} below the best logit, of {judge.max_rounding:.1e} allowed"
        )
    return compared | {"kvpage": Compared(0, our_gap)}


def parted_tokens(workload: Workload, first: Served, second: Served) -> list[tuple[list[int], int, int]]:
    """Return each conversation's first difference: the tokens before it, and both tokens.

    Nothing after it is compared: later prompts hold its own answers.
    """
    found = []
    for number in range(len(workload.turns[0])):
        prompt: list[int] = []
        for turn, inputs in enumerate(workload.turns):
            one, other = first.answers[turn][number], second.answers[turn][number]
            prompt = prompt + inputs[number]
            if one != other:
                index = next(index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
                found.append((prompt + one[:index], one[index], other[index]))
                break
            prompt = prompt + one
    return found
