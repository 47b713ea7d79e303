"""Rows sampled natively: the tokens of a float64 oracle and of torch's way, unless the draw is at a border."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

import kvpage._C as _C
from kvpage.layout.sampling_record import ROW_RULES
from kvpage.serving.loop.request import Request
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sampling import native_rows
from kvpage.serving.sampling.native_rows import GREEDY, sample_rows
from kvpage.serving.sampling.philox import uniforms
from kvpage.serving.sampling.sampler import sample, sample_by_torch

NEAR = 1e-5
"""A draw so near a border of the distribution, as a share of the whole, may fall to either side."""

RULES = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 30.0},
    "top_k": {"temperature": 0.9, "top_k": 50},
    "top_k of one": {"temperature": 0.9, "top_k": 1},
    "large top_k": {"temperature": 1.5, "top_k": 700},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "low top_p": {"temperature": 1.0, "top_p": 1e-6},
    "high top_p": {"temperature": 1.0, "top_p": 0.9999},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "min_p of one": {"temperature": 1.2, "min_p": 1.0},
    "all": {"temperature": 0.7, "top_k": 40, "top_p": 0.85, "min_p": 0.02},
    "top_p and min_p": {"temperature": 1.1, "top_p": 0.95, "min_p": 0.01},
}


class Expected(NamedTuple):
    """A row's token, and the distance of its draw from the nearest border."""

    token: int
    distance: float


def has_heavy_border(scores: np.ndarray, shares: np.ndarray, distances: np.ndarray) -> bool:
    """Whether a nucleus that is found to within 1e-6 may have more or fewer tokens of a share that matters."""
    (close,) = (np.abs(distances) < 1e-6).nonzero()
    at_border = scores[np.unique(np.concatenate([close, close + 1]).clip(max=len(scores) - 1))]
    return any(shares[scores == score].sum() > NEAR / 4 for score in np.unique(at_border))


def oracle(logits: np.ndarray, params: SamplingParams, point: float) -> Expected:
    """Draw in float64, from scores that are rounded as the specification rounds them."""
    if params.is_greedy:
        return Expected(int(logits.argmax()), 1.0)
    scores = ((logits - logits.max()) / np.float32(params.temperature)).astype(np.float64)
    weights = np.where(scores >= -87, np.exp(scores), 0)
    distance = 1.0
    if params.top_k and params.top_k < len(scores):
        weights[scores < np.sort(scores)[-params.top_k]] = 0
    if params.top_p is not None and params.top_p < 1:
        order = np.argsort(-scores, kind="stable")
        shares = weights[order] / weights.sum()
        ends = shares.cumsum()
        distance = NEAR / 3 if has_heavy_border(scores[order], shares, ends - params.top_p) else 1.0
        weights[scores < scores[order][ends - shares < params.top_p].min()] = 0
    if params.min_p:
        weights[scores < np.float32(np.log(params.min_p))] = 0
    ends = weights.cumsum() / weights.sum()
    token = int(np.searchsorted(ends, point, side="right"))
    return Expected(token, min(distance, np.abs(ends - point).min()))


def make_request(seed: int, position: int = 0, prompt: tuple[int, ...] = (1,), **fields: object) -> Request:
    params = SamplingParams(max_tokens=max(position, 1) + 1, seed=seed, **fields)
    request = Request(str(seed), np.array(prompt, np.int32), params, 0)
    request.tokens[len(prompt) :] = 0
    request.num_tokens += position
    return request


