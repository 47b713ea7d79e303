"""Outcomes of requests that end before their last token."""

import time
from dataclasses import replace

from kvpage.serving.loop.outputs import FinishReason, RequestOutput, Sample
from kvpage.serving.loop.request import Request


def outcome_of(request: Request) -> RequestOutput:
    """Return the outcome of a request that the engine does not have, or not any more."""
    if request.group.samples:
        return request.output()
    begin, samples = request.group.arrival_time, (Sample(request.generated_token_ids, "abort"),)
    num_cached = request.group.num_cached_tokens or 0
    return RequestOutput(
        request.request_id, request.prompt.tolist(), samples, num_cached, begin, None, time.monotonic()
    )


def ended(output: RequestOutput, reason: FinishReason, error: str | None) -> RequestOutput:
    """Return the outcome with the reason, and the error, for the samples that were not complete."""
    each = [
        replace(one, finish_reason=reason, error=error) if one.finish_reason == "abort" else one
        for one in output.samples
    ]
    return replace(output, samples=tuple(each))
