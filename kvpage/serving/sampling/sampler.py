"""Choose the next token of each sequence, from its logits and its SamplingParams.

    logits ─► on a CPU: one native call for all rows          sample_rows
           ─► rows with rules of transformers' processors     sample_by_torch
           ─► on other devices: all rows                      sample_by_torch

Both draw at a random number that depends only on the sequence's seed and its number of tokens: not on the batch, and
not on whether a step was computed twice. Both choose the same token, unless that number lies within rounding errors of
the border between two tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvpage.serving.sampling.logits_check import LogitsNotFinite
from kvpage.serving.sampling.native_rows import GREEDY, ROW, can_sample, sample_rows
from kvpage.serving.sampling.sampled_sequence import SampledSequence
from kvpage.serving.sampling.torch_sampler import sample_by_torch


def sample(logits: torch.Tensor, sequences: Sequence[SampledSequence]) -> list[int]:
    """Return one token a row. logits: [len(sequences), vocab_size].

    Raises LogitsNotFinite for rows that hold NaN or +inf, or no finite number, before or after their processing.
    """
    if not sequences:
        return []
    tokens = _sample_natively(logits, sequences) if can_sample(logits) else sample_by_torch(logits, sequences)
    if min(tokens) < 0:
        bad = [row for row, token in enumerate(tokens) if token < 0]
        raise LogitsNotFinite(bad, [sequences[row].request_id for row in bad])
    return tokens


def _sample_natively(logits: torch.Tensor, sequences: Sequence[SampledSequence]) -> list[int]:
    """Return a token for each row, or -1. A row that needs torch is taken as a greedy one first."""
    sampled = [sequence.sampled_row for sequence in sequences]
    if not any(sampled):
        greedy: list[int] = sample_rows(logits, np.frombuffer(GREEDY * len(sequences), ROW)).tolist()
        return greedy
    packed = [GREEDY if row is None else row.packed for row in sampled]
    by_torch = [] if all(packed) else [index for index, record in enumerate(packed) if not record]
    rows = np.frombuffer(bytearray(b"".join([record or GREEDY for record in packed] if by_torch else packed)), ROW)
    rows["seed"] = [sequence.seed for sequence in sequences]
    rows["position"] = [sequence.num_generated for sequence in sequences]
    rules = [None if row is None else row.token_rules for row in sampled]
    if any(rules):
        held = [None if each is None else sequence.tokens for each, sequence in zip(rules, sequences, strict=True)]
        tokens: list[int] = sample_rows(logits, rows, rules, held).tolist()
    else:
        tokens = sample_rows(logits, rows).tolist()
    if by_torch:
        chosen = sample_by_torch(logits[by_torch], [sequences[index] for index in by_torch])
        for index, token in zip(by_torch, chosen, strict=True):
            tokens[index] = token
    return tokens
