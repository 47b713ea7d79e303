"""The next token of each sequence, from its logits and its request's SamplingParams.

Greedy rows take the argmax, all in one call. The others are warped by transformers' own processors, those of equal
parameters together, and drawn by inverting the distribution function at a number that depends on the request's seed and
on how many tokens it has, and on nothing else: not on the batch, and not on whether a step was computed twice.

    weights   |--a--|b|------c------|d|     the first token whose running sum exceeds u * total
                            ^ u
"""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvpage.serving.logits_check import LogitsNotFinite, rows_not_finite
from kvpage.serving.requests import Request
from kvpage.serving.sampling_params import SamplingParams

LEAST_TEMPERATURE = 1e-300
"""Lower ones are raised to it: at both, any difference of fp32 logits, 2**-149 or more, leaves a weight of zero, and
the reciprocal, which torch multiplies by on some devices, is finite."""

Warping = tuple[float, int, float]
"""temperature, top_k, top_p"""


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """One token a row. logits: [len(requests), vocab_size]. LogitsNotFinite with rows that are no numbers."""
    if not requests:
        return []
    highest, tokens = logits.max(dim=-1)
    if bad := rows_not_finite(highest):
        raise LogitsNotFinite(bad, [requests[row].request_id for row in bad])
    for warping, rows in _drawn_rows(requests).items():
        tokens[rows] = _draw(logits[rows].double(), warping, [requests[row] for row in rows])
    return tokens.tolist()


def _drawn_rows(requests: Sequence[Request]) -> dict[Warping, list[int]]:
    """The rows that are not greedy, by what is done to their logits."""
    groups: dict[Warping, list[int]] = {}
    for row, request in enumerate(requests):
        if not request.params.is_greedy:
            groups.setdefault(_warping(request.params), []).append(row)
    return groups


def _warping(params: SamplingParams) -> Warping:
    return params.temperature, params.top_k, params.top_p


def _warpers(warping: Warping) -> LogitsProcessorList:
    temperature, top_k, top_p = warping
    warpers = LogitsProcessorList([TemperatureLogitsWarper(max(float(temperature), LEAST_TEMPERATURE))])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers


def _draw(logits: torch.Tensor, warping: Warping, requests: Sequence[Request]) -> torch.Tensor:
    """A token a row. logits: fp64 [len(requests), vocab_size], overwritten."""
    no_ids = torch.LongTensor(len(requests), 0)  # processors take the tokens so far; these do not look at them
    # The likeliest becomes 0: dividing by a temperature can then only send the others to -inf, never to inf - inf.
    logits -= logits.amax(dim=-1, keepdim=True)
    weights = _warpers(warping)(no_ids, logits).softmax(dim=-1)
    sums = weights.cumsum(dim=-1)
    points = torch.tensor([_uniform(request) for request in requests], dtype=torch.float64, device=logits.device)
    return torch.searchsorted(sums, points[:, None] * sums[:, -1:], right=True).squeeze(1)


def _uniform(request: Request) -> float:
    """A number in [0, 1 - 2**-24], so that its product with a sum stays under the sum."""
    generator = torch.Generator().manual_seed(request.seed)
    return torch.rand(request.num_generated + 1, generator=generator)[-1].item()