def make_logits(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows with a few likely tokens, and with many; some tokens are ruled out."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * torch.linspace(0.2, 6, num_rows)[:, None]
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[:, 0] = 1.0
    return logits.to(dtype)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("vocab_size", [1, 8, 63, 64, 65, 511, 1024, 5003, 20011])
def test_tokens_are_those_of_the_oracle_and_of_torch(rules: str, vocab_size: int) -> None:
    num_rows = 40 if vocab_size > 5000 else 120
    logits = make_logits(num_rows, vocab_size, seed=vocab_size)
    requests = [make_request(row, row % 5, **RULES[rules]) for row in range(num_rows)]
    points = uniforms([each.seed for each in requests], [each.num_generated for each in requests])
    expected = [oracle(row, each.params, u) for row, each, u in zip(logits.numpy(), requests, points, strict=True)]
    found, by_torch = sample(logits, requests), sample_by_torch(logits, requests)
    sure = [row for row, each in enumerate(expected) if each.distance > NEAR]
    assert [found[row] for row in sure] == [expected[row].token for row in sure] == [by_torch[row] for row in sure]
    assert len(sure) >= 0.5 * num_rows


@pytest.mark.parametrize("rules", ["temperature", "top_k", "top_p", "min_p", "all"])
def test_each_token_has_its_share_of_the_draws(rules: str) -> None:
    """The share of points below which a token is drawn is its cumulative share, to within 2e-6 of the oracle's."""
    vocab_size, params = 300, SamplingParams(**RULES[rules])
    logits = make_logits(3, vocab_size, seed=3)[2:]
    rng = np.random.default_rng(1)
    points = np.sort(uniforms(np.arange(20_000), np.zeros(20_000)))
    seeds = np.argsort(uniforms(np.arange(20_000), np.zeros(20_000)), kind="stable")
    record = np.frombuffer(make_request(0, **RULES[rules]).sampled_row.packed * len(seeds), ROW_RULES).copy()
    record["seed"] = seeds
    tokens = sample_rows(logits.expand(len(seeds), -1), record)
    assert (np.diff(tokens) >= 0).all()  # the inverse of a distribution function
    for index in rng.integers(0, len(seeds), 300):
        expected = oracle(logits[0].numpy(), params, points[index])
        assert tokens[index] == expected.token or expected.distance < 2e-6


@pytest.mark.parametrize("kernel", _C.sampling_kernels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [5, 640, 5003])
def test_every_instruction_set_type_and_stride(kernel: str, dtype: torch.dtype, vocab_size: int) -> None:
    """Tokens are torch's; logits in any rows of a wider tensor stay as they were, and nothing beside them is read."""
    requests = [make_request(row, row % 3, **list(RULES.values())[row % len(RULES)]) for row in range(70)]
    wide = torch.full((70, vocab_size + 9), torch.nan, dtype=dtype)
    logits = wide[:, 4 : 4 + vocab_size]
    logits[:] = make_logits(70, vocab_size, dtype)
    before = wide.clone()
    rows = np.frombuffer(
        b"".join(each.sampled_row.packed if each.sampled_row else GREEDY for each in requests), ROW_RULES
    )
    rows = rows.copy()
    rows["seed"], rows["position"] = [each.seed for each in requests], [each.num_generated for each in requests]
    tokens = np.full(70, 99, np.int32)
    place = (logits.data_ptr(), logits.stride(0) * logits.element_size(), native_rows.ROW_TYPES[dtype], 70, vocab_size)
    _C.sample_rows(place, rows, [], [], tokens, 1, kernel=kernel)
    points = uniforms(rows["seed"], rows["position"])
    for row, request in enumerate(requests):
        expected = oracle(logits[row].float().numpy(), request.params, points[row])
        assert tokens[row] == expected.token or expected.distance < NEAR
    assert torch.equal(wide.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("vocab_size", [5, 129, 640, 5000])
def test_a_row_alone_is_the_row_in_a_batch(vocab_size: int) -> None:
    """Whatever its place, its neighbours and the number of threads."""
    requests = [make_request(row, row % 9, **list(RULES.values())[row % len(RULES)]) for row in range(60)]
    logits = make_logits(60, vocab_size)
    together = sample(logits, requests)
    assert [sample(logits[row : row + 1], [request])[0] for row, request in enumerate(requests)] == together
    assert sample(logits.flip(0), requests[::-1]) == together[::-1]
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert sample(logits.repeat(40, 1), requests * 40) == together * 40
    finally:
        torch.set_num_threads(num_threads)


TOKEN_RULES = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": {3: 2.5, 0: -4.0}},
    {"suppress_tokens": [2, 5, 999]},
    {"begin_suppress_tokens": [1, 2]},
    {"min_tokens": 3, "stop_token_ids": [0, 4]},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.2, "logit_bias": {1: 1.0}, "suppress_tokens": [6]},
]


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rules_that_name_tokens_are_those_of_torch(fields: dict, dtype: torch.dtype) -> None:
    """As sequences grow, step by step; where a token is taken back, too."""
    vocab_size, rng = 40, np.random.default_rng(0)
    requests = [
        Request(
            str(seed), rng.integers(0, vocab_size, 6).astype(np.int32), SamplingParams(seed=seed, **fields, **rules), 0
        )
        for seed, rules in enumerate(TOKEN_RULES * 4)
    ]
    for step in range(8):
        logits = make_logits(len(requests), vocab_size, dtype, seed=step)
        logits[:, 7:14] = 1.5
        before = logits.clone()
        assert sample(logits, requests) == sample_by_torch(logits, requests)
        assert torch.equal(logits, before)
        for request in requests:
            request.tokens[request.num_tokens] = rng.integers(0, vocab_size)
            request.num_tokens += -1 if step == 4 else 1


def test_rows_of_the_library_share_a_batch_with_others() -> None:
    logits = make_logits(6, 50)
    fields = [{}, {"temperature": 1.0}, {"temperature": 1.0, "typical_p": 0.5}, {"no_repeat_ngram_size": 1}]
    requests = [make_request(seed, **fields[seed % 4]) for seed in range(6)]
    assert sample(logits, requests) == [sample(logits[row : row + 1], [requests[row]])[0] for row in range(6)]
    assert sample(logits, requests)[2:4] == sample_by_torch(logits[2:4], requests[2:4])


@pytest.mark.parametrize("rules", ["greedy", "temperature", "top_k", "top_p", "min_p"])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_rows_without_a_token_to_choose(rules: str, bad: float) -> None:
    """Wherever the bad logit is; and where all are ruled out."""
    for place in (0, 17, 63, 64, 600, 699):
        logits = torch.zeros(4, 700)
        logits[1, place], logits[2] = bad, -torch.inf
        for fields in (RULES[rules], {**RULES[rules], "logit_bias": {5: 1.0}}):
            requests = [make_request(seed, **fields) for seed in range(4)]
            with pytest.raises(ValueError, match="logits must be numbers, those of 1, 2 are not"):
                sample(logits, requests)


