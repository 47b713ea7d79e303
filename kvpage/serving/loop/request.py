"""Request: one sample of a prompt on its way to its tokens.

    tokens     [ prompt ............ | generated .. |  room for max_tokens  ]
                         ^                        ^ ^
                  num_computed                    | num_tokens
                  (K and V are in blocks)   num_room: positions that have a block; num_committed <= num_computed

A request waits (it has no blocks: num_computed = num_room = 0) or runs. While num_computed < num_room it is in prefill;
a decoding request has one token, its newest, that has no room yet: num_room = num_tokens - 1.

A request for n samples is computed as one until its prompt is done. Then it is forked into n requests, which share the
prompt's blocks and a SampleGroup, and go their own ways from the first token on.

A step computes a Batch: the newest token of each request that decodes, and a Portion of each of some prefills.
"""

import secrets
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvpage.blend.segments import Reuse
from kvpage.serving.blending.blended_prompt import BlendedPrompt
from kvpage.serving.loop.outputs import FinishReason, RequestOutput, Sample, StepOutput, outputs_of_tokens
from kvpage.serving.params.sampling import DEFAULT_MAX_TOKENS, MAX_SEED, SamplingParams
from kvpage.serving.sampling.sampled_row import SampledRow

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class SampleGroup:
    """The facts that all samples of one prompt share.

    arrival: how many requests came before. sink: where outputs go; None for those that `Engine.step` returns.
    samples: the requests that exist by now, the first one first. num_cached_tokens: at the first admission.
    """

    arrival: int
    sink: deque[StepOutput] | None
    samples: list["Request"]
    is_aborted: bool = False
    num_cached_tokens: int | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None

    def note_token(self, now: float) -> None:
        """Note that a sample has a new token: the first of all has its time kept."""
        if self.first_token_time is None:
            self.first_token_time = now

    def note_cached(self, num_cached_tokens: int) -> bool:
        """Note how many tokens were cached; return whether this was the first admission."""
        if self.num_cached_tokens is not None:
            return False
        self.num_cached_tokens = num_cached_tokens
        return True

    def abort(self) -> None:
        """Note that the caller has ended all samples."""
        self.is_aborted = True

    @property
    def is_over(self) -> bool:
        """Whether all samples have finished, or were ended."""
        is_going = self.samples[0].num_forks_due or any(sample.finish_reason is None for sample in self.samples)
        return self.is_aborted or not is_going


