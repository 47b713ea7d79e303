"""Request: one prompt on its way to its tokens, and what its caller gets of it.

    tokens     [ prompt ............ | generated .. |  room for max_tokens  ]
                         ^                        ^ ^
                  num_computed                    | num_tokens
                  (K and V are in blocks)   num_room: positions that have a block; num_committed <= num_computed

A request waits (it has no blocks: num_computed = num_room = 0) or runs. While num_computed < num_room it is in prefill;
a decoding request has one token, its newest, that has no room yet: num_room = num_tokens - 1.
"""

import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.serving.sampling_params import MAX_SEED, SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came of a request.

    token_ids: the generated tokens, the stop token included.
    finish_reason: "stop" (a stop or end-of-sequence token), "length" (max_tokens) or "abort".
    num_cached_tokens: leading tokens of the prompt whose K and V were found in the cache when it was first admitted.
    arrival_time, first_token_time, finish_time: seconds of time.monotonic(); None for a first token that never came.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    num_cached_tokens: int
    arrival_time: float
    first_token_time: float | None
    finish_time: float


class StepOutput(NamedTuple):
    """The token that a step gave a request; `output` with its last one."""

    request_id: str
    token_id: int
    output: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.output.finish_reason if self.output else None


class Request:
    """The engine's own record of a request; see the picture above. `tokens` is int32 and never moves."""

    def __init__(
        self,
        request_id: str,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        arrival: int,
        eos_token_ids: frozenset[int] = frozenset(),
        namespace: bytes = b"",
        sink: deque[StepOutput] | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.arrival = arrival
        self.namespace = namespace
        self.sink = sink
        self.seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        self.tokens = np.empty(len(prompt) + params.max_tokens, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_computed = self.num_committed = self.num_room = 0
        self.num_cached_tokens: int | None = None
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_written_tokens(self) -> int:
        """The most tokens whose K and V it will ever write: the last one generated is never fed back."""
        return len(self.tokens) - 1

    @property
    def needs_room(self) -> bool:
        """It decodes, and its newest token has no slot yet."""
        return self.num_room < self.num_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens : self.num_tokens].tolist()

    def append(self, token_id: int, now: float) -> FinishReason | None:
        """Takes a new token; says whether that was the last one, and why."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.first_token_time is None:
            self.first_token_time = now
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.num_tokens == len(self.tokens):
            self.finish_reason = "length"
        return self.finish_reason

    def output(self) -> RequestOutput:
        """What came of a request that has finished."""
        assert self.finish_reason is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.tokens[: self.num_prompt_tokens].tolist(),
            token_ids=self.generated_token_ids,
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
            finish_time=time.monotonic(),
        )
