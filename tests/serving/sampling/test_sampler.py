"""Sampling: greedy rows, the distribution of drawn ones, and seeds."""

import math

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvpage.serving import BeamSearchParams
from kvpage.serving.loop.request import Request
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sampling import sampler
from kvpage.serving.sampling.logits_check import LogitsNotFinite
from kvpage.serving.sampling.sampler import sample, sample_by_torch

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])


def make_request(num_generated: int = 0, **fields: object) -> Request:
    request = Request("one", np.array([1], np.int32), SamplingParams(max_tokens=num_generated + 100, **fields), 0)
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


@pytest.mark.parametrize("value", [5, "12", b"12", [True], [1.5], None])
@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams])
def test_stop_token_ids_that_are_no_list_of_ids(kind: type, value: object) -> None:
    with pytest.raises(ValueError, match="stop_token_ids must be"):
        kind(stop_token_ids=value)
    assert kind(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)


NO_NUMBERS = {
    "temperature": [True, "1", float("nan")],
    "top_p": [True, "1", float("nan")],
    "min_p": [True, -0.1, 1.1, float("nan")],
    "top_h": [0.0, 1.5],
    "typical_p": [0.0, float("nan")],
    "epsilon_cutoff": [1.0, -1.0],
    "eta_cutoff": [1.0, "a"],
    "top_k": [True, "5", 2.0],
    "repetition_penalty": [0.0, -1.0, float("nan"), float("inf"), True],
    "presence_penalty": [float("nan"), float("inf"), True],
    "frequency_penalty": [float("-inf"), "a"],
    "logit_bias": [5, {1: float("nan")}, {1: float("inf")}, {1: 1.01e30}, {"a": 1.0}, {True: 1.0}, [1]],
    "sequence_bias": [5, {5: 1.0}, {(): 1.0}, {(1,): "a"}],
    "no_repeat_ngram_size": [-1, 1.5, True],
    "bad_words_ids": [5, [5], [[]], ["ab"]],
    "suppress_tokens": [5, "5", [0.5]],
    "begin_suppress_tokens": [5, [True]],
    "forced_bos_token_id": [True, 0.5],
    "forced_eos_token_id": ["a", [0.5]],
    "exponential_decay_length_penalty": [5, (1,), (0.5, 1.0), (1, float("nan"))],
    "min_tokens": [-1, True, 1.5],
    "min_length": [-1, "5"],
    "max_length": [0, True],
    "remove_invalid_values": [1, "yes"],
    "renormalize_logits": [0],
    "watermarking_config": [5, {"bias": 1.0}],
    "ignore_eos": [1, None],
    "n": [None, True, 0],
    "seed": [True, 1.5],
    "priority": [True, 8],
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_every_field_says_what_it_takes(name: str) -> None:
    for value in NO_NUMBERS[name]:
        with pytest.raises(ValueError, match=f"^{name} must"):
            SamplingParams(**{name: value})


def make_mixed(num_rows: int, vocab_size: int) -> list[Request]:
    """Parameters that all differ, each kind beside each other."""
    requests = []
    for row in range(num_rows):
        fields = {"temperature": 0.0 if row % 7 == 0 else 0.3 + row / 40, "seed": row}
        fields |= {"top_k": (0, 3, 40, 600)[row % 4], "top_p": (1.0, 0.9, 0.5)[row % 3]}
        fields |= {"min_p": 0.05 if row % 5 == 0 else None, "repetition_penalty": 1.3 if row % 2 else None}
        fields |= {"logit_bias": {row % vocab_size: 9.0} if row % 11 == 0 else None}
        fields |= {"frequency_penalty": 0.4 if row % 6 == 0 else None, "typical_p": 0.8 if row % 13 == 0 else None}
        request = make_request(row % 9, **fields)
        request.request_id = str(row)
        request.tokens[: request.num_tokens] = np.random.default_rng(row).integers(0, vocab_size, request.num_tokens)
        requests.append(request)
    return requests


@pytest.mark.parametrize("vocab_size", [5, 127, 128, 129, 640, 5000])
def test_by_torch_a_row_alone_is_the_row_in_a_batch(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: the scores that it is drawn by, and so the token. Rows are taken in parts of three sizes."""
    requests, seen = make_mixed(60, vocab_size), {}
    logits = torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    draw = sampler._draw

    def keep(scores: torch.Tensor, points: np.ndarray) -> torch.Tensor:
        seen.update(zip(points.tolist(), scores.clone(), strict=True))
        return draw(scores, points)

    monkeypatch.setattr(sampler, "_draw", keep)
    together = sample_by_torch(logits, requests)
    scores_together = dict(seen)
    for part_size in (1, 7 * vocab_size):
        seen.clear()
        monkeypatch.setattr(sampler, "PART_SIZE", part_size)
        assert sample_by_torch(logits, requests) == together
        assert all(torch.equal(scores, scores_together[point]) for point, scores in seen.items())
    alone = [sample_by_torch(logits[row : row + 1], [request])[0] for row, request in enumerate(requests)]
    assert alone == together and len(seen) == len(scores_together)


@pytest.mark.parametrize("fields", [{}, {"top_k": 30}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 50, "top_p": 0.9}])
def test_draws_over_many_blocks_follow_the_distribution(fields: dict) -> None:
    """Chi-square against transformers' own warpers, generous; and nothing that these leave out."""
    vocab_size, num_draws, temperature = 1000, 20_000, 0.8
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    requests = [make_request(position, seed=5, temperature=temperature, **fields) for position in range(num_draws)]
    tokens = torch.tensor(sample(logits.expand(num_draws, -1), requests))
    expected = logits.double() / temperature
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        expected = warper(fields[name])(None, expected) if name in fields else expected
    weights = expected.softmax(-1)[0]
    counts = torch.bincount(tokens, minlength=vocab_size).double()
    assert (counts[weights == 0] == 0).all()
    often = weights * num_draws >= 5
    parts = torch.cat([weights[often], weights[~often].sum()[None]]) * num_draws
    found = torch.cat([counts[often], counts[~often].sum()[None]])
    statistic = ((found - parts) ** 2 / parts.clamp(min=1e-9))[parts > 0].sum()
    degrees = int((parts > 0).sum()) - 1
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5 + 10


def test_tokens_as_likely_as_the_last_one_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).expand(500, -1)
    for fields in ({"top_k": 2}, {"top_p": 0.75}):
        tokens = sample(logits, [make_request(seed=seed, temperature=1.0, **fields) for seed in range(500)])
        assert set(tokens) == {0, 1, 2, 3}


def test_penalties_follow_what_was_generated() -> None:
    """Of the prompt's tokens the repetition_penalty alone; frequency each time; also after a token is taken back."""
    logits = torch.tensor([[4.0, 3.5, 3.0, -1.0]])

    def chosen(tokens: list[int], **fields: object) -> int:
        request = Request("one", np.array([0], np.int32), SamplingParams(max_tokens=9, temperature=0.0, **fields), 0)
        request.tokens[: len(tokens)], request.num_tokens = tokens, len(tokens)
        return sample(logits, [request])[0]

    assert chosen([0]) == 0 and chosen([0], repetition_penalty=2.0) == 1 and chosen([0], presence_penalty=2.0) == 0
    assert chosen([0, 0], presence_penalty=0.6) == 1 and chosen([0, 0], frequency_penalty=0.6) == 1
    assert chosen([0, 0, 1], presence_penalty=0.6) == 0 and chosen([0, 0, 0, 1, 1], frequency_penalty=0.6) == 2
    assert chosen([0], repetition_penalty=1.05) == 0 and chosen([0], logit_bias={3: 6.0}) == 3
    request = Request("one", np.array([2], np.int32), SamplingParams(max_tokens=9, presence_penalty=9.0), 0)
    for token, length, expected in ((0, 2, 1), (1, 3, 2), (1, 2, 1), (3, 3, 1)):
        request.tokens[length - 1] = token if length > 2 or expected == 1 and token == 0 else 0
        request.num_tokens = length
        assert sample(logits, [request]) == [expected]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_names_its_request(temperature: float) -> None:
    requests = [make_request(), make_request(temperature=temperature, suppress_tokens=range(5))]
    with pytest.raises(LogitsNotFinite) as error:
        sample(LOGITS.expand(2, -1), requests)
    assert error.value.rows == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_values_are_removed_where_that_is_asked_for(temperature: float) -> None:
    logits = torch.tensor([[float("nan"), 1.0, float("inf"), -1.0], [0.0, 1.0, 2.0, 3.0]])
    request = make_request(temperature=temperature, remove_invalid_values=True)
    assert sample(logits, [request, make_request()]) == [2, 3]