class Request:
    """The engine's own record of one sample; see the picture above. `tokens` is int32 and never moves."""

    def __init__(
        self,
        request_id: str,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        arrival: int,
        eos_token_ids: frozenset[int] = frozenset(),
        namespace: bytes = b"",
        sink: deque[StepOutput] | None = None,
        blending: BlendedPrompt | None = None,
    ) -> None:
        self.request_id = request_id
        self.seq_id: Hashable = request_id  # in the block manager
        self.sample_index = 0
        self.group = SampleGroup(arrival, sink, [self])
        self.params = params
        self.namespace = namespace
        self.blending = blending
        self.seed = params.seed or 0
        if params.seed is None and not params.is_greedy:
            self.seed = secrets.randbelow(MAX_SEED)
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        max_tokens = DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens
        self.tokens = np.empty(len(prompt) + max_tokens, np.int32)
        self.tokens[: len(prompt)] = prompt
        self._token_memory = memoryview(self.tokens)  # of which single tokens are read and written at once
        self.sampled_row: SampledRow | None = None  # None where the likeliest token is taken as it is
        if not params.is_greedy or params.changes_logits:
            self.sampled_row = SampledRow(params, self.stop_ids, len(prompt), max_tokens)
        self.num_computed = self.num_committed = self.num_room = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    # --- the samples of its prompt -----------------------------------------------------------------------------------

    @property
    def num_forks_due(self) -> int:
        """How many more requests it will become."""
        will_fork = self.sample_index == 0 and self.finish_reason is None
        return self.params.n - len(self.group.samples) if will_fork else 0

    def forks(self) -> list["Request"]:
        """Return the requests that it will become besides itself, each with a seed of its own.

        They have no blocks, and their group does not know them: `join` makes them samples of it.
        """
        begin = len(self.group.samples)
        return [self._fork(index) for index in range(begin, begin + self.num_forks_due)]

    def _fork(self, index: int) -> "Request":
        fork = Request(self.request_id, self.prompt, self.params, 0, self.stop_ids, self.namespace)
        fork.seq_id, fork.sample_index, fork.group = (self.request_id, index), index, self.group
        fork.seed = (self.seed + index) % MAX_SEED
        return fork

    def join(self, first: "Request") -> None:
        """Make a fork a sample of its group: its blocks are those of the first, whose tokens are all committed."""
        self.num_computed = self.num_committed = first.num_computed
        self.num_room = first.num_room
        self.group.samples.append(self)

    # --- its blocks --------------------------------------------------------------------------------------------------

    @property
    def max_written_tokens(self) -> int:
        """The most tokens whose K and V it will ever write: the last one generated is never fed back."""
        return len(self.tokens) - 1

    @property
    def needs_room(self) -> bool:
        """Whether it decodes, and its newest token has no slot yet."""
        return self.num_room < self.num_tokens

    def admit(self, num_cached_tokens: int) -> bool:
        """Take room for all tokens, of which so many are cached; return whether this is the first admission."""
        self.num_computed = self.num_committed = num_cached_tokens
        self.num_room = self.num_tokens
        return self.group.note_cached(num_cached_tokens)

    def add_room(self) -> None:
        """Take room for the newest token."""
        self.num_room += 1

    def set_computed(self, num_computed: int) -> None:
        """Note that K and V of so many leading tokens are in blocks."""
        self.num_computed = num_computed

    def set_committed(self) -> None:
        """Note that all computed tokens are committed."""
        self.num_committed = self.num_computed

    def leave_blocks(self) -> None:
        """Go back to waiting, without blocks."""
        self.num_computed = self.num_committed = self.num_room = 0
        if self.blending is not None:
            self.blending.leave_blocks()

    @property
    def reuse(self) -> Sequence[Reuse]:
        """The segments that the prefill at hand reuses, all of it in one step; empty for an exact one."""
        return () if self.blending is None else self.blending.reuse

    @property
    def may_blend(self) -> bool:
        """Whether segments were found for it, so that it may have to be computed in one step."""
        return self.blending is not None and bool(self.blending.reusable)

    # --- its tokens --------------------------------------------------------------------------------------------------

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """A view of the prompt's tokens."""
        return self.tokens[: self.num_prompt_tokens]

    @property
    def num_generated(self) -> int:
        """How many tokens it has generated."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        """The tokens it has generated."""
        token_ids: list[int] = self.tokens[self.num_prompt_tokens : self.num_tokens].tolist()
        return token_ids

    def append(self, token_id: int, now: float) -> FinishReason | None:
        """Take a new token; return why it was the last one, or None."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.group.note_token(now)
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.num_tokens == len(self.tokens):
            self.finish_reason = "length"
        return self.finish_reason

    def take_back(self) -> None:
        """Forget a new token that no caller has seen, when the step of a running request fails."""
        if self.num_tokens > self.num_room > 0:
            self.num_tokens, self.finish_reason = self.num_room, None

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End it before its last token."""
        self.finish_reason, self.error = reason, error

    def output(self) -> RequestOutput:
        """Return the outcome, once all samples have finished or were aborted."""
        group, blending = self.group, self.group.samples[0].blending
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt.tolist(),
            samples=tuple(
                Sample(one.generated_token_ids, one.finish_reason or "abort", one.error) for one in group.samples
            ),
            num_cached_tokens=group.num_cached_tokens or 0,
            arrival_time=group.arrival_time,
            first_token_time=group.first_token_time,
            finish_time=time.monotonic(),
            num_reused_tokens=0 if blending is None else blending.num_reused_tokens,
            num_recomputed_tokens=0 if blending is None else blending.num_recomputed_tokens,
        )


class Portion(NamedTuple):
    """The tokens [start, end) of a request, which one step computes."""

    request: Request
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the logits of its last row give the request's next token."""
        return self.end == self.request.num_tokens


