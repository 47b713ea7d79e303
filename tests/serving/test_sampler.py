"""Sampling: greedy rows, the distribution of drawn ones, and seeds."""

import math

import numpy as np
import pytest
import torch

from kvpage.serving.requests import Request
from kvpage.serving.sampler import sample
from kvpage.serving.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])


def make_request(num_generated: int = 0, **fields: object) -> Request:
    request = Request("one", np.array([1], np.int32), SamplingParams(max_tokens=100_000, **fields), 0)
    request.num_tokens += num_generated
    return request


def frequencies(num_draws: int = 4000, **fields: object) -> torch.Tensor:
    """How often each token is drawn, over as many seeds."""
    requests = [make_request(seed=seed, **fields) for seed in range(num_draws)]
    tokens = sample(LOGITS.expand(num_draws, -1), requests)
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / num_draws


def test_greedy_takes_the_likeliest_and_no_requests_give_no_tokens() -> None:
    logits = torch.randn(5, 50)
    assert sample(logits, [make_request() for _ in range(5)]) == logits.argmax(-1).tolist()
    assert sample(logits[:0], []) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    error = (frequencies(temperature=temperature) - expected).abs()
    assert (error <= 4 * (expected * (1 - expected) / 4000).sqrt()).all()  # 4 sigma; never what has no probability


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 1e-300, 1e-320, 5e-324])
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_zero_temperatures_take_the_likeliest(temperature: float, fields: dict, dtype: torch.dtype) -> None:
    """Also where logits / temperature is past what fp32, or double, can hold."""
    likeliest = [1, 3, 0, 2, 4]
    logits = torch.full((5, 6), -2.0, dtype=dtype)
    logits[0, 1], logits[1, 3] = 30000.0, -1.0
    logits[2, 0], logits[2, 4] = 3e38, -3e38
    logits[3, 2], logits[3, 0] = 0.0, float("-inf")
    logits[4] = float("-inf")
    logits[4, 4] = -3e38
    requests = [make_request(seed=seed, temperature=temperature, **fields) for seed in range(5)]
    assert sample(logits, requests) == likeliest
    assert sample(logits, requests) == sample(logits, [make_request() for _ in range(5)])


def test_a_difference_below_every_temperature_is_none() -> None:
    """Equally likely tokens stay so, however cold."""
    requests = [make_request(seed=seed, temperature=1e-320) for seed in range(400)]
    tokens = sample(torch.tensor([1.0, 5.0, 5.0]).expand(400, -1), requests)
    assert set(tokens) == {1, 2} and 150 < tokens.count(1) < 250


def test_top_k_and_top_p_leave_out_the_tail() -> None:
    weights = LOGITS.softmax(-1)  # 0.64, 0.24, 0.09, 0.03, 0
    assert weights[:2].sum() > 0.8
    for fields in ({"top_k": 2}, {"top_p": 0.8}):
        found = frequencies(temperature=1.0, **fields)
        assert (found[2:] == 0).all() and found[1] > 0
        assert math.isclose(found[0], weights[0] / weights[:2].sum(), abs_tol=0.03)
    assert frequencies(temperature=1.0, top_k=1)[0] == 1
    assert frequencies(temperature=1.0, top_k=1000)[2] > 0


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(1, 1000)
    draws = [sample(logits, [make_request(n, seed=7, temperature=1.0)])[0] for n in range(40)]
    assert draws == [sample(logits, [make_request(n, seed=7, temperature=1.0)])[0] for n in range(40)]
    assert len(set(draws)) > 20
    others = [make_request(n, seed=n, temperature=2.0 if n % 2 else 1.0, top_k=n) for n in range(8)]
    together = torch.cat([torch.randn(8, 1000), logits])
    assert sample(together, [*others, make_request(3, seed=7, temperature=1.0)])[-1] == draws[3]


def test_without_a_seed_requests_differ() -> None:
    logits = torch.zeros(2, 10_000)
    pairs = [sample(logits, [make_request(temperature=1.0) for _ in range(2)]) for _ in range(3)]
    assert any(a != b for a, b in pairs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_name_their_request(bad: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = bad
    requests = [make_request(), make_request()]
    requests[1].request_id = "broken"
    with pytest.raises(ValueError, match="logits must be numbers, those of broken are not"):
        sample(logits, requests)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_tokens": 0}, "max_tokens must be a positive integer, got 0"),
        ({"max_tokens": True}, "max_tokens must be a positive integer"),
        ({"max_tokens": 1.5}, "max_tokens must be a positive integer"),
        ({"temperature": -0.1}, "temperature must be finite and not negative, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": float("inf")}, "temperature must be finite"),
        ({"top_k": -1}, "top_k must be a positive integer, or 0"),
        ({"top_k": 0.5}, "top_k must be a positive integer, or 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": 1.1}, "top_p must be in"),
        ({"seed": -1}, "seed must be an integer in"),
        ({"seed": 2**63}, "seed must be an integer in"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be integers"),
    ],
)
def test_bad_parameters(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)
