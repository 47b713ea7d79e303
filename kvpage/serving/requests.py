"""Request: one prompt on its way to its tokens, and what its caller gets of it.

    tokens     [ prompt ............ | generated .. |  room for max_tokens  ]
                         ^                        ^ ^
                  num_computed                    | num_tokens
                  (K and V are in blocks)   num_room: positions that have a block; num_committed <= num_computed

A request waits (it has no blocks: num_computed = num_room = 0) or runs. While num_computed < num_room it is in prefill;
a decoding request has one token, its newest, that has no room yet: num_room = num_tokens - 1.

A request for n samples is computed as one until its prompt is done; then it is forked into n of them, which share the
prompt's blocks and go their own ways from the first token on. The one that was there first is the `first` of the others
and speaks for all.
"""

import secrets
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpage.blend.segments import Reuse
from kvpage.blend.spans import Span
from kvpage.serving.params.sampling import DEFAULT_MAX_TOKENS, MAX_SEED, SamplingParams
from kvpage.serving.sampling.sampled_row import SampledRow

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation of a prompt.

    token_ids: the generated tokens, the stop token included.
    finish_reason: "stop" (a stop or end-of-sequence token), "length" (max_tokens), "abort" or "error".
    error: the reason, where that is "error"; else None.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came of a request.

    samples: `SamplingParams.n` of them; fewer if it was aborted, or failed, before its first token.
    num_cached_tokens: leading tokens of the prompt whose K and V were found in the cache when it was first admitted.
    num_reused_tokens, num_recomputed_tokens: tokens of the prompt whose K and V came out of segments, and those of them
        that were computed again; 0 both for a prompt that was computed in full, exactly.
    arrival_time, first_token_time, finish_time: seconds of time.monotonic(); None for a first token that never came.
    """

    request_id: str
    prompt_token_ids: list[int]
    samples: tuple[Sample, ...]
    num_cached_tokens: int
    arrival_time: float
    first_token_time: float | None
    finish_time: float
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0

    @property
    def is_blended(self) -> bool:
        """It was computed from segments: its tokens are near those of a full prefill, and need not be the same."""
        return self.num_reused_tokens + self.num_recomputed_tokens > 0

    @property
    def token_ids(self) -> list[int]:
        """Those of the first sample."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """That of the first sample."""
        return self.samples[0].finish_reason

    @property
    def error(self) -> str | None:
        """The reason of the first sample that ended in an error; None if none did."""
        return next((sample.error for sample in self.samples if sample.error is not None), None)


class StepOutput(NamedTuple):
    """The token that a step gave a request, or the error that ended it.

    token_id: None with an error. sample_index: of the sample that it belongs to. finish_reason: with the sample's last
        token, or its error. output: with the last token, or the error, of the last sample. error: the reason.
    """

    request_id: str
    token_id: int | None
    sample_index: int = 0
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    error: str | None = None


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
        self.seq_id: Hashable = request_id  # in the block manager
        self.sample_index = 0
        self.first = self
        self.samples: list[Request] = [self]  # of the first: all that there are by now, itself among them
        self.is_aborted = False
        self.params = params
        self.arrival = arrival
        self.namespace = namespace
        self.sink = sink
        self.seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        max_tokens = DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens
        self.tokens = np.empty(len(prompt) + max_tokens, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.sampled_row: SampledRow | None = None  # of one with more to do than to take the likeliest token
        if not params.is_greedy or params.changes_logits:
            self.sampled_row = SampledRow(params, self.stop_ids, len(prompt), max_tokens)
        self.num_computed = self.num_committed = self.num_room = 0
        self.num_cached_tokens: int | None = None
        self.spans: Sequence[Span] = ()  # of the prompt's segments
        self.is_blend = False  # they may be reused
        self.copy_at: int | None = None  # where its one segment comes once more, by which its sensitivity is measured
        self.is_warming = False  # its segments are to be kept, whatever else there is to keep
        self.reusable: list[Reuse] | None = None  # segments that were found; None while nobody has looked
        self.reuse: list[Reuse] = []  # those of them that the prefill at hand reuses: it is one step
        self.wanted_spans: list[Span] = []  # to be kept when they are computed
        self.num_reused_tokens = self.num_recomputed_tokens = 0
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    @property
    def num_forks_due(self) -> int:
        """How many more requests it will become."""
        will_fork = self.first is self and self.finish_reason is None
        return self.params.n - len(self.samples) if will_fork else 0

    @property
    def is_over(self) -> bool:
        """All samples of its prompt have finished."""
        return self.is_aborted or not (
            self.num_forks_due or any(sample.finish_reason is None for sample in self.first.samples)
        )

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

    def take_back(self) -> None:
        """Of a request that runs, when its step fails: forgets a new token that nobody has got."""
        if self.num_tokens > self.num_room > 0:
            self.num_tokens, self.finish_reason = self.num_room, None

    def forks(self) -> list["Request"]:
        """The requests that it will become besides itself, each with a seed of its own. They have no blocks, and it
        does not know of them: the scheduler's fork is what makes them real.
        """
        return [self._fork(index) for index in range(len(self.samples), len(self.samples) + self.num_forks_due)]

    def _fork(self, index: int) -> "Request":
        fork = Request(
            self.request_id, self.prompt, self.params, self.arrival, self.stop_ids, self.namespace, self.sink
        )
        fork.seq_id, fork.sample_index, fork.first = (self.request_id, index), index, self
        fork.seed = (self.seed + index) % MAX_SEED
        fork.num_cached_tokens = self.num_cached_tokens
        return fork

    def reuse_from(self, start: int) -> list[Reuse]:
        """What was found, as far as it lies at `start` or behind it."""
        clipped = [one.behind(start) for one in self.reusable or ()]
        return [one for one in clipped if one is not None]

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        return self.tokens[: self.num_prompt_tokens]

    def output(self) -> RequestOutput:
        """What came of a request all of whose samples have finished, or that was aborted. Asked of the first."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt.tolist(),
            samples=tuple(
                Sample(one.generated_token_ids, one.finish_reason or "abort", one.error) for one in self.samples
            ),
            num_cached_tokens=self.num_cached_tokens or 0,
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
            finish_time=time.monotonic(),
            num_reused_tokens=self.num_reused_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
        )
