"""Sampling: greedy rows, the distribution of drawn ones, and seeds."""

import numpy as np
import pytest
import torch

from kvpage.serving import BeamSearchParams
from kvpage.serving.loop.request import Request
from kvpage.serving.params.sampling import SamplingParams
from kvpage.serving.sampling import sampler
from kvpage.serving.sampling.sampler import sample, sample_by_torch


def make_request(num_generated: int = 0, **fields: object) -> Request:
    request = Request("one", np.array([1], np.int32), SamplingParams(max_tokens=num_generated + 100, **fields), 0)
    request.num_tokens += num_generated
    return request


def test_greedy_takes_the_likeliest_and_no_requests_give_no_tokens() -> None:
    logits = torch.randn(5, 50)
    assert sample(logits, [make_request() for _ in range(5)]) == logits.argmax(-1).tolist()
    assert sample(logits[:0], []) == []


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


def test_without_a_seed_requests_differ() -> None:
    logits = torch.zeros(2, 10_000)
    pairs = [sample(logits, [make_request(temperature=1.0) for _ in range(2)]) for _ in range(3)]
    assert any(a != b for a, b in pairs)


NO_NUMBERS = {
    "max_tokens": [0, True, 1.5],
    "temperature": [True, "1", -0.1, float("nan"), float("inf")],
    "top_p": [True, "1", 0.0, 1.1, float("nan")],
    "min_p": [True, -0.1, 1.1, float("nan")],
    "top_h": [0.0, 1.5],
    "typical_p": [0.0, float("nan")],
    "epsilon_cutoff": [1.0, -1.0],
    "eta_cutoff": [1.0, "a"],
    "top_k": [True, "5", 2.0, -1, 0.5],
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
    "seed": [True, 1.5, -1, 2**63],
    "stop_token_ids": [5, "12", b"12", [True], [1.5], ["a"], None],
    "retain_priority": [True, 8],
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_every_field_says_what_it_takes(name: str) -> None:
    for value in NO_NUMBERS[name]:
        for kind in (SamplingParams, BeamSearchParams) if name == "stop_token_ids" else (SamplingParams,):
            with pytest.raises(ValueError, match=f"^{name} must"):
                kind(**{name: value})


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_values_are_removed_where_that_is_asked_for(temperature: float) -> None:
    logits = torch.tensor([[float("nan"), 1.0, float("inf"), -1.0], [0.0, 1.0, 2.0, 3.0]])
    request = make_request(temperature=temperature, remove_invalid_values=True)
    assert sample(logits, [request, make_request()]) == [2, 3]