def test_tokens_as_likely_as_the_last_one_stay() -> None:
    logits = torch.zeros(800, 3000)
    logits[:, 5] = 1.0
    for fields in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9999}):
        tokens = sample(logits, [make_request(seed, temperature=1.0, **fields) for seed in range(800)])
        assert len(set(tokens)) > 500


def records(num_rows: int, **changed: object) -> np.ndarray:
    rows = np.frombuffer(GREEDY * num_rows, ROW_RULES).copy()
    for name, value in changed.items():
        rows[name][-1] = value
    return rows


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"temperature": -1.0}, "temperature must be finite and not negative, got -1 in row 1"),
        ({"temperature": np.nan}, "temperature must be finite and not negative"),
        ({"top_k": -1}, "top_k must not be negative, got -1 in row 1"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": np.nan}, "top_p must be in"),
        ({"least_score": 0.5}, "least_score must be at most 0, got 0.5 in row 1"),
        ({"position": -1}, "position must not be negative, got -1 in row 1"),
    ],
)
def test_numbers_out_of_range_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_rows(torch.zeros(2, 5), records(2, **changed))


@pytest.mark.parametrize("fields", [{"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}])
def test_a_position_that_overflows_with_the_prompt_is_refused(fields: dict) -> None:
    rules = make_request(0, **fields).sampled_row.token_rules
    logits, tokens, out = torch.zeros(1, 5), np.zeros(64, np.int32), np.zeros(1, np.int32)
    place = (logits.data_ptr(), 20, 0, 1, 5)
    for position, message in ((2**63 - 1, "position must be at most 2[*][*]63"), (-1, "position must not be negative")):
        with pytest.raises(ValueError, match=message):
            _C.sample_rows(place, records(1, position=position), [rules], [tokens], out, 1)


def test_arrays_of_other_shapes_are_refused() -> None:
    logits, tokens = torch.zeros(2, 5), np.zeros(2, np.int32)
    place = (logits.data_ptr(), 20, 0, 2, 5)
    rules = make_request(0, presence_penalty=1.0).sampled_row.token_rules
    for rows in (records(3), records(4)[::2], np.zeros(2, np.int64)):
        with pytest.raises(ValueError, match="rows must be 2 contiguous records of 40 bytes"):
            _C.sample_rows(place, rows, [], [], tokens, 1)
    with pytest.raises(ValueError, match="rules and tokens must be one for each of 2 rows, got 1 and 0"):
        _C.sample_rows(place, records(2), [None], [], tokens, 1)
    for held in (np.zeros(0, np.int32), np.zeros(3, np.int64), None):
        with pytest.raises(ValueError, match="tokens must be"):
            _C.sample_rows(place, records(2), [None, rules], [None, held], tokens, 1)
    with pytest.raises(ValueError, match="rules must be those of one row of one call at a time, got them twice"):
        _C.sample_rows(place, records(2), [rules, rules], [tokens, tokens], tokens, 1)
    with pytest.raises(ValueError, match="vocab_size must be positive"):
        _C.sample_rows((logits.data_ptr(), 20, 0, 2, 0), records(2), [], [], tokens, 1)
    out = np.full(2, 9, np.int32)
    _C.sample_rows(place, records(2), [None, rules], [None, tokens], out, 1)  # the refused calls gave them back
    assert out.tolist() == [0, 0]


class Elsewhere(torch.Tensor):
    """A tensor whose numbers are those of another, as sharded and quantised ones are: it has no memory of its own."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> "Elsewhere":
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device=numbers.device)

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    @classmethod
    def __torch_dispatch__(cls, operation: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        return operation(*[each.numbers if isinstance(each, Elsewhere) else each for each in args], **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", [Elsewhere, torch._neg_view])
def test_logits_whose_memory_holds_other_numbers(form: Callable, temperature: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    requests = [make_request(row, temperature=temperature) for row in range(3)]
    expected = sample(-logits if form is torch._neg_view else logits, requests)
    assert sample(form(logits), requests) == expected


def test_every_instruction_set_draws_the_same_tokens() -> None:
    """Sums of whole weights are the same in registers of any width, so no draw is near enough to a border to differ."""
    logits = make_logits(3, 20_011, seed=4)
    kernels = _C.sampling_kernels()
    for row, fields in enumerate(({}, {"top_p": 0.95}, {"top_k": 3000})):
        record = np.frombuffer(make_request(0, temperature=9.0, **fields).sampled_row.packed * 500, ROW_RULES).copy()
        record["seed"] = np.arange(500)
        found = {kernel: np.empty(500, np.int32) for kernel in kernels}
        for kernel, tokens in found.items():
            _C.sample_rows((logits[row].data_ptr(), 0, 0, 500, 20_011), record, [], [], tokens, 2, kernel=kernel)
        assert all((tokens == found[kernels[0]]).all() for tokens in found.values())
