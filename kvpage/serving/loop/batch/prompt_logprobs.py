"""Compute the log-probabilities of prompts from the logits of a step's prefills.

wanted rows   decode  decode | p0 p1 p2 p3 ... last | q0 q1 ... last |
                               scored: each says how likely the next token of its prompt is
left          decode  decode                   last             last     the rows by which next tokens are chosen
"""

import torch

from kvpage.serving.loop.batch.batch import Batch, Portion
from kvpage.serving.loop.batch.logprobs import logprobs_of_rows


def take_prompt_logprobs(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Give prompts their log-probabilities; return the logits after each decode and portion: [len(batch), vocab_size].

    logits: of the wanted rows, see Batch.packed.
    """
    row, last = len(batch.decodes), list(range(len(batch.decodes)))
    for portion in batch.prefills:
        num_wanted = len(portion.wanted)
        if portion.num_scored:
            _score(portion, logits, row)
        row += num_wanted
        last.append(row - 1)
    return logits[last]


def _score(portion: Portion, logits: torch.Tensor, row: int) -> None:
    """Give a prompt the log-probabilities of the tokens after those of a portion. row: that of its first token."""
    scored, begin, num = portion.request.scored, portion.start + 1, portion.num_scored
    assert scored is not None, "only scored prompts have scored rows"
    next_tokens = portion.request.tokens[begin : begin + num]
    scored.take(begin, logprobs_of_rows(logits, range(row, row + num), next_tokens, [scored.num_top] * num))
