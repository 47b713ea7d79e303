"""RequestState: how far an unfinished request is, as an onlooker sees it."""

from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvpage.blocks.explain import Explanation
from kvpage.serving.loop.connectors import Connectors
from kvpage.serving.loop.request import Request
from kvpage.serving.loop.scheduler import Scheduler

Stage = Literal["waiting", "loading", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RequestState:
    """How far an unfinished request is. It holds no tokens.

    Attributes:
        request_id: The id that `add_request` returned.
        sample_index: The sample; 0 until the prompt is computed.
        namespace: The namespace that its caller has named.
        stage: "waiting", "loading" (it waits for a store or for segments), "prefill" or "decode".
        num_prompt_tokens: Tokens of its prompt.
        num_cached_tokens: Tokens of the prompt that were cached on the device at the first admission. 0 before it.
        num_loaded_tokens: Tokens of the prompt that came from the host tier or a store for this request.
        num_computed_tokens: Tokens whose K and V are in its blocks now, cached and loaded ones included.
        num_generated_tokens: Tokens that it has generated.
        arrival_time: Seconds of time.monotonic() when it was queued.
        first_token_time: The same of its first token; None before it.
        explanation: See RequestOutput. None before the first admission.
    """

    request_id: str
    sample_index: int
    namespace: bytes
    stage: Stage
    num_prompt_tokens: int
    num_cached_tokens: int
    num_loaded_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    arrival_time: float
    first_token_time: float | None
    explanation: Explanation | None = None


def request_states(scheduler: Scheduler, connectors: Connectors, limit: int) -> list[RequestState]:
    """Return the states of the running requests, then of those that wait, in order, `limit` at most."""
    running = list(islice(scheduler.running, limit))
    waiting = islice(scheduler.waiting, limit - len(running))
    states = [_state_of(request, "prefill" if request.num_generated == 0 else "decode") for request in running]
    for request in waiting:
        states.append(_state_of(request, "loading" if _is_loading(request, connectors) else "waiting"))
    return states


def _is_loading(request: Request, connectors: Connectors) -> bool:
    return connectors.holds(request) or connectors.has_blocks(request)


def _state_of(request: Request, stage: Stage) -> RequestState:
    group = request.group
    is_admitted, num_found = group.num_cached_tokens is not None, group.num_cached_tokens or 0
    num_loaded = min(group.num_loaded_tokens, num_found) if is_admitted else group.num_loaded_tokens
    return RequestState(
        request_id=request.request_id,
        sample_index=request.sample_index,
        namespace=request.own_namespace,
        stage=stage,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(num_found - num_loaded, 0),
        num_loaded_tokens=num_loaded,
        num_computed_tokens=request.num_computed,
        num_generated_tokens=request.num_generated,
        arrival_time=group.arrival_time,
        first_token_time=group.first_token_time,
        explanation=group.explanation,
    )