class Decodes:
    """Running requests that decode: each computes its newest token, and gets one more.

        requests        [ a    b    c    d  ]
        ends            [ 18   6    10   7  ]     int64: tokens of each, the newest included
        newest_tokens   [ 311  5    42   8  ]     int32

    The other columns are made once, for as long as the same requests decode together. `begin` moves these two on to
    the next step.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.seq_ids = [request.seq_id for request in requests]
        self.ends, self.newest_tokens = np.zeros(len(requests), np.int64), np.zeros(len(requests), np.int32)
        self._next: tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None = None  # both, if `take` was the last
        self._request_ids = [request.request_id for request in requests]
        self._sample_indices = [request.sample_index for request in requests]
        self._memory = [request._token_memory for request in requests]
        self._limits = np.array([len(request.tokens) for request in requests], np.int64)
        self._stop_ids = [request.stop_ids for request in requests]
        self._all_stop_ids = frozenset[int]().union(*set(self._stop_ids))
        self._sinks = [request.group.sink for request in requests]
        self._has_sinks = any(sink is not None for sink in self._sinks)

    def __len__(self) -> int:
        return len(self.requests)

    def begin(self) -> None:
        """Take room for the newest tokens, which the block manager has given: a step begins."""
        for request in self.requests:
            request.num_room += 1
        self.ends, self.newest_tokens = self._next or self._read()
        self._next = None

    def _read(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        ends = [request.num_tokens for request in self.requests]
        newest = [memory[end - 1] for memory, end in zip(self._memory, ends, strict=True)]
        return np.array(ends, np.int64), np.array(newest, np.int32)

    @property
    def portions(self) -> "list[Portion]":
        """The same as portions, one each."""
        return [Portion(request, end - 1, end) for request, end in zip(self.requests, self.ends.tolist(), strict=True)]

    def set_computed(self) -> None:
        """Note that K and V of the newest tokens are in blocks."""
        for request in self.requests:
            request.num_computed += 1

    def that_filled(self, block_size: int) -> list[Request]:
        """Return the requests whose newest token is the last one of a block."""
        if not self.requests:
            return []
        return [self.requests[row] for row in np.flatnonzero(self.ends % block_size == 0).tolist()]

    def last_rows(self, token_ids: Sequence[int]) -> list[int]:
        """Return the rows of those for whom the next token is the last one."""
        rows: list[int] = np.flatnonzero(self.ends + 1 == self._limits).tolist()
        if self._all_stop_ids.isdisjoint(token_ids):
            return rows
        pairs = zip(token_ids, self._stop_ids, strict=True)
        return sorted({*rows, *(row for row, (token, stop_ids) in enumerate(pairs) if token in stop_ids)})

    def take(self, token_ids: Sequence[int], default: list[StepOutput], but: Sequence[int] = ()) -> None:
        """Give each its next token, and tell its caller.

        default: takes the outputs of requests without a sink. but: rows to leave out, those of last tokens.
        """
        if not but:
            self._next = self.ends + 1, np.array(token_ids, np.int32)
        token_ids = _but(token_ids, but)
        for request, memory, token in zip(_but(self.requests, but), _but(self._memory, but), token_ids, strict=True):
            end = request.num_tokens
            memory[end] = token
            request.num_tokens = end + 1
        outputs = outputs_of_tokens(_but(self._request_ids, but), token_ids, _but(self._sample_indices, but))
        if not self._has_sinks:
            default += outputs
            return
        for sink, output in zip(_but(self._sinks, but), outputs, strict=True):
            (default if sink is None else sink).append(output)

    def without(self, requests: Iterable[Request]) -> "Decodes":
        """Return the others, amid the same step."""
        gone = set(requests)
        rows = [row for row, request in enumerate(self.requests) if request not in gone]
        others = Decodes([self.requests[row] for row in rows])
        others.ends, others.newest_tokens = self.ends[rows], self.newest_tokens[rows]
        return others


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens that one step computes, once the manager's moves are done: decodes first, then prefills."""

    decodes: Decodes
    prefills: list[Portion]

    def __len__(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def requests(self) -> list[Request]:
        """The requests, in the order of their tokens."""
        return [*self.decodes.requests, *(portion.request for portion in self.prefills)]

    @property
    def seq_ids(self) -> list[Hashable]:
        """Their ids in the block manager."""
        return [*self.decodes.seq_ids, *(portion.request.seq_id for portion in self.prefills)]

    @property
    def portions(self) -> list[Portion]:
        """All of it as portions."""
        return [*self.decodes.portions, *self.prefills]

    @property
    def num_tokens(self) -> int:
        """How many tokens all portions have."""
        return len(self.decodes) + sum(portion.num_tokens for portion in self.prefills)

    def without(self, requests: Sequence[Request]) -> "Batch":
        """Return the portions of the other requests."""
        prefills = [portion for portion in self.prefills if portion.request not in requests]
        return Batch(self.decodes.without(requests), prefills)


def _but(column: Sequence[Item], rows: Sequence[int]) -> Sequence[Item]:
    """Return the column without these rows."""
    if not rows:
        return column
    left_out = set(rows)
    return [item for row, item in enumerate(column) if row not in left_out]
