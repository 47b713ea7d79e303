"""The requests of a load test: prompts as token ids, lengths of answers, times of arrival.

random     every prompt of its own, of one length
sharegpt   lengths as chats have them: log-normal, medians of 100 and 140 tokens, up to 1,024
prefix     prompts that begin with one of a few long prefixes, as with a system prompt
trace      a Mooncake trace: its times, its lengths, and its shared blocks
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from kvpage.tools.replay import TraceRequest

FIRST_ID = 10  # below it, vocabularies keep special tokens
HASH_TOKENS = 512  # of a Mooncake trace's ids
MEDIANS, SIGMAS, MOST = (100, 140), (1.2, 0.9), 1024


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """One request. arrival: seconds after the beginning; None where the load decides. leaves_after: reads."""

    prompt: list[int]
    max_tokens: int
    arrival: float | None = None
    leaves_after: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How requests look. vocab: ids are less. input_len, output_len: tokens. prefix_len, num_prefixes: of `prefix`."""

    vocab: int = 1000
    input_len: int = 128
    output_len: int = 32
    prefix_len: int = 256
    num_prefixes: int = 4
    seed: int = 0


def make_requests(dataset: str, num: int, shape: Shape) -> list[ServeRequest]:
    """Return `num` requests of a dataset that needs no file."""
    rng = np.random.default_rng(shape.seed)
    return list(islice({"random": _random, "sharegpt": _sharegpt, "prefix": _prefix}[dataset](shape, rng), num))


def _tokens(rng: np.random.Generator, num: int, vocab: int) -> list[int]:
    tokens: list[int] = rng.integers(FIRST_ID, vocab, num).tolist()
    return tokens


def _random(shape: Shape, rng: np.random.Generator) -> Iterator[ServeRequest]:
    while True:
        yield ServeRequest(_tokens(rng, shape.input_len, shape.vocab), shape.output_len)


def _sharegpt(shape: Shape, rng: np.random.Generator) -> Iterator[ServeRequest]:
    while True:
        drawn = [rng.lognormal(math.log(median), sigma) for median, sigma in zip(MEDIANS, SIGMAS, strict=True)]
        num_input, num_output = (min(max(int(length), 4), MOST) for length in drawn)
        yield ServeRequest(_tokens(rng, num_input, shape.vocab), num_output)


def _prefix(shape: Shape, rng: np.random.Generator) -> Iterator[ServeRequest]:
    prefixes = [_tokens(rng, shape.prefix_len, shape.vocab) for _ in range(shape.num_prefixes)]
    while True:
        chosen = prefixes[int(rng.integers(shape.num_prefixes))]
        yield ServeRequest(chosen + _tokens(rng, shape.input_len, shape.vocab), shape.output_len)


def requests_of_trace(trace: Iterable[TraceRequest], num: int, shape: Shape, scale: float) -> list[ServeRequest]:
    """Return the first requests of a trace, with their times.

    scale: of all lengths, for a machine that is smaller than the trace's. Requests share what they shared.
    """
    per_hash = max(1, int(HASH_TOKENS * scale))
    made = []
    for one in islice(trace, num):
        num_input = max(1, int(one.input_length * scale))
        prompt: list[int] = []
        for hash_id in one.hash_ids:
            prompt += _tokens(np.random.default_rng((shape.seed, hash_id)), per_hash, shape.vocab)
        prompt = prompt[:num_input] or [FIRST_ID]
        made.append(ServeRequest(prompt, max(1, int(one.output_length * scale)), one.timestamp / 1000))
    return made


def with_arrivals(requests: Sequence[ServeRequest], rate: float, seed: int) -> list[ServeRequest]:
    """Return the requests with times of a Poisson process. rate: requests a second."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(requests))).tolist()
    return [replace(one, arrival=time) for one, time in zip(requests, times, strict=True)]


def with_leavers(requests: Sequence[ServeRequest], share: float, seed: int) -> list[ServeRequest]:
    """Return the requests; the clients of such a share of them go away after some chunks of the answer."""
    rng = np.random.default_rng(seed)
    return [
        replace(one, leaves_after=int(rng.integers(0, one.max_tokens))) if rng.random() < share else one
        for one in requests
    ]
