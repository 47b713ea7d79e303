"""Requests whose next tokens are chosen, their logits, and the records of `kvpage.ops.sample_rows`."""

import numpy as np
import torch

from kvpage import ops
from kvpage.serving.loop.request import Request
from kvpage.serving.params.sampling import SamplingParams

RULES = [
    {},
    {"temperature": 0.8},
    {"temperature": 30.0},
    {"temperature": 0.9, "top_k": 1},
    {"temperature": 1.5, "top_k": 50},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 2.0, "top_p": 0.9999},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.85, "min_p": 0.02},
]
NAMING_RULES = [
    {"repetition_penalty": 1.4, "temperature": 0.9},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": [(3, 2.5), (0, -4.0), (3, 0.3)], "temperature": 1.1},
    {"suppress_tokens": [2, 5, 999], "begin_suppress_tokens": [1, 2]},
    {"min_tokens": 3, "stop_token_ids": [0, 4], "frequency_penalty": -0.2, "logit_bias": {0: 9.0}},
]
"""Rules that name tokens."""


def make_request(seed, position=0, prompt=(1,), **fields):
    request = Request(str(seed), np.array(prompt, np.int32), SamplingParams(max_tokens=30, seed=seed, **fields), 0)
    request.tokens[len(prompt) :] = 0
    request.num_tokens += position
    return request


def make_logits(num_rows, vocab_size, seed=0):
    """Rows with a few likely tokens, and with many; some are equally likely, and some are ruled out."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * torch.linspace(0.2, 6, num_rows)[:, None]
    logits[1::2] = (logits[1::2] * 4).round() / 4
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[:, 0] = 1.0
    return logits


def sampling_records(num_rows, **numbers):
    """Records of ops.sample_rows that name no token. numbers: by name, of all rows or each; a draw from all without."""
    records = np.zeros(num_rows, ops.SAMPLING_RECORD)
    drawn = {"seed": np.arange(num_rows), "temperature": 1.0, "top_p": 1.0, "least_score": -np.inf, "repetition": 1.0}
    for name, values in (drawn | numbers).items():
        records[name] = values
    return torch.from_numpy(records.view(np.int64).reshape(num_rows, ops.SAMPLING_RECORD_WORDS))
